/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Frames on the ring of an owner that is awake but computes. They wake nobody, since the owner will poll the ring; but
 * if it has not polled for a while, its background thread is woken to continue the protocol in its place. The owner
 * publishes the time of its last poll: a frame that arrives long enough after that wakes the thread at once. For frames
 * that arrive earlier, a timer checks.
 *
 * A timer is expensive, above all in a virtual machine. So its interval doubles, up to 16 times the minimum, each time
 * it fires needlessly because the owner has polled. It is reset when the owner has not polled, or after a pause. Owners
 * limited by a window, and those that poll continuously without a clock, are tracked separately: an owner that changes
 * from one kind to another is not what was measured, and a timer already started is brought forward.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "maps.h"

#define load_once(x) (*(volatile typeof(x) *)&(x))
#define store_once(x, value) (*(volatile typeof(x) *)&(x) = (value))

/* Minimum time that frames may stay on the ring. */
#define ATTENTION_NS (150 * 1000)
#define ATTENTION_DOUBLINGS 4
/* How long a timer that fired needlessly affects the interval. */
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

/* Bounds an index for the verifier. */
static __always_inline __u32 index_of(__u32 kind)
{
	return kind < ATTENTION_KINDS ? kind : 0;
}

static __always_inline __u32 *doublings_of(struct attention *attention)
{
	return &attention->doublings[index_of(attention->kind)];
}

/* How long frames arriving now may stay on the ring of an owner of that kind. */
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

/* True if frames are pending and none was consumed for ATTENTION_NS. */
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
		/* The owner has polled; more frames may have arrived since. */
		if (bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA))
			start_timer(attention, now);
		return 0;
	}
	if (!bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA))
		return 0;
	*doublings = 0;
	/* Only submitting or discarding a record can wake up. */
	record = bpf_ringbuf_reserve(ring, sizeof(__u64), 0);
	if (record)
		bpf_ringbuf_discard(record, BPF_RB_FORCE_WAKEUP);
	count(receive_unattended);
	return 0;
}

/* Whether the earlier frames have not been polled in time. */
static __always_inline bool is_overdue(struct attention *attention, void *ring, __u64 now)
{
	if (!is_left_alone(attention, bpf_ringbuf_query(ring, BPF_RB_CONS_POS), now))
		return false;
	attention->since = now;
	*doublings_of(attention) = 0;
	return true;
}

/* Whether the owner last polled so long ago that it must be computing; true once per poll. */
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
		/* Fails if another CPU was first, and once no program has the map any more. */
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

/* Whether the timer was started for an owner of another kind, with a much longer interval. */
static __always_inline bool is_to_come_forward(struct attention *attention, __u32 kind, __u64 now)
{
	return kind != attention->kind &&
	       attention->due > now + patience_with(attention, kind, now) + ATTENTION_NS;
}

/* As below, for an owner that wants attention. Global, so that the verifier checks it once. */
__noinline int is_left_waiting(const struct doorbell *doorbell, __u32 number, __u64 now)
{
	struct attention *attention = bpf_map_lookup_elem(&attentions, &number);
	void *ring = bpf_map_lookup_elem(&rings, &number);

	if (!attention || !ring || !doorbell)
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

/*
 * Called before a frame is put into a ring whose owner is awake. Returns true if the frame must wake the owner's
 * background thread; otherwise the timer takes care of it.
 */
static __always_inline bool wants_attention_now(const struct doorbell *doorbell, __u32 number,
						__u64 now)
{
	return load_once(doorbell->wants_attention) && is_left_waiting(doorbell, number, now);
}

#endif
