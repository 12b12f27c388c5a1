/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * What a protocol extension sees. An extension is C that clang compiles to BPF:
 *
 *     #include <portolan/extension.h>
 *
 *     PORTOLAN_HANDLER int echo(struct portolan_view *view)
 *     {
 *             return PORTOLAN_REPLY;
 *     }
 *
 *     clang -O2 -target bpf -mcpu=v3 -I include -c echo.c -o echo.o
 *     portolan ext install echo.o --udp 7
 *
 * It is called for each packet that comes to an endpoint of its owner's, for each frame of a protocol of its owner's own
 * (an EtherType, an IP protocol, a transport at a port), or, if it is a
 * PORTOLAN_SEND_HANDLER, that the owner sends from there. It never has the packet itself:
 * the view is a copy, and the server, which links the extension into the packet filter, writes all
 * that says whose a packet is. It calls only the functions below, and has only its own maps.
 */
#ifndef PORTOLAN_EXTENSION_H
#define PORTOLAN_EXTENSION_H

#include <linux/types.h>

/* Bytes of a packet's payload that a handler sees, and the most that it can answer. */
#define PORTOLAN_PAYLOAD 512

/* What a handler returns. */
enum portolan_verdict {
	/* To the next handler; after the last one the packet goes where it would have gone. */
	PORTOLAN_PASS = 0,
	/* The packet ends here. */
	PORTOLAN_CONSUME = 1,
	/*
	 * `length` bytes of `payload` go back to who sent the packet, which ends here (UDP, protocols of one's own).
	 */
	PORTOLAN_REPLY = 2,
	/* To the owner, past the handlers that would follow. */
	PORTOLAN_DELIVER = 3,
	/* On to `to` and `to_port`, as it came, but from here and from `from_port`. */
	PORTOLAN_FORWARD = 4,
	/* Of what is sent: `length` bytes of `payload` go in its stead (UDP, protocols of one's own). */
	PORTOLAN_REPLACE = 5,
	/* Of what is sent: to each of `destinations`, in place of the one it was for (as above). */
	PORTOLAN_COPY = 6,
};

/* Bits of `flags`. */
#define PORTOLAN_IPV6 1
/* All of the payload is here, and its checksum is right. */
#define PORTOLAN_CHECKED 2
/*
 * A frame of an EtherType of one's own: both ends are stations of the link, whose addresses are in the first six
 * bytes; `local` is what the frame was sent to, which may be a group, or of what is sent this host's station. `local_port` is the EtherType. The payload is all
 * that follows the Ethernet header, with what the sender padded it by.
 */
#define PORTOLAN_ETHERNET 4

/*
 * One packet, at one event. Numbers are in the machine's byte order, addresses in the network's;
 * an IPv4 address is in the last four bytes, behind ten of 0 and two of 0xff.
 */
struct portolan_view {
	/* Nanoseconds, as of portolan_now(). */
	__u64 time;
	__u32 flags;
	/* Index of the device that the packet came in by. */
	__u32 interface;
	/* The end of this host, and the other end. */
	__u8 local[16];
	__u8 remote[16];
	__u16 local_port;
	__u16 remote_port;
	/* As IP numbers them; what is behind the IP header of one of one's own, without ports, is payload. */
	__u8 protocol;
	__u8 hop_limit;
	__u8 traffic_class;
	/* TCP's, from FIN (1) up. */
	__u8 tcp_flags;
	__u32 sequence;
	__u32 acknowledgment;
	/* Bytes of payload that the packet has, and how many of them are below. */
	__u32 packet_length;
	__u32 captured;

	/* From here on it is the handler's to change; the packet stays as it is. */
	__u32 length;
	/* For handlers to leave to those that follow. */
	__u32 mark;
	/* Whom a packet is forwarded to, and from which of the extension's ports. */
	__u8 to[16];
	__u16 to_port;
	__u16 from_port;
	/* Behind what was captured, zeros. */
	__u8 payload[PORTOLAN_PAYLOAD] __attribute__((aligned(8)));
};

/* The most that get copies of one datagram. */
#define PORTOLAN_COPIES 32

/* Who is to get a copy: a port of a host; of protocols of one's own a host, or a station in the first six bytes. */
struct portolan_destination {
	__u8 address[16];
	__u16 port;
	__u16 reserved[3];
} __attribute__((aligned(8)));

/*
 * One packet that the owner sends, at PacketSend: what a view shows, and whom it may go to instead.
 * `interface` is the device that it leaves by. Whom it is from stays what it is.
 */
struct portolan_sending {
	struct portolan_view view;
	/* Of `destinations`, from the first on. */
	__u32 copies;
	__u32 reserved;
	struct portolan_destination destinations[PORTOLAN_COPIES];
};

/*
 * Sections. An object has one handler, for what comes or for what is sent; without a predicate it
 * is called for each packet.
 */
#define PORTOLAN_HANDLER __attribute__((section("portolan/handler"), used))
#define PORTOLAN_SEND_HANDLER __attribute__((section("portolan/send"), used))
#define PORTOLAN_PREDICATE __attribute__((section("portolan/predicate"), used))
/* Functions that these call, unless they are inlined. */
#define PORTOLAN_FUNCTION static __attribute__((noinline))

/*
 * Maps, which the extension shares with its owner:
 *
 *     PORTOLAN_MAP(seen, PORTOLAN_HASH, __u32, __u64, 1024);
 *     PORTOLAN_RING(events, 65536);
 *
 * Global variables are one, too: those of .data, .bss and .rodata.
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

/* The protection domain: what an extension may call (bpf-helpers(7) describes each). */
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
