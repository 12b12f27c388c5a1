/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The interface of protocol extensions. An extension is C code that clang compiles to BPF:
 *
 *     #include <portolan/extension.h>
 *
 *     PORTOLAN_HANDLER int echo(struct portolan_view *view)
 *     {
 *          return PORTOLAN_REPLY;
 *     }
 *
 *     clang -O2 -target bpf -mcpu=v3 -I include -c echo.c -o echo.o
 *     portolan ext install echo.o --udp 7
 *
 * It is called for each packet received at an endpoint of its owner, for each frame of a protocol of its
 * owner (an EtherType, an IP protocol, a transport at a port), or, if it is a PORTOLAN_SEND_HANDLER, for each
 * one that the owner sends from there. It never has access to the packet itself: the view is a copy, and the
 * server, which links the extension into the packet filter, writes all fields that identify the packet's
 * owner. It can call only the functions below, and use only its own maps.
 */
#ifndef PORTOLAN_EXTENSION_H
#define PORTOLAN_EXTENSION_H

#include <linux/types.h>

/* Bytes of a packet's payload that a handler sees, and the maximum length of its reply. */
#define PORTOLAN_PAYLOAD 512

/* Return values of a handler. */
enum portolan_verdict {
	/* To the next handler; after the last one the packet continues as without an extension. */
	PORTOLAN_PASS = 0,
	/* The packet is discarded. */
	PORTOLAN_CONSUME = 1,
	/*
	 * `length` bytes of `payload` are sent back to the packet's sender; the packet is discarded (UDP, the owner's
	 * protocols).
	 */
	PORTOLAN_REPLY = 2,
	/* To the owner; the remaining handlers are skipped. */
	PORTOLAN_DELIVER = 3,
	/* Forwarded unchanged to `to` and `to_port`, with this host and `from_port` as source. */
	PORTOLAN_FORWARD = 4,
	/* For sent packets: `length` bytes of `payload` are sent instead (UDP, the owner's protocols). */
	PORTOLAN_REPLACE = 5,
	/* For sent packets: sent to each of `destinations` instead of the original one (UDP, the owner's protocols). */
	PORTOLAN_COPY = 6,
};

/* Bits of `flags`. */
#define PORTOLAN_IPV6 1
/* The payload is complete, and its checksum is correct. */
#define PORTOLAN_CHECKED 2
/*
 * A frame of an EtherType of the owner: both ends are stations of the link, with their MAC addresses in the first six
 * bytes. `local` is the destination of a received frame, which may be a group, or this host's station for a sent one.
 * `local_port` is the EtherType. The payload is everything behind the Ethernet header, including padding.
 */
#define PORTOLAN_ETHERNET 4

/*
 * One packet, at one event. Numbers are in host byte order, addresses in network byte order; an
 * IPv4 address is in the last four bytes, behind ten bytes of 0 and two of 0xff.
 */
struct portolan_view {
	/* Nanoseconds, as returned by portolan_now(). */
	__u64 time;
	__u32 flags;
	/* Index of the device that received the packet. */
	__u32 interface;
	/* This host's end, and the other end. */
	__u8 local[16];
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	/* IP protocol number; for an IP protocol of the owner, everything behind the IP header is payload, without ports. */
	__u8 protocol;
	__u8 hop_limit;
	__u8 traffic_class;
	/* TCP flags, from FIN (1) up. */
	__u8 tcp_flags;
	__u32 sequence;
	__u32 acknowledgment;
	/* Bytes of payload in the packet, and how many of them are below. */
	__u32 packet_length;
	__u32 captured;

	/* The handler may change the fields from here on; the packet is not affected. */
	__u32 length;
	/* Passed from each handler to the next. */
	__u32 mark;
	/* Destination of a forwarded packet, and the port of the extension that it is sent from. */
	__u8 to[16];
	__u16 to_port;
	__u16 from_port;
	/* Zeros behind the captured bytes. */
	__u8 payload[PORTOLAN_PAYLOAD] __attribute__((aligned(8)));
};

/* Maximum number of copies of one datagram. */
#define PORTOLAN_COPIES 32

/* Destination of a copy: a port of a host; for the owner's protocols a host, or a station in the first six bytes. */
struct portolan_destination {
	__u8 address[16];
	__u16 port;
	__u16 reserved[3];
} __attribute__((aligned(8)));

/*
 * One packet that the owner sends, at PacketSend: the view, and alternative destinations.
 * `interface` is the device that it leaves by. The source cannot be changed.
 */
struct portolan_sending {
	struct portolan_view view;
	/* Number of `destinations` in use. */
	__u32 copies;
	__u32 reserved;
	struct portolan_destination destinations[PORTOLAN_COPIES];
};

/*
 * Sections. An object has one handler, for received or for sent packets; without a predicate it is
 * called for each packet.
 */
#define PORTOLAN_HANDLER __attribute__((section("portolan/handler"), used))
#define PORTOLAN_SEND_HANDLER __attribute__((section("portolan/send"), used))
#define PORTOLAN_PREDICATE __attribute__((section("portolan/predicate"), used))
/* Functions called by these, unless they are inlined. */
#define PORTOLAN_FUNCTION static __attribute__((noinline))

/*
 * Maps, which are shared by the extension and its owner:
 *
 *     PORTOLAN_MAP(seen, PORTOLAN_HASH, __u32, __u64, 1024);
 *     PORTOLAN_RING(events, 65536);
 *
 * Global variables are maps, too: those of .data, .bss and .rodata.
 */
struct portolan_map {
	__u32 kind;
	__u32 key;
	__u32 value;
	__u32 entries;
};

#define PORTOLAN_HASH 1
#define PORTOLAN_ARRAY 2
#define PORTOLAN_PERCPU_ARRAY 6
#define PORTOLAN_LRU_HASH 9
#define PORTOLAN_RINGBUF 27

#define PORTOLAN_MAP(name, type, key_type, value_type, count)                                      \
	const struct portolan_map name __attribute__((section("portolan/maps"), used)) = {         \
		.kind = type, .key = sizeof(key_type), .value = sizeof(value_type), .entries = count }
#define PORTOLAN_RING(name, bytes)                                                                \
	const struct portolan_map name __attribute__((section("portolan/maps"), used)) = {         \
		.kind = PORTOLAN_RINGBUF, .entries = bytes }

/* The protection domain: the functions that an extension may call (bpf-helpers(7) describes each). */
static void *(*const portolan_find)(const void *map, const void *key) = (void *)1;
static long (*const portolan_set)(const void *map, const void *key, const void *value,
				  __u64 flags) = (void *)2;
static long (*const portolan_remove)(const void *map, const void *key) = (void *)3;
static __u64 (*const portolan_now)(void) = (void *)5;
static __u32 (*const portolan_random)(void) = (void *)7;
static __u32 (*const portolan_processor)(void) = (void *)8;
static __s64 (*const portolan_checksum)(const __u32 *from, __u32 from_size, const __u32 *to,
					__u32 to_size, __u32 seed) = (void *)28;
static long (*const portolan_ring_put)(const void *ring, const void *bytes, __u64 size,
				       __u64 flags) = (void *)130;

#endif
