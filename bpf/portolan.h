/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Layouts shared with user space. Each struct mirrors one in crates/proto/src/filter.rs; sizes are
 * asserted on both sides. Ports and addresses in network order; IPv4 addresses as IPv4-mapped IPv6.
 */
#ifndef PORTOLAN_H
#define PORTOLAN_H

#include <linux/types.h>

union address {
	__u8 bytes[16];
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
	__u16 flags;
	/* Of the device's scheduler, in which its frames are sent; 0: that of the channel. */
	__u16 class;
	/* Its own, of those that the channel's owner has beside the channel's; 0: that one. */
	__u32 ring;
	/* What may be received for it; 0 for all. */
	__u16 budget;
	__u16 reserved;
};

/* Several sockets have the binding: look for senders, and for members on a broadcast. */
#define ROW_SHARED 1
/* And unicast goes to the buckets in `shares`. */
#define ROW_DEALT 2
/* A listener whose handshakes the channel's owner performs, and answers from that port. */
#define ROW_DELEGATED 4
/* Handlers are installed for what it receives. */
#define ROW_EXTENDED 8
/* And for what it sends. */
#define ROW_EXTENDED_SENDING 16
/* Its frames go by the tap, whether the owner sleeps or not. */
#define ROW_BY_TAP 32
/* A port of a transport that the channel's owner runs himself: frames come as they are. */
#define ROW_RAW 64
/* It may be delivered before the kernel makes a buffer of the frame, where a device has that hook. */
#define ROW_IN_DRIVER 128

/* Any address of IPv6 is all zeros, of IPv4 ::ffff:0.0.0.0. */
struct binding_key {
	union address local;
	__be16 local_port;
	__u8 protocol;
	__u8 reserved;
};

/* A kind of frame or of packet that one program has for a protocol of its own. */
struct raw_key {
	__u8 kind;
	__u8 reserved;
	__be16 number;
};

#define RAW_ETHERTYPE 1
#define RAW_IP_PROTOCOL 2

#define SHARE_BUCKETS 128

struct share_key {
	struct binding_key binding;
	__u32 bucket;
};

struct sender_key {
	struct binding_key binding;
	__u32 channel;
};

/* At most that many sockets get copies of one datagram. */
#define MEMBERS_MAX 64

/* The group, or the address of a shared binding with interface 0. Indices are dense. */
struct member_key {
	union address group;
	__u32 interface;
	__be16 port;
	__u16 index;
};

/* Values of `local_addresses`. */
#define ADDRESS_OWN 1
#define ADDRESS_BROADCAST 2

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

/* The only one that a copy is for, in place of an Ethernet address; all zeros for all members. */
struct recipient {
	__u32 slot;
	/* Its number and one, as far as there is room. */
	__u16 channel;
} __attribute__((packed));

#define RECORD_ICMP_ERROR 1
#define RECORD_BINDING 2
#define RECORD_FRAGMENT 4
#define RECORD_HELD 8
/* A copy of what others, and the kernel, get too. */
#define RECORD_COPY 16
/* Of a protocol of the program's own: the slot is a raw flow's. */
#define RECORD_RAW 32

/* On a page of its own, shared with the channel's owner, who may write anything here. */
struct doorbell {
	__u32 state;
	__u32 by_tap;
	__u64 delivered;
	__u64 overflow;
	__u64 reserved[5];
	/*
	 * On a line of its own, which its owner writes with each look (attention.h). When it looked last, or 0 if it
	 * looks without a clock.
	 */
	__u64 attended_at;
	/* The owner, if awake, is to be woken for what it does not look at. */
	__u32 wants_attention;
	/* What the owner sent last was more than the windows let through: acknowledgements let it go on. */
	__u32 awaits_window;
};

#define DOORBELL_AWAKE 0
#define DOORBELL_ASLEEP 1
#define DOORBELL_ASLEEP_ON_TAP 2

/* Of the filter alone: what it knows of a channel beside ring and doorbell. */
struct channel {
	__u32 tap_ifindex;
};

/* Frames that a channel's owner lost, in memory that it cannot write. */
struct losses {
	__u64 ring_full;
	__u64 over_budget;
	__u64 early;
};

#define BUDGETS 1024

/* Highest priority: never dropped early. */
#define PRIORITY_LAST 7

/*
 * What may be received. Each price is what one unit costs of the time that has passed, 0 if it is
 * free; `*_paid` is the time up to which all is paid. Time is in 1/64 ns.
 */
struct budget {
	__u64 packet_price;
	/* In 1/2^20 ns. */
	__u64 byte_price;
	__u64 burst;
	__u32 priority;
	__u32 reserved;
	__u64 packets_paid;
	__u64 bytes_paid;
	/* Packets. */
	__u64 passed;
	__u64 dropped;
	__u64 early;
};

#define SERVER_CHANNEL 0

/* What a channel sends through. */
struct tap {
	__u32 channel;
	/* For frames of rows without one; 0 while nothing is reserved. */
	__u16 class;
	__u16 reserved;
};

/* Major number of our scheduler on a device ("po"), and its class for all who reserved nothing. */
#define TRAFFIC_HANDLE 0x706f
#define BEST_EFFORT_CLASS 2
/* Below this a row's class is none: what its program has chosen (SO_PRIORITY), for disciplines of the user's. */
#define FIRST_CLASS 0x10
#define CHOSEN_PRIORITY 8

/* A reservation goes before what a program chooses, its own and its channel's. */
static __always_inline __u16 class_of(__u16 row, __u16 tap)
{
	if (row < FIRST_CLASS && tap >= FIRST_CLASS)
		return tap;
	return row ?: tap;
}

static __always_inline __u32 priority_of(__u16 class)
{
	if (class < FIRST_CLASS && class & CHOSEN_PRIORITY)
		return class & (CHOSEN_PRIORITY - 1);
	return TRAFFIC_HANDLE << 16 | class;
}

/* How flows are found. */
#define ALGORITHM_HASH 0
#define ALGORITHM_LINEAR 1

struct filter_settings {
	__u32 algorithm;
	/* The traffic class of packets that enclose a handle; 0: handles mean nothing. */
	__u32 marker;
};

/* What a handle leads to. */
struct handle_row {
	__u64 nonce;
	struct flow_row row;
};

/* Extensions of all programs; numbers are from 1 on. */
#define EXTENSIONS 256
/* Of one extension: on a listener one for its process, and one for whoever performs the handshakes. */
#define GUARDS_MAX (2 * 64)
/* Handlers of one event of one endpoint. */
#define CHAIN_MAX 8

/*
 * What an endpoint is guarded by: the port of a channel's sessions; or a protocol of its own, by the IP protocol
 * alone, or with protocol 0 by the EtherType in the port's place.
 */
struct guard_key {
	__u32 channel;
	__be16 port;
	__u8 protocol;
	__u8 event;
};

#define EVENT_UDP_RECEIVE 1
#define EVENT_TCP_RECEIVE 2
#define EVENT_UDP_SEND 3
#define EVENT_TCP_SEND 4
#define EVENT_ETHERNET_RECEIVE 5
#define EVENT_IP_RECEIVE 6
#define EVENT_ETHERNET_SEND 7
#define EVENT_IP_SEND 8

/* Extensions in the order in which they are called. */
struct chain {
	__u32 count;
	__u16 numbers[CHAIN_MAX];
};

/* Whether an extension may run, and for how long at a time. */
struct extension_control {
	__u64 limit;
	__u32 is_stopped;
	__u32 reserved;
};

#define OVERRUN_STRIKES 16
#define STRIKES_MAX 128

/* What an extension did, on each processor. Times in nanoseconds. */
struct extension_statistics {
	__u64 runs;
	__u64 time;
	__u64 longest;
	__u64 overruns;
	/* More with each run beyond the limit, fewer with each within. */
	__u64 strikes;
	/* Packets that its predicate did not want. */
	__u64 skipped;
	__u64 passed;
	__u64 consumed;
	__u64 replied;
	__u64 delivered;
	__u64 refused;
	__u64 forwarded;
	__u64 replaced;
	__u64 copied;
};

/* The part of the managers' own memory that the stub around a handler writes. */
struct extension_run {
	__u64 ended;
	__u32 verdict;
	/* The predicate did not want the packet. */
	__u32 is_skipped;
};

#define MANAGER_RECEIVE 0
#define MANAGER_APPLY 1
#define MANAGER_SEND 2
#define MANAGER_APPLY_SENT 3
#define MANAGER_SYN 4
#define MANAGERS 5

/* With what the SYNs to a listener are answered while they are a flood. Reserved bytes are zero. */
struct flood {
	/* SipHash's key, as bytes. */
	__u64 secret[2];
	/* SYNs that were, and that would have been but for FLOOD_FULL. */
	__u64 answered;
	__u64 dropped;
	__u16 window;
	/* The largest segment that the listener wants; 0: what the path takes. */
	__u16 max_segment;
	/* Of windows; FLOOD_NO_SCALE if they are not scaled. */
	__u8 scale;
	__u8 flags;
	__u8 traffic_class;
	__u8 hop_limit;
	/* SYNs that have fewer left are the owner's. */
	__u8 least_hops;
	__u8 reserved[7];
};

#define FLOOD_NO_SCALE 0xff
#define FLOOD_TIMESTAMPS 1
#define FLOOD_SACK 2
#define FLOOD_ECN 4
#define FLOOD_DONT_FRAGMENT 8
/* As many connections as may be wait to be accepted: SYNs are dropped. */
#define FLOOD_FULL 16

struct path_key {
	__u32 prefix;
	union address address;
};

/* The way back to a peer; interface 0 if SYNs that seem to come from there are not answered here. */
struct return_path {
	__u32 interface;
	__u32 mtu;
};

#define HOLDERS_MAX 8

/* What count_holders is asked, and its answer. Descriptors are the asking process's. */
struct holders {
	__u32 descriptor;
	/* Connections to the processes whose descriptors are counted. */
	__u32 connections[HOLDERS_MAX];
	__u32 count;
	/* To the open file in all. */
	__u32 references;
	/* In those processes. */
	__u32 descriptors;
};

/* Are they the ends of one pair? Descriptors are the asking process's. */
struct pair_ends {
	__u32 far;
	__u32 near;
	__u32 are_pair;
};

/* Does the process at the other end of a connection run this file? Descriptors are the asking process's. */
struct running_file {
	__u32 connection;
	__u32 file;
	__u32 is_running;
};

_Static_assert(sizeof(struct filter_key) == 40, "FilterKey");
_Static_assert(sizeof(struct flow_row) == 24, "FlowRow");
_Static_assert(sizeof(struct binding_key) == 20, "BindingKey");
_Static_assert(sizeof(struct raw_key) == 4, "RawKey");
_Static_assert(sizeof(struct share_key) == 24, "ShareKey");
_Static_assert(sizeof(struct sender_key) == 24, "SenderKey");
_Static_assert(sizeof(struct member_key) == 24, "MemberKey");
_Static_assert(sizeof(struct interface) == 12, "FilterInterface");
_Static_assert(sizeof(struct record_header) == 32, "RecordHeader");
_Static_assert(sizeof(struct tap_stamp) == 12, "TapStamp");
_Static_assert(sizeof(struct recipient) == 6, "Recipient");
_Static_assert(sizeof(struct doorbell) == 80, "Doorbell");
_Static_assert(sizeof(struct tap) == 8, "FilterTap");
_Static_assert(sizeof(struct filter_settings) == 8, "FilterSettings");
_Static_assert(sizeof(struct handle_row) == 32, "HandleRow");
_Static_assert(sizeof(struct holders) == 48, "Holders");
_Static_assert(sizeof(struct losses) == 24, "Losses");
_Static_assert(sizeof(struct budget) == 72, "Budget");
_Static_assert(sizeof(struct guard_key) == 8, "GuardKey");
_Static_assert(sizeof(struct chain) == 20, "Chain");
_Static_assert(sizeof(struct extension_control) == 16, "ExtensionControl");
_Static_assert(sizeof(struct extension_statistics) == 112, "ExtensionStatistics");
_Static_assert(sizeof(struct extension_run) == 16, "ExtensionRun");
_Static_assert(sizeof(struct flood) == 48, "Flood");
_Static_assert(sizeof(struct path_key) == 20, "PathKey");
_Static_assert(sizeof(struct return_path) == 8, "ReturnPath");

#endif
