/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Delivers a frame to the owner of a channel: a copy in its ring behind a record header, or the frame
 * itself through its tap while the owner sleeps there.
 *
 * Wake-up. The owner goes to sleep as follows: store ASLEEP; full barrier; if the ring's producer
 * position differs from its own consumer position, do not sleep (even if the first record is busy).
 * Here: reserve, which advances the producer position; full barrier; load the state; submit. One of
 * the two always sees the other. A submitter that finds ASLEEP sets AWAKE, so that it wakes once.
 */
#ifndef DELIVER_H
#define DELIVER_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "attention.h"
#include "budget.h"
#include "context.h"
#include "counters.h"
#include "maps.h"

/* A 64 KiB packet with its Ethernet header and room to spare. */
#define LARGEST_RECORD (66 * 1024)

/*
 * One reservation of a constant size, as the verifier of Linux 6.1 requires, and one copy behind the
 * missing bytes of the frame. The copy cannot fail: `length` is the packet's own length.
 */
static __always_inline struct record_header *copy(hook_context *packet, void *ring,
						  const __u64 size, __u64 length,
						  const __u32 missing)
{
	struct record_header *record = bpf_ringbuf_reserve(ring, size, 0);
	__u8 *frame;

	if (!record)
		return NULL;
	frame = (__u8 *)(record + 1);
	if (missing) {
		__builtin_memset(frame, 0, ETH_HLEN);
		*(__be16 *)(frame + 12) = protocol_of(packet);
		frame += ETH_HLEN;
	}
	load_bytes(packet, 0, frame, length);
	return record;
}

#define COPY_IF_FITS(size)                                                                         \
	do {                                                                                       \
		if (length <= (size) - sizeof(struct record_header) - missing)                     \
			return copy(packet, ring, size, length, missing);                             \
	} while (0)

/* length is in 1..=LARGEST_RECORD - sizeof(struct record_header) - missing. */
static __always_inline struct record_header *copy_in_class(hook_context *packet, void *ring,
							   __u64 length, const __u32 missing)
{
	COPY_IF_FITS(256);
	COPY_IF_FITS(512);
	COPY_IF_FITS(1024);
	COPY_IF_FITS(2 * 1024);
	COPY_IF_FITS(4 * 1024);
	COPY_IF_FITS(9 * 1024);
	COPY_IF_FITS(16 * 1024);
	COPY_IF_FITS(32 * 1024);
	return copy(packet, ring, LARGEST_RECORD, length, missing);
}

/* Submits a record and wakes the owner if it sleeps. */
static __always_inline void submit(struct record_header *record, struct doorbell *doorbell,
				   __u32 number)
{
	__u64 now = record->timestamp;
	/* The result is used, so that the operation is a full barrier on every architecture. */
	__u64 before = __sync_fetch_and_add(&doorbell->delivered, 1);
	__u32 state;

	asm volatile("" : : "r"(before) : "memory");
	state = load_once(doorbell->state);
	if (state == DOORBELL_AWAKE) {
		bpf_ringbuf_submit(record, wants_attention_now(doorbell, number, now) ?
						   BPF_RB_FORCE_WAKEUP :
						   BPF_RB_NO_WAKEUP);
		return;
	}
	/* ASLEEP_ON_TAP stays: the owner keeps the order between tap and ring. */
	if (state == DOORBELL_ASLEEP)
		store_once(doorbell->state, DOORBELL_AWAKE);
	bpf_ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

/* The metadata replaces the Ethernet addresses, which the owner does not need. */
static __always_inline int deliver_on_tap(hook_context *packet, const struct tap_metadata *stamp,
					  __u32 channel, struct doorbell *doorbell)
{
	struct channel *entry = bpf_map_lookup_elem(&channels, &channel);

	if (!entry || !entry->tap_ifindex) {
		count(receive_drop_no_channel);
		return VERDICT_DROP;
	}
	if (store_bytes(packet, stamp, sizeof(*stamp))) {
		count(receive_drop_no_channel);
		return VERDICT_DROP;
	}
	__sync_fetch_and_add(&doorbell->delivered, 1);
	__sync_fetch_and_add(&doorbell->by_tap, 1);
	count(receive_delivered_on_tap);
	return bpf_redirect(entry->tap_ifindex, 0);
}

/* How a frame is put into a ring. */
struct delivery {
	/* Flags of the record. */
	__u16 flags;
	/* ETH_HLEN if the frame lacks its Ethernet header, else 0. */
	__u16 missing;
	/* Index of the device on which it arrived. */
	__u32 interface;
};

/* The doorbell of the owner of a row's ring. */
static __always_inline struct doorbell *doorbell_of(const struct flow_row *row)
{
	__u32 number = ring_of(row);
	void *page = bpf_map_lookup_elem(&doorbells, &number);
	__u32 zero = 0;

	return page ? bpf_map_lookup_elem(page, &zero) : NULL;
}

/*
 * Copies the frame into the row's ring; the caller has checked the budget. Global, so that the verifier checks it once
 * and not for every path to it. Returns 0.
 */
__noinline int deliver_by_ring(hook_context *packet, const struct flow_row *row,
			       const struct delivery *delivery)
{
	struct record_header *record;
	struct doorbell *doorbell;
	__u64 length = length_of(packet);
	__u32 number;
	void *ring;

	if (!row || !delivery)
		return 0;
	number = ring_of(row);
	ring = bpf_map_lookup_elem(&rings, &number);
	doorbell = doorbell_of(row);
	if (!ring || !doorbell) {
		count(receive_drop_no_channel);
		return 0;
	}
	if (length == 0 || length > LARGEST_RECORD - sizeof(*record) - ETH_HLEN) {
		count(receive_drop_too_long);
		return 0;
	}
	if (delivery->missing)
		record = copy_in_class(packet, ring, length, ETH_HLEN);
	else
		record = copy_in_class(packet, ring, length, 0);
	if (!record) {
		__sync_fetch_and_add(&doorbell->overflow, 1);
		charge_loss(row->channel, ring_full);
		count(receive_drop_ring_full);
		return 0;
	}
	record->length = length + delivery->missing;
	record->gso_size = segment_size_of(packet);
	record->flags = delivery->flags;
	record->slot = row->slot;
	record->generation = row->generation;
	record->timestamp = bpf_ktime_get_ns();
	record->ifindex = delivery->interface;
	record->reserved = 0;
	submit(record, doorbell, number);
	if (delivery->flags & RECORD_EARLY_FRAGMENT)
		count(receive_held_fragment);
	else if (delivery->flags & RECORD_ICMP_ERROR)
		count(receive_delivered_icmp_error);
	else if (delivery->flags & RECORD_RAW)
		count(receive_delivered_raw);
	else if (delivery->flags & RECORD_COPY)
		count(receive_delivered_copy);
	else if (HOOK_IS_DRIVERS)
		count(receive_delivered_in_driver);
	else if (row->ring)
		count(receive_delivered_direct);
	else
		count(receive_delivered);
	return 0;
}

/*
 * A frame with segmentation pending must be delivered as a whole: the tap would segment it, and the
 * owner counts frames. The tap takes TCP's as a whole.
 */
static __always_inline bool may_go_by_tap(hook_context *packet, __u8 protocol, __u16 flags)
{
	return !(flags & (RECORD_ICMP_ERROR | RECORD_EARLY_FRAGMENT)) &&
	       !(protocol == IPPROTO_UDP && segment_size_of(packet));
}

/* If the owner sleeps there, or the session gets all frames by the tap (MB §4.1: IPC). */
static __always_inline bool goes_by_tap(const struct flow_row *row, const struct doorbell *doorbell)
{
	return row->flags & ROW_BY_TAP || load_once(doorbell->state) == DOORBELL_ASLEEP_ON_TAP;
}

/*
 * Delivers a frame of a raw protocol. Always by the ring: with tap delivery the sender's address would be lost. Global
 * as above.
 */
__noinline int deliver_raw(hook_context *packet, const struct flow_row *row, __u32 interface)
{
	const struct delivery delivery = { .flags = RECORD_RAW, .interface = interface };

	if (!row)
		return VERDICT_PASS;
	if (is_budgeted(row) && exceeds_budget(packet, row))
		return VERDICT_DROP;
	deliver_by_ring(packet, row, &delivery);
	return VERDICT_DROP;
}

/* Returns the verdict for the frame: dropped (the copy is delivered), or redirected. */
static __always_inline int deliver(hook_context *packet, const struct flow_row *row,
				   __u8 protocol, __u16 flags, __u32 interface)
{
	struct doorbell *doorbell = doorbell_of(row);
	const struct delivery delivery = { .flags = flags, .interface = interface };

	if (is_budgeted(row) && exceeds_budget(packet, row))
		return VERDICT_DROP;
	if (doorbell && may_go_by_tap(packet, protocol, flags) && goes_by_tap(row, doorbell)) {
		struct tap_metadata stamp = {
			.slot = row->slot,
			.generation = row->generation,
			.flags = flags,
			.ifindex = interface > 0xffff ? 0 : interface,
		};
		return deliver_on_tap(packet, &stamp, row->channel, doorbell);
	}
	deliver_by_ring(packet, row, &delivery);
	return VERDICT_DROP;
}

#endif
