/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Frames that lie on the ring of an owner who is awake, and computes. Nobody is woken for them, since the owner will
 * look by itself; but if it has not looked for a while, its background thread is woken to go on with the protocol
 * in its place. The owner says when it looked last, so that a frame that comes later than that wakes at once. For those
 * that come before, a timer looks.
 *
 * A timer is dear, most of all in a virtual machine. So the while doubles each time that the timer finds that the owner
 * has looked, up to 16 times, and is short again as soon as it has not, or has not been asked for a moment. Owners that
 * could not send all, and those that look again and again without a clock, are asked apart from others: who leaves off
 * from that and computes is not what was learned about, and the timer that was started before comes forward.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "maps.h"

#define load_once(x) (*(volatile typeof(x) *)&(x))
#define store_once(x, value) (*(volatile typeof(x) *)&(x) = (value))

/* How long frames may lie there, at the least. */
#define ATTENTION_NS (150 * 1000)
#define ATTENTION_DOUBLINGS 4
/* How long a look in vain counts. */
#define ATTENTION_MEMORY_NS (10 * 1000 * 1000)

#define CLOCK_MONOTONIC 1

#define ATTENTION_OTHER 0
#define ATTENTION_WINDOW 1
#define ATTENTION_POLLING 2

static __always_inline __u32 kind_of(const struct doorbell *doorbell)
{
	if (load_once(doorbell->awaits_window))
		return ATTENTION_WINDOW;
	return load_once(doorbell->attended_at) ? ATTENTION_OTHER : ATTENTION_POLLING;
}

/* For the verifier: an index. */
static __always_inline __u32 index_of(__u32 kind)
{
	return kind < ATTENTION_KINDS ? kind : 0;
}

static __always_inline __u32 *doublings_of(struct attention *attention)
{
	return &attention->doublings[index_of(attention->kind)];
}

/* How long frames may lie there that come now, to an owner of that kind. */
static __always_inline __u64 patience_with(struct attention *attention, __u32 kind, __u64 now)
{
	__u32 *doublings = &attention->doublings[index_of(kind)];

	if (now - attention->vain_at[index_of(kind)] > ATTENTION_MEMORY_NS)
		*doublings = 0;
	return (__u64)ATTENTION_NS << (*doublings & 7);
}

static __always_inline void start_timer(struct attention *attention, __u64 now)
{
	__u64 patience = patience_with(attention, attention->kind, now);

	attention->is_started = 1;
	attention->due = now + patience;
	bpf_timer_start(&attention->timer, patience, 0);
}

/* True if frames wait, and nobody has taken any for the while. */
static __always_inline bool is_left_alone(struct attention *attention, __u64 consumed, __u64 now)
{
	if (consumed != attention->consumed) {
		attention->consumed = consumed;
		attention->since = now;
		return false;
	}
	return now - attention->since >= ATTENTION_NS;
}

static int look_for_owner(void *map __attribute__((unused)), __u32 *number,
			  struct attention *attention)
{
	void *ring = bpf_map_lookup_elem(&rings, number);
	__u64 now = bpf_ktime_get_ns();
	__u32 *doublings = doublings_of(attention);
	__u64 consumed;
	void *record;

	attention->is_started = 0;
	if (!ring)
		return 0;
	consumed = bpf_ringbuf_query(ring, BPF_RB_CONS_POS);
	if (!is_left_alone(attention, consumed, now)) {
		attention->vain_at[index_of(attention->kind)] = now;
		if (*doublings < ATTENTION_DOUBLINGS)
			*doublings += 1;
		/* It has looked, and perhaps more has come since. */
		if (bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA))
			start_timer(attention, now);
		return 0;
	}
	if (!bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA))
		return 0;
	*doublings = 0;
	/* Only what is submitted or discarded can wake. */
	record = bpf_ringbuf_reserve(ring, sizeof(__u64), 0);
	if (record)
		bpf_ringbuf_discard(record, BPF_RB_FORCE_WAKEUP);
	count(receive_unattended);
	return 0;
}

/* The frames that came before this one have been left alone. */
static __always_inline bool is_overdue(struct attention *attention, void *ring, __u64 now)
{
	if (!is_left_alone(attention, bpf_ringbuf_query(ring, BPF_RB_CONS_POS), now))
		return false;
	attention->since = now;
	*doublings_of(attention) = 0;
	return true;
}

/* The owner looked last so long ago that it computes; once for each of its looks. */
static __always_inline bool is_away(struct attention *attention, const struct doorbell *doorbell,
				    __u64 now)
{
	__u64 attended_at = load_once(doorbell->attended_at);

	if (!attended_at || attended_at == attention->woken_after ||
	    (__s64)(now - attended_at) < ATTENTION_NS)
		return false;
	attention->woken_after = attended_at;
	return true;
}

static __always_inline void expect_attention(struct attention *attention, void *ring,
					     const struct doorbell *doorbell, __u64 now)
{
	if (!attention->is_made) {
		/* Fails where another processor was first, and once no program has the map any more. */
		bpf_timer_init(&attention->timer, &attentions, CLOCK_MONOTONIC);
		if (bpf_timer_set_callback(&attention->timer, look_for_owner))
			return;
		attention->is_made = 1;
	}
	attention->kind = kind_of(doorbell);
	attention->consumed = bpf_ringbuf_query(ring, BPF_RB_CONS_POS);
	attention->since = now;
	start_timer(attention, now);
}

/* The timer was started for an owner that did something else, with whom it has much more patience. */
static __always_inline bool is_to_come_forward(struct attention *attention, __u32 kind, __u64 now)
{
	return kind != attention->kind &&
	       attention->due > now + patience_with(attention, kind, now) + ATTENTION_NS;
}

/*
 * A frame is about to be put into that ring, whose owner is awake. True if the owner's background thread is to be woken
 * for it; else the timer sees to that.
 */
static __always_inline bool wants_attention_now(const struct doorbell *doorbell, void *ring,
						__u32 number, __u64 now)
{
	struct attention *attention;

	if (!load_once(doorbell->wants_attention))
		return false;
	attention = bpf_map_lookup_elem(&attentions, &number);
	if (!attention)
		return false;
	if (is_away(attention, doorbell, now) ||
	    (attention->is_started && is_overdue(attention, ring, now))) {
		count(receive_unattended);
		return true;
	}
	if (!attention->is_started || is_to_come_forward(attention, kind_of(doorbell), now))
		expect_attention(attention, ring, doorbell, now);
	return false;
}

#endif
