/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Layouts shared with user space. Each struct mirrors one in crates/proto/src/filter.rs; sizes are
 * asserted on both sides. Ports and addresses in network order; IPv4 addresses as IPv4-mapped IPv6.
 */
#ifndef PORTOLAN_H
#define PORTOLAN_H

#include <linux/types.h>

union address {
	__u8 octets[16];
	__u32 words[4];
};

struct filter_key {
	union address local;
	union address remote;
	__be16 local_port;
	__be16 remote_port;
	__u8 protocol;
	__u8 reserved[3];
};

struct flow_row {
	__u32 channel;
	__u32 slot;
	__u32 generation;
	__u32 flags;
};

/* An all-zero address: any. */
struct binding_key {
	union address local;
	__be16 local_port;
	__u8 protocol;
	__u8 reserved;
};

struct interface {
	__u32 ifindex;
	__u8 mac[6];
	__u8 reserved[2];
};

#define MAX_INTERFACES 16

/* Entry 0 of an array map; ifindex 0 ends the table. */
struct interface_table {
	struct interface entries[MAX_INTERFACES];
};

/* Precedes each frame in a receive ring. */
struct record_header {
	__u32 length;
	__u16 gso_size;
	__u16 flags;
	__u32 slot;
	__u32 generation;
	__u64 timestamp;
	__u32 ifindex;
	__u32 reserved;
};

/* In place of the Ethernet addresses of a frame that comes by the tap. */
struct tap_stamp {
	__u32 slot;
	__u32 generation;
	__u16 flags;
	__u16 ifindex; /* 0 if it is too large */
};

#define RECORD_ICMP_ERROR 1
#define RECORD_BINDING 2
#define RECORD_FRAGMENT 4
#define RECORD_HELD 8

/* On a page of its own, shared with the channel's owner, who may write anything here. */
struct doorbell {
	__u32 state;
	__u32 by_tap;
	__u64 delivered;
	__u64 overflow;
};

#define DOORBELL_AWAKE 0
#define DOORBELL_ASLEEP 1
#define DOORBELL_ASLEEP_ON_TAP 2

/* Of the filter alone: what it knows of a channel beside ring and doorbell. */
struct channel {
	__u32 tap_ifindex;
};

#define SERVER_CHANNEL 0

_Static_assert(sizeof(struct filter_key) == 40, "FilterKey");
_Static_assert(sizeof(struct flow_row) == 16, "FlowRow");
_Static_assert(sizeof(struct binding_key) == 20, "BindingKey");
_Static_assert(sizeof(struct interface) == 12, "FilterInterface");
_Static_assert(sizeof(struct record_header) == 32, "RecordHeader");
_Static_assert(sizeof(struct tap_stamp) == 12, "TapStamp");
_Static_assert(sizeof(struct doorbell) == 24, "Doorbell");

#endif
