/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * From the packet filter to the protocol managers, which call the extensions of an endpoint. What
 * the filter found out about the packet is passed in per-CPU memory that no extension can access.
 *
 * A packet's path: packet filter → manager of the event → extension → apply → next extension … →
 * owner. Each arrow is a tail call; if one fails, the packet goes to its owner. A packet that an owner
 * sends takes the same path from the transmit filter, which has checked it before, to the device.
 */
#ifndef EXTENSION_H
#define EXTENSION_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include <portolan/extension.h>

#include "maps.h"

enum checksum {
	/* Complete, or of a payload that was not seen as a whole. */
	CHECKSUM_WHOLE,
	/* The sending device adds the rest. */
	CHECKSUM_PSEUDO_HEADER,
	CHECKSUM_NONE,
};

/* The state of a packet while extensions of its endpoint process it. */
struct extension_work {
	/* Must be first: the stubs rely on its position. */
	struct extension_run run;
	__u64 started;
	/* Where the packet goes if no extension decides otherwise. */
	struct flow_row row;
	struct filter_key key;
	__u32 interface;
	__u16 flags;
	__u8 event;
	__u8 checksum;
	struct chain chain;
	/* Position in the chain of the next extension to call. */
	__u32 position;
	/* Number of the extension called. */
	__u32 number;
	/* Each copy needs its own IP identification. */
	__u32 is_numbered;
	/* Length of the options between IP header and transport header: a handle. */
	__u32 options;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct extension_work);
} extension_work SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct portolan_view);
} extension_views SEC(".maps");

/* Views of sent packets are separate: handlers of received packets must not see destinations of others. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct portolan_sending);
} extension_sendings SEC(".maps");

/* Chains by endpoint and event. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, GUARDS_MAX * EXTENSIONS);
	__type(key, struct guard_key);
	__type(value, struct chain);
} guards SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, EXTENSIONS);
	__type(key, __u32);
	__type(value, struct extension_control);
} extension_controls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, EXTENSIONS);
	__type(key, __u32);
	__type(value, struct extension_statistics);
} extension_statistics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, EXTENSIONS);
	__type(key, __u32);
	__type(value, __u32);
} extensions SEC(".maps");

/* The managers' programs, by MANAGER_*. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, MANAGERS);
	__type(key, __u32);
	__type(value, __u32);
} managers SEC(".maps");

/* Tail-calls a manager for a packet claimed by a row; returns only on failure. */
static __always_inline void raise_to(struct __sk_buff *skb, const __u32 manager,
				     const struct flow_row *row, const struct filter_key *key,
				     __u16 flags, __u32 interface, __u8 event)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);

	if (!work)
		return;
	work->row = *row;
	work->key = *key;
	work->flags = flags;
	work->interface = interface;
	work->event = event;
	bpf_tail_call(skb, &managers, manager);
}

/* Tail-calls the extensions of the endpoint of a received packet; returns only on failure. */
static __always_inline void raise_received(struct __sk_buff *skb, const struct flow_row *row,
					   const struct filter_key *key, __u16 flags,
					   __u32 interface, __u8 event)
{
	raise_to(skb, MANAGER_RECEIVE, row, key, flags, interface, event);
}

/* Whether the owner runs the protocol itself and gets unparsed frames. */
static __always_inline bool is_raw(const struct extension_work *work)
{
	return work->flags & RECORD_RAW;
}

static __always_inline bool is_of_ethernet(const struct extension_work *work)
{
	return work->event == EVENT_ETHERNET_RECEIVE || work->event == EVENT_ETHERNET_SEND;
}

/* Whether everything behind the Ethernet or IP header is the owner's business. */
static __always_inline bool has_no_transport(const struct extension_work *work)
{
	return is_of_ethernet(work) || work->event == EVENT_IP_RECEIVE ||
	       work->event == EVENT_IP_SEND;
}

/* Tail-calls the manager for a packet that its channel may send; returns only on failure. */
static __always_inline void raise_sent(struct __sk_buff *skb, const struct flow_row *row,
				       const struct filter_key *key, __u32 egress,
				       bool is_numbered, __u8 event)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);

	if (!work)
		return;
	work->row = *row;
	work->key = *key;
	work->interface = egress;
	work->is_numbered = is_numbered;
	work->event = event;
	bpf_tail_call(skb, &managers, MANAGER_SEND);
}

#endif
