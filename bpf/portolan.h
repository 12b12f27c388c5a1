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
	/* Class of the device's qdisc in which its frames are sent; 0: the channel's class. */
	__u16 class;
	/* The flow's own ring, if its channel's owner has one for it; 0: the channel's ring. */
	__u32 ring;
	/* The receive budget; 0: unlimited. */
	__u16 budget;
	__u16 reserved;
};

/* Several sockets have the binding: see `senders`, and `members` for broadcasts. */
#define ROW_SHARED 1
/* And unicast goes to the buckets in `shares`. */
#define ROW_REUSEPORT 2
/* A listener whose handshakes the channel's owner performs, sending from that port. */
#define ROW_DELEGATED 4
/* Handlers are installed for received packets. */
#define ROW_EXTENDED 8
/* Handlers are installed for sent packets. */
#define ROW_EXTENDED_SENDING 16
/* Its frames are delivered by the tap, whether or not the owner sleeps. */
#define ROW_BY_TAP 32
/* A port of a transport that the channel's owner runs itself: frames are delivered unparsed. */
#define ROW_RAW 64
/* May be delivered before the kernel makes a buffer of the frame, if a device has that hook. */
#define ROW_IN_DRIVER 128

/* Any address is all zeros for IPv6, ::ffff:0.0.0.0 for IPv4. */
struct binding_key {
	union address local;
	__be16 local_port;
	__u8 protocol;
	__u8 reserved;
};

/* An EtherType or IP protocol that one program has as its own. */
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

/* Maximum number of sockets that get copies of one datagram. */
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

/* Replaces the Ethernet addresses of a frame delivered by the tap. */
struct tap_metadata {
	__u32 slot;
	__u32 generation;
	__u16 flags;
	__u16 ifindex; /* 0 if it is too large */
};

/* The only recipient of a copy, in place of an Ethernet address; all zeros for all members. */
struct recipient {
	__u32 slot;
	/* The channel's number plus one, truncated. */
	__u16 channel;
} __attribute__((packed));

#define RECORD_ICMP_ERROR 1
#define RECORD_BINDING 2
#define RECORD_FRAGMENT 4
#define RECORD_EARLY_FRAGMENT 8
/* A copy of a datagram that others, and the kernel, get too. */
#define RECORD_COPY 16
/* Of a raw protocol: the slot is a raw flow's. */
#define RECORD_RAW 32

/* On a page of its own, shared with the channel's owner, who may write anything here. */
struct doorbell {
	__u32 state;
	__u32 by_tap;
	__u64 delivered;
	__u64 overflow;
	__u64 reserved[5];
	/*
	 * On a cache line of its own, which its owner writes with each poll (attention.h): the time of the last poll,
	 * or 0 if it polls without a clock.
	 */
	__u64 attended_at;
	/* The owner, while awake, must be woken for frames that it does not poll. */
	__u32 wants_attention;
	/* The owner's last sending was limited by a window: acknowledgements let it continue. */
	__u32 awaits_window;
};

#define DOORBELL_AWAKE 0
#define DOORBELL_ASLEEP 1
#define DOORBELL_ASLEEP_ON_TAP 2

/* Private to the filter: what it knows about a channel besides ring and doorbell. */
struct channel {
	__u32 tap_ifindex;
	/* The user of the channel's process, plus one; 0: it has none. For the next server, not for the filter. */
	__u32 owner;
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
 * A receive budget. Each price is the time that one unit costs, 0 if it is free; `*_paid` is the
 * virtual clock. Times are in 1/64 ns.
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

/* A tap through which a channel sends. */
struct tap {
	__u32 channel;
	/* For frames whose row has none; 0 if nothing is reserved. */
	__u16 class;
	__u16 reserved;
};

/* Major number of Portolan's qdisc on a device ("po"), and its class for traffic without a reservation. */
#define TRAFFIC_HANDLE 0x706f
#define BEST_EFFORT_CLASS 2
/* A row's class below this is the priority that its program has chosen (SO_PRIORITY), for a user's qdisc. */
#define FIRST_CLASS 0x10
#define CHOSEN_PRIORITY 8

/* A reservation takes precedence over a chosen priority; the row's over its channel's. */
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

/* Search algorithms for flows. */
#define ALGORITHM_HASH 0
#define ALGORITHM_LINEAR 1

struct filter_settings {
	__u32 algorithm;
	/* The traffic class of packets that enclose a handle; 0 if handles are disabled. */
	__u32 marker;
	/* The version of all layouts in this file, by which the next server knows whether it can take over the tables. */
	__u32 format;
};

/* The row of a handle. */
struct handle_row {
	__u64 nonce;
	struct flow_row row;
};

/* Maximum number of extensions of all programs; numbers start at 1. */
#define EXTENSIONS 256
/* Per extension; a listener counts twice: for its process, and for the one that performs the handshakes. */
#define GUARDS_MAX (2 * 64)
/* Handlers per event and endpoint. */
#define CHAIN_MAX 8

/*
 * The endpoint that a guard names: a port of a channel's sessions, or a raw protocol, by the IP protocol alone, or with
 * protocol 0 by the EtherType in place of the port.
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

/* Extensions in calling order. */
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

/* Statistics of an extension, per CPU. Times in nanoseconds. */
struct extension_statistics {
	__u64 runs;
	__u64 time;
	__u64 longest;
	__u64 overruns;
	/* Raised by each run beyond the limit, lowered by each within it. */
	__u64 strikes;
	/* Packets rejected by its predicate. */
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

/* The part of the managers' memory that the stub around a handler writes. */
struct extension_run {
	__u64 ended;
	__u32 verdict;
	/* The predicate rejected the packet. */
	__u32 is_skipped;
};

#define MANAGER_RECEIVE 0
#define MANAGER_APPLY 1
#define MANAGER_SEND 2
#define MANAGER_APPLY_SENT 3
#define MANAGER_SYN 4
#define MANAGERS 5

/* Parameters for answering the SYNs to a listener during a flood. Reserved bytes are zero. */
struct flood {
	/* SipHash's key, as bytes. */
	__u64 secret[2];
	/* Number of SYNs answered, and of those dropped because of FLOOD_FULL. */
	__u64 answered;
	__u64 dropped;
	__u16 window;
	/* The largest segment that the listener accepts; 0: as determined by the path. */
	__u16 max_segment;
	/* Window scale shift; FLOOD_NO_SCALE if windows are not scaled. */
	__u8 scale;
	__u8 flags;
	__u8 traffic_class;
	__u8 hop_limit;
	/* SYNs with a lower hop limit are left to the owner. */
	__u8 least_hops;
	__u8 reserved[7];
};

#define FLOOD_NO_SCALE 0xff
#define FLOOD_TIMESTAMPS 1
#define FLOOD_SACK 2
#define FLOOD_ECN 4
#define FLOOD_DONT_FRAGMENT 8
/* The accept queue is full: SYNs are dropped. */
#define FLOOD_FULL 16

/* What outlives a server, in memory that programs cannot see. */
struct lasting {
	/* Of the hash by which peers are dealt; 0: not chosen yet. */
	__u32 share_seed;
	__u32 reserved;
	/* The server's, not used by the filter. */
	__u64 secret[2];
};

struct path_key {
	__u32 prefix;
	union address address;
};

/* The path to a peer; interface 0 if SYNs with such a source are not answered here. */
struct return_path {
	__u32 interface;
	__u32 mtu;
};

#define HOLDERS_MAX 8

/* Request to count_fd_refs, and its answer. Descriptors are those of the requesting process. */
struct holders {
	__u32 descriptor;
	/* Connections to the processes whose descriptors are counted. */
	__u32 connections[HOLDERS_MAX];
	__u32 count;
	/* References to the open file in total. */
	__u32 references;
	/* Descriptors in those processes. */
	__u32 descriptors;
};

/* Whether they are the ends of one pair. Descriptors are those of the requesting process. */
struct pair_ends {
	__u32 far;
	__u32 near;
	__u32 are_pair;
};

/* Whether the peer process of a connection runs this file. Descriptors are those of the requesting process. */
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
_Static_assert(sizeof(struct tap_metadata) == 12, "TapMetadata");
_Static_assert(sizeof(struct recipient) == 6, "Recipient");
_Static_assert(sizeof(struct doorbell) == 80, "Doorbell");
_Static_assert(sizeof(struct tap) == 8, "FilterTap");
_Static_assert(sizeof(struct filter_settings) == 12, "FilterSettings");
_Static_assert(sizeof(struct channel) == 8, "FilterChannel");
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
_Static_assert(sizeof(struct lasting) == 24, "Lasting");
_Static_assert(sizeof(struct path_key) == 20, "PathKey");
_Static_assert(sizeof(struct return_path) == 8, "ReturnPath");

#endif
