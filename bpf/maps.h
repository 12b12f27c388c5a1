/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* The tables, shared by all programs. Sizes marked 1 are set by the loader. */
#ifndef MAPS_H
#define MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "portolan.h"

/*
 * Names a datagram that comes in pieces. IPv6 tells them apart without the protocol (RFC 8200
 * §4.5), which is then 0.
 */
struct fragment_key {
	union address local;
	union address remote;
	__be32 identification;
	__u8 protocol;
	__u8 reserved[3];
};

enum fragment_state {
	/* Only later pieces have come so far; the server holds copies of them. */
	FRAGMENT_AWAITED,
	/* Its first piece was one of the kernel's. */
	FRAGMENT_PASSED,
	FRAGMENT_CLAIMED,
	/* Its members are listed under its port. */
	FRAGMENT_FOR_MANY,
};

struct fragment_row {
	struct flow_row row;
	/* When its last piece came. */
	__u64 heard;
	__u32 state;
	/* RECORD_BINDING if the row is of the binding table. */
	__u16 flags;
	__be16 local_port;
};

/* How many copies the server was given since when. */
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

/* Datagrams that are coming in pieces; the oldest give way. */
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

/* Bindings that SO_REUSEPORT sockets share (ROW_DEALT): each bucket's socket. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct share_key);
	__type(value, struct flow_row);
} shares SEC(".maps");

/* Channels that send from a binding which is not theirs alone (ROW_SHARED). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender_key);
	/* The class, or 0. */
	__type(value, __u16);
} senders SEC(".maps");

/* Protocols of programs' own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct raw_key);
	__type(value, struct flow_row);
} raw_flows SEC(".maps");

/* Sockets that each get a copy: of a group's datagrams, and of broadcasts to a shared binding. */
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

/* By tap ifindex: who is sending. */
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

/* As `channels`. */
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

/* How an owner is found who has not looked for a moment. */
#define ATTENTION_KINDS 3

/* Of a ring whose owner is awake: frames on it that nobody has looked at for a while. By the ring's number. */
struct attention {
	struct bpf_timer timer;
	/* Where the consumer stood when it was looked at last, and since when it stands there while frames wait. */
	__u64 consumed;
	__u64 since;
	/* When the timer is to fire. */
	__u64 due;
	/* Of the owner's looks, the last that it was woken after. */
	__u64 woken_after;
	__u32 is_started;
	__u32 is_made;
	/* By how the owner was found (attention.h): when the timer fired last in vain, and how often the time until it
	 * looks was doubled. */
	__u64 vain_at[ATTENTION_KINDS];
	__u32 doublings[ATTENTION_KINDS];
	/* How it was found when the timer was started. */
	__u32 kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct attention);
} attentions SEC(".maps");

/* Where a row's frames go, in `rings` and `doorbells`: its own ring, or its channel's. */
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
