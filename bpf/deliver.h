/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Hands a frame to the owner of a channel: a copy in its ring behind a record header, or the frame
 * itself through its tap while it sleeps there.
 *
 * Waking. The owner sleeps like this: store ASLEEP; full barrier; if the ring's producer position
 * differs from its own consumer position, do not sleep (even if the first record is still busy).
 * Here: reserve, which moves the producer position; full barrier; load the state; submit. One of
 * the two always sees the other. Who submits to a sleeper sets AWAKE, so that one frame rings once.
 */
#ifndef DELIVER_H
#define DELIVER_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "maps.h"

#define load_once(x) (*(volatile typeof(x) *)&(x))
#define store_once(x, value) (*(volatile typeof(x) *)&(x) = (value))

/* A 64 KiB packet with its Ethernet header and room to spare. */
#define LARGEST_RECORD (66 * 1024)

/*
 * One reservation of a constant size, as the verifier of Linux 6.1 demands, and one copy. The copy
 * cannot fail: length is the skb's own.
 */
static __always_inline struct record_header *copy(struct __sk_buff *skb, void *ring,
						  const __u64 size, __u64 length)
{
	struct record_header *record = bpf_ringbuf_reserve(ring, size, 0);

	if (record)
		bpf_skb_load_bytes(skb, 0, record + 1, length);
	return record;
}

#define COPY_IF_FITS(size)                                                                         \
	do {                                                                                       \
		if (length <= (size) - sizeof(struct record_header))                               \
			return copy(skb, ring, size, length);                                      \
	} while (0)

/* length is in 1..=LARGEST_RECORD - sizeof(struct record_header). */
static __always_inline struct record_header *copy_in_class(struct __sk_buff *skb, void *ring,
							   __u64 length)
{
	COPY_IF_FITS(256);
	COPY_IF_FITS(512);
	COPY_IF_FITS(1024);
	COPY_IF_FITS(2 * 1024);
	COPY_IF_FITS(4 * 1024);
	COPY_IF_FITS(9 * 1024);
	COPY_IF_FITS(16 * 1024);
	COPY_IF_FITS(32 * 1024);
	return copy(skb, ring, LARGEST_RECORD, length);
}

/* Submits a record and wakes the owner if it sleeps. */
static __always_inline void submit(struct record_header *record, struct doorbell *doorbell)
{
	/* Its value is fetched so that it is a full barrier on every machine. */
	__u64 before = __sync_fetch_and_add(&doorbell->delivered, 1);
	__u32 state;

	asm volatile("" : : "r"(before) : "memory");
	state = load_once(doorbell->state);
	if (state == DOORBELL_AWAKE) {
		bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
		return;
	}
	/* ASLEEP_ON_TAP stays: its owner sees to the order between tap and ring. */
	if (state == DOORBELL_ASLEEP)
		store_once(doorbell->state, DOORBELL_AWAKE);
	bpf_ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

/* The stamp takes the place of addresses that the owner has no use for. */
static __always_inline int deliver_on_tap(struct __sk_buff *skb, const struct tap_stamp *stamp,
					  __u32 channel, struct doorbell *doorbell)
{
	struct channel *entry = bpf_map_lookup_elem(&channels, &channel);

	if (!entry || !entry->tap_ifindex) {
		count(receive_drop_no_channel);
		return TC_ACT_SHOT;
	}
	if (bpf_skb_store_bytes(skb, 0, stamp, sizeof(*stamp), 0)) {
		count(receive_drop_no_channel);
		return TC_ACT_SHOT;
	}
	__sync_fetch_and_add(&doorbell->delivered, 1);
	__sync_fetch_and_add(&doorbell->by_tap, 1);
	count(receive_delivered_on_tap);
	return bpf_redirect(entry->tap_ifindex, 0);
}

/* Answers what becomes of the frame: dropped (its copy lives on), or redirected. */
static __always_inline int deliver(struct __sk_buff *skb, const struct flow_row *row, __u16 flags)
{
	__u32 channel = row->channel, slot = row->slot, generation = row->generation, zero = 0;
	void *ring = bpf_map_lookup_elem(&rings, &channel);
	void *page = bpf_map_lookup_elem(&doorbells, &channel);
	struct record_header *record;
	struct doorbell *doorbell;
	__u64 length = skb->len;

	if (!ring || !page || !(doorbell = bpf_map_lookup_elem(page, &zero))) {
		count(receive_drop_no_channel);
		return TC_ACT_SHOT;
	}
	if (!(flags & (RECORD_ICMP_ERROR | RECORD_HELD)) &&
	    load_once(doorbell->state) == DOORBELL_ASLEEP_ON_TAP) {
		__u32 ifindex = skb->ifindex;
		struct tap_stamp stamp = { slot, generation, flags,
					   ifindex <= 0xffff ? ifindex : 0 };

		return deliver_on_tap(skb, &stamp, channel, doorbell);
	}
	if (length == 0 || length > LARGEST_RECORD - sizeof(*record)) {
		count(receive_drop_too_long);
		return TC_ACT_SHOT;
	}
	record = copy_in_class(skb, ring, length);
	if (!record) {
		__sync_fetch_and_add(&doorbell->overflow, 1);
		count(receive_drop_ring_full);
		return TC_ACT_SHOT;
	}
	record->length = length;
	record->gso_size = skb->gso_size;
	record->flags = flags;
	record->slot = slot;
	record->generation = generation;
	record->timestamp = bpf_ktime_get_ns();
	record->ifindex = skb->ifindex;
	record->reserved = 0;
	submit(record, doorbell);
	if (flags & RECORD_HELD)
		count(receive_held_fragment);
	else
		count(flags & RECORD_ICMP_ERROR ? receive_delivered_icmp_error : receive_delivered);
	return TC_ACT_SHOT;
}

#endif
