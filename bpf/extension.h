/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * From the packet filter to the protocol managers, which call the extensions of an endpoint. What
 * the filter found out of the packet goes along in memory of the processor, which no extension has.
 *
 * A packet's way: packet filter → manager of the event → extension → apply → next extension … →
 * owner. Each arrow is a tail call; where one fails, the packet goes to its owner. What an owner
 * sends goes the same way from the transmit filter, which has found it good before, to the device.
 */
#ifndef EXTENSION_H
#define EXTENSION_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include <portolan/extension.h>

#include "maps.h"

enum checksum {
	/* Whole, or of a payload that was not seen whole. */
	CHECKSUM_WHOLE,
	/* The device that sends the packet adds the rest. */
	CHECKSUM_PSEUDO_HEADER,
	CHECKSUM_NONE,
};

/* A packet on its way along the extensions of its endpoint. */
struct extension_work {
	/* First: the stubs know where it is. */
	struct extension_run run;
	__u64 started;
	/* Where the packet goes if no extension decides. */
	struct flow_row row;
	struct filter_key key;
	__u32 interface;
	__u16 flags;
	__u8 event;
	__u8 checksum;
	struct chain chain;
	/* In the chain, of the next to be called. */
	__u32 position;
	/* The one that is called. */
	__u32 number;
	/* What is sent needs a number of its own for each receiver. */
	__u32 is_numbered;
	/* Bytes between the IP header and the transport's: a handle. */
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

/* What is sent has views of its own: who handles what comes does not see whom others send to. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct portolan_sending);
} extension_sendings SEC(".maps");

/* Chains by what they are installed for. */
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

/* Has a manager see to what a row claims; returns only if it cannot. */
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

/* Has the extensions of an endpoint see to what a row claims; returns only if they cannot. */
static __always_inline void raise_received(struct __sk_buff *skb, const struct flow_row *row,
					   const struct filter_key *key, __u16 flags,
					   __u32 interface, __u8 event)
{
	raise_to(skb, MANAGER_RECEIVE, row, key, flags, interface, event);
}

/* Does its owner, who runs the protocol himself, get frames as they are? */
static __always_inline bool is_raw(const struct extension_work *work)
{
	return work->flags & RECORD_RAW;
}

static __always_inline bool is_of_ethernet(const struct extension_work *work)
{
	return work->event == EVENT_ETHERNET_RECEIVE || work->event == EVENT_ETHERNET_SEND;
}

/* Is all that it has behind Ethernet's header, or IP's, its owner's business? */
static __always_inline bool has_no_transport(const struct extension_work *work)
{
	return is_of_ethernet(work) || work->event == EVENT_IP_RECEIVE ||
	       work->event == EVENT_IP_SEND;
}

/* Has the managers see to a packet that its channel may send; returns only if they cannot. */
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
