/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Receive budgets: what exceeds a budget is dropped before anything is spent on it, and charged to
 * the owner of the channel it was for (NE 5.2).
 *
 * A budget is kept by the virtual clock of GCRA (ITU-T I.371): each packet advances the clock by its
 * price; the amount by which it is ahead of the time is the credit used, at most the burst. Concurrent
 * CPUs may each let one packet through, but every packet is paid for.
 */
#ifndef BUDGET_H
#define BUDGET_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "context.h"
#include "counters.h"
#include "maps.h"

#define charge_loss(channel, what)                                                                 \
	do {                                                                                       \
		__u32 owner = channel;                                                             \
		struct losses *suffered = bpf_map_lookup_elem(&losses, &owner);                    \
                                                                                                   \
		if (suffered)                                                                      \
			__sync_fetch_and_add(&suffered->what, 1);                                  \
	} while (0)

static __always_inline bool is_budgeted(const struct flow_row *row)
{
	return row->budget != 0;
}

/* A packet merged by a device or its offload counts as the original packets. */
static __always_inline __u64 packets_of(hook_context *packet)
{
	__u64 size = segment_size_of(packet);

	return size ? (length_of(packet) + size - 1) / size : 1;
}

static __always_inline bool goes_early(const struct flow_row *row, const struct budget *budget)
{
	__u64 priority = budget->priority;
	__u32 number = ring_of(row);
	__u64 size;
	void *ring;

	if (priority >= PRIORITY_LAST)
		return false;
	ring = bpf_map_lookup_elem(&rings, &number);
	if (!ring)
		return false;
	size = bpf_ringbuf_query(ring, BPF_RB_RING_SIZE);
	return bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA) * 8 >= size * (priority + 1);
}

/* Whether a clock has credit at this time. A clock that lags behind does not accumulate credit. */
static __always_inline bool has_room(__u64 *paid, __u64 now, __u64 burst)
{
	__u64 until = *(volatile __u64 *)paid;

	if (until <= now) {
		/* Fails if another CPU has done it. */
		__sync_val_compare_and_swap(paid, until, now);
		return true;
	}
	return until - now <= burst;
}

/*
 * Whether the frame must be dropped; updates the counters. Global, so that the verifier checks it once.
 */
__noinline int exceeds_budget(hook_context *packet, const struct flow_row *row)
{
	__u64 now = bpf_ktime_get_ns() << 6;
	struct budget *budget;
	__u64 packets;
	__u32 index;

	if (!row)
		return 0;
	index = row->budget;
	budget = bpf_map_lookup_elem(&budgets, &index);
	if (!budget)
		return 0;
	packets = packets_of(packet);
	if (goes_early(row, budget)) {
		__sync_fetch_and_add(&budget->early, packets);
		charge_loss(row->channel, early);
		count(receive_drop_early);
		return 1;
	}
	if ((budget->packet_price && !has_room(&budget->packets_paid, now, budget->burst)) ||
	    (budget->byte_price && !has_room(&budget->bytes_paid, now, budget->burst))) {
		__sync_fetch_and_add(&budget->dropped, packets);
		charge_loss(row->channel, over_budget);
		count(receive_drop_over_budget);
		return 1;
	}
	__sync_fetch_and_add(&budget->packets_paid, packets * budget->packet_price);
	__sync_fetch_and_add(&budget->bytes_paid, length_of(packet) * budget->byte_price >> 14);
	__sync_fetch_and_add(&budget->passed, packets);
	return 0;
}

#endif
