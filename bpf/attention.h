/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Frames that lie on the ring of an owner who is awake, and computes. Nobody is woken for them, since the owner will
 * look by itself; but if it has not looked after a while, its background thread is woken to go on with the protocol
 * in its place.
 *
 * A timer is dear, most of all in a virtual machine. So the while doubles each time that the owner is found to have
 * looked, up to 16 times, and is short again as soon as it has not.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "maps.h"

/* How long frames may lie there, at the least. */
#define ATTENTION_NS (150 * 1000)
#define ATTENTION_DOUBLINGS 4

#define CLOCK_MONOTONIC 1

static __always_inline __u64 attention_while(const struct attention *attention)
{
	return ATTENTION_NS << (attention->doublings & 7);
}

static int look_for_owner(void *map __attribute__((unused)), __u32 *number,
			  struct attention *attention)
{
	void *ring = bpf_map_lookup_elem(&rings, number);
	void *record;
	__u64 consumed;

	attention->is_started = 0;
	if (!ring)
		return 0;
	consumed = bpf_ringbuf_query(ring, BPF_RB_CONS_POS);
	if (consumed != attention->consumed && attention->doublings < ATTENTION_DOUBLINGS)
		attention->doublings += 1;
	if (!bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA))
		return 0;
	if (consumed != attention->consumed) {
		/* It has looked, and more has come since. */
		attention->consumed = consumed;
		attention->is_started = 1;
		bpf_timer_start(&attention->timer, attention_while(attention), 0);
		return 0;
	}
	attention->doublings = 0;
	/* Only what is submitted or discarded can wake. */
	record = bpf_ringbuf_reserve(ring, sizeof(__u64), 0);
	if (record)
		bpf_ringbuf_discard(record, BPF_RB_FORCE_WAKEUP);
	count(receive_unattended);
	return 0;
}

/* A frame was put into that ring without waking its owner. */
static __always_inline void expect_attention(void *ring, __u32 number)
{
	struct attention *attention = bpf_map_lookup_elem(&attentions, &number);

	if (!attention || attention->is_started)
		return;
	if (!attention->is_made) {
		/* Fails where another processor was first, and once no program has the map any more. */
		bpf_timer_init(&attention->timer, &attentions, CLOCK_MONOTONIC);
		if (bpf_timer_set_callback(&attention->timer, look_for_owner))
			return;
		attention->is_made = 1;
	}
	attention->is_started = 1;
	attention->consumed = bpf_ringbuf_query(ring, BPF_RB_CONS_POS);
	bpf_timer_start(&attention->timer, attention_while(attention), 0);
}

#endif
