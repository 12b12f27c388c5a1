/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* The tables, shared by all programs. The loader sets sizes given as 1. */
#ifndef MAPS_H
#define MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "portolan.h"

/*
 * Identifies a fragmented datagram. For IPv6 the protocol is not part of the key (RFC 8200 §4.5) and
 * is 0.
 */
struct fragment_key {
	union address local;
	union address remote;
	__be32 identification;
	__u8 protocol;
	__u8 reserved[3];
};

enum fragment_state {
	/* Only later fragments have arrived; the server holds copies of them. */
	FRAGMENT_AWAITED,
	/* The first fragment went to the kernel. */
	FRAGMENT_PASSED,
	FRAGMENT_CLAIMED,
	/* For all members of its port. */
	FRAGMENT_FOR_MANY,
};

struct fragment_row {
	struct flow_row row;
	/* When the last fragment arrived. */
	__u64 heard;
	__u32 state;
	/* RECORD_BINDING if the row is from the binding table. */
	__u16 flags;
	__be16 local_port;
};

/* Number of copies given to the server, and the start of the period. */
struct hold_budget {
	__u64 since;
	__u64 used;
};

#define IDENTIFICATIONS 1024

/* Exact 5-tuple to owner. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct filter_key);
	__type(value, struct flow_row);
} flows SEC(".maps");

/* Listeners and unconnected UDP. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, struct binding_key);
	__type(value, struct flow_row);
} bindings SEC(".maps");

/* Datagrams being received in fragments; the oldest are evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct fragment_key);
	__type(value, struct fragment_row);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hold_budget);
} hold_budget SEC(".maps");

/* Next identification of fragmented datagrams, by a hash of both addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, IDENTIFICATIONS);
	__type(key, __u32);
	__type(value, __u32);
} identifications SEC(".maps");

/* Bindings shared by SO_REUSEPORT sockets (ROW_REUSEPORT): the socket of each bucket. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct share_key);
	__type(value, struct flow_row);
} shares SEC(".maps");

/* Channels that may send from a shared binding (ROW_SHARED). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender_key);
	/* The class, or 0. */
	__type(value, __u16);
} senders SEC(".maps");

/* Raw protocols, run by programs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct raw_key);
	__type(value, struct flow_row);
} raw_flows SEC(".maps");

/* Sockets that each get a copy: of datagrams to a group, and of broadcasts to a shared binding. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, struct flow_row);
} members SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct interface_table);
} interfaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, union address);
	__type(value, __u8);
} local_addresses SEC(".maps");

/* By tap ifindex: the sending channel. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tap);
} taps SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct channel);
} channels SEC(".maps");

/* Indexed like `channels`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct losses);
} losses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BUDGETS);
	__type(key, __u32);
	__type(value, struct budget);
} budgets SEC(".maps");

struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct ring);
} rings SEC(".maps");

struct doorbell_page {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct doorbell));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct doorbell_page);
} doorbells SEC(".maps");

/* Kinds of behaviour of an owner that has not polled for a while. */
#define ATTENTION_KINDS 3

/* By ring number: frames not polled by an owner that is awake. */
struct attention {
	struct bpf_timer timer;
	/* The consumer position at the last check, and since when it has not moved while frames were pending. */
	__u64 consumed;
	__u64 since;
	/* When the timer will fire. */
	__u64 due;
	/* The owner's last poll after which it was woken. */
	__u64 woken_after;
	__u32 is_started;
	__u32 is_made;
	/* By the kind of behaviour (attention.h): when the timer last fired needlessly, and how often its interval was
	 * doubled. */
	__u64 vain_at[ATTENTION_KINDS];
	__u32 doublings[ATTENTION_KINDS];
	/* The kind when the timer was started. */
	__u32 kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct attention);
} attentions SEC(".maps");

/* The index of a row's ring in `rings` and `doorbells`: its own ring, or its channel's. */
static __always_inline __u32 ring_of(const struct flow_row *row)
{
	return row->ring ?: row->channel;
}

static __always_inline bool is_of_kind(const union address *address, __u8 kind)
{
	const __u8 *found = bpf_map_lookup_elem(&local_addresses, address);

	return found && *found == kind;
}

static __always_inline bool is_local(const union address *address)
{
	return is_of_kind(address, ADDRESS_OWN);
}

static __always_inline bool is_broadcast(const union address *address)
{
	return is_of_kind(address, ADDRESS_BROADCAST);
}

#endif
