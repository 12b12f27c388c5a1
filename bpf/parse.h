/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * From a frame to the key of its flow. Reads by direct packet access; headers beyond the linear area
 * of the skb are pulled into it first. Only what the key needs is validated: the receiving stack
 * checks lengths and checksums.
 */
#ifndef PARSE_H
#define PARSE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "context.h"
#include "portolan.h"
#include "settings.h"

/* Headers without options up to and including the ports, over IPv6. */
#define USUAL_HEADERS (ETH_HLEN + 40 + 4)
/* The length made linear when even those are not: the above with room for options. */
#define PULL_HEADERS 256
#define MAX_EXTENSIONS 6
/* Bounds the offset of a transport header, for the verifier: more than that many extension headers have. */
#define HEADERS_MOST 0x3fff

#define IPV4_DONT_FRAGMENT 0x4000
#define IPV4_FRAGMENT 0x3fff
#define IPV4_FRAGMENT_OFFSET 0x1fff
#define IPV6_FRAGMENT 0xfff9
#define IPV6_FRAGMENT_OFFSET 0xfff8

enum parsed {
	PARSED_FLOW,
	PARSED_ICMP_ERROR,
	PARSED_NOT_IP,
	PARSED_MALFORMED,
	/* A fragment without a transport header: the key has no ports. */
	PARSED_LATER_FRAGMENT,
	PARSED_PROTOCOL,
};

/* Which end of the packet is this host. */
enum direction {
	RECEIVED,
	SENT,
};

/* A packet's fragmentation fields. */
struct piece {
	__be32 identification;
	bool dont_fragment;
	bool is_fragment;
	/* Not the first fragment: no transport header. */
	bool is_later;
	/* For sent packets: offset of the transport header in the frame. */
	__u8 transport;
};

struct cursor {
	void *at;
	void *end;
};

/* RFC 792, RFC 4443; the uapi headers would include the C library's. */
struct icmp {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 parameter;
};

#define ICMP_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMPV6_UNREACHABLE 1
#define ICMPV6_PARAMETER_PROBLEM 4

struct ports {
	__be16 source;
	__be16 destination;
};

/* The last two fields belong to a routing header. */
struct extension {
	__u8 next;
	__u8 length;
	__u8 routing_type;
	__u8 segments_left;
};

struct fragment {
	__u8 next;
	__u8 reserved;
	__be16 offset_and_more;
	__be32 identification;
};

static __always_inline void set_piece(struct piece *piece, const struct fragment *fragment)
{
	piece->identification = fragment->identification;
	piece->is_fragment = fragment->offset_and_more & bpf_htons(IPV6_FRAGMENT);
	piece->is_later = fragment->offset_and_more & bpf_htons(IPV6_FRAGMENT_OFFSET);
}

static __always_inline struct cursor frame_of(hook_context *packet)
{
	if (packet->data + USUAL_HEADERS > packet->data_end)
		make_linear(packet, PULL_HEADERS);
	return (struct cursor){
		.at = (void *)(unsigned long)packet->data,
		.end = (void *)(unsigned long)packet->data_end,
	};
}

static __always_inline void set_v4(union address *address, __be32 v4)
{
	address->words[0] = 0;
	address->words[1] = 0;
	address->words[2] = bpf_htonl(0xffff);
	address->words[3] = v4;
}

static __always_inline void set_v6(union address *address, const struct in6_addr *v6)
{
	__builtin_memcpy(address, v6, sizeof(*address));
}

/* Leaves the cursor behind the header, at the protocol stored in the key. */
static __always_inline enum parsed parse_ipv4(struct cursor *cursor, struct filter_key *key,
					      const enum direction direction, struct piece *piece)
{
	struct iphdr *ip = cursor->at;
	__u32 length;

	if ((void *)(ip + 1) > cursor->end)
		return PARSED_MALFORMED;
	length = ip->ihl * 4;
	if (ip->version != 4 || length < sizeof(*ip))
		return PARSED_MALFORMED;
	set_v4(&key->local, direction == RECEIVED ? ip->daddr : ip->saddr);
	set_v4(&key->remote, direction == RECEIVED ? ip->saddr : ip->daddr);
	key->protocol = ip->protocol;
	piece->identification = ip->id;
	piece->dont_fragment = ip->frag_off & bpf_htons(IPV4_DONT_FRAGMENT);
	piece->is_fragment = ip->frag_off & bpf_htons(IPV4_FRAGMENT);
	piece->is_later = ip->frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET);
	cursor->at += length;
	return piece->is_later ? PARSED_LATER_FRAGMENT : PARSED_FLOW;
}

static __always_inline bool is_extension(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING ||
	       protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_DSTOPTS;
}

/* A header within an IPv6 packet. */
struct next_header {
	/* From the start of the frame. */
	__u32 offset;
	__u8 protocol;
};

/*
 * RFC 8200 §4: goes from the extension header behind the IPv6 header to the transport header. Packets that this host
 * alone cannot judge (a route that continues, misplaced hop-by-hop options) are left to the kernel. Global, so that the
 * verifier checks it once; few packets have any of these headers.
 */
__noinline int skip_extensions(hook_context *packet, struct next_header *header,
			       struct piece *piece)
{
	union {
		struct extension extension;
		struct fragment fragment;
	} at;

	if (!header || !piece)
		return PARSED_MALFORMED;
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		__u8 protocol = header->protocol;

		if (!is_extension(protocol))
			return PARSED_FLOW;
		if (load_bytes(packet, header->offset, &at, sizeof(at)))
			return PARSED_MALFORMED;
		if (protocol == IPPROTO_HOPOPTS && i > 0)
			return PARSED_MALFORMED;
		if (protocol == IPPROTO_ROUTING && at.extension.segments_left)
			return PARSED_PROTOCOL;
		header->protocol = at.extension.next;
		if (protocol != IPPROTO_FRAGMENT) {
			header->offset += (at.extension.length + 1) * 8;
			continue;
		}
		/* RFC 6946: an atomic fragment is a whole packet. */
		set_piece(piece, &at.fragment);
		header->offset += sizeof(at.fragment);
		if (piece->is_later)
			return PARSED_LATER_FRAGMENT;
	}
	return is_extension(header->protocol) ? PARSED_MALFORMED : PARSED_FLOW;
}

/* Leaves the cursor at the transport header. */
static __always_inline enum parsed to_transport(hook_context *packet, struct cursor *cursor,
						struct filter_key *key, struct piece *piece)
{
	void *frame = (void *)(unsigned long)packet->data;
	struct next_header header = { .offset = cursor->at - frame, .protocol = key->protocol };
	enum parsed parsed;

	if (!is_extension(key->protocol))
		return PARSED_FLOW;
	parsed = skip_extensions(packet, &header, piece);
	key->protocol = header.protocol;
	if (parsed == PARSED_FLOW && header.offset > HEADERS_MOST)
		return PARSED_MALFORMED;
	cursor->at = (void *)(unsigned long)packet->data + (header.offset & HEADERS_MOST);
	cursor->end = (void *)(unsigned long)packet->data_end;
	return parsed;
}

static __always_inline enum parsed parse_ipv6(struct cursor *cursor, struct filter_key *key,
					      const enum direction direction)
{
	struct ipv6hdr *ip = cursor->at;

	if ((void *)(ip + 1) > cursor->end)
		return PARSED_MALFORMED;
	if (ip->version != 6)
		return PARSED_MALFORMED;
	set_v6(&key->local, direction == RECEIVED ? &ip->daddr : &ip->saddr);
	set_v6(&key->remote, direction == RECEIVED ? &ip->saddr : &ip->daddr);
	key->protocol = ip->nexthdr;
	cursor->at += sizeof(*ip);
	return PARSED_FLOW;
}

static __always_inline enum parsed parse_ports(struct cursor *cursor, struct filter_key *key,
					       const enum direction direction)
{
	struct ports *ports = cursor->at;

	if (key->protocol != IPPROTO_TCP && key->protocol != IPPROTO_UDP)
		return PARSED_PROTOCOL;
	if ((void *)(ports + 1) > cursor->end)
		return PARSED_MALFORMED;
	key->local_port = direction == RECEIVED ? ports->destination : ports->source;
	key->remote_port = direction == RECEIVED ? ports->source : ports->destination;
	return PARSED_FLOW;
}

/*
 * The owner of an error about a later fragment is unknown; an error about a packet of another protocol
 * is not a packet of that protocol.
 */
static __always_inline enum parsed icmp_error(enum parsed quoted, struct filter_key *key)
{
	switch (quoted) {
	case PARSED_FLOW:
		return PARSED_ICMP_ERROR;
	case PARSED_LATER_FRAGMENT:
	case PARSED_PROTOCOL:
		key->protocol = IPPROTO_ICMP;
		return PARSED_PROTOCOL;
	default:
		return quoted;
	}
}

/*
 * An ICMP error quotes a packet that this host sent: the key becomes that packet's. RFC 792 and
 * RFC 4443 §3 guarantee that the quotation includes the ports.
 */
static __always_inline enum parsed parse_icmpv4(struct cursor *cursor, struct filter_key *key)
{
	struct icmp *icmp = cursor->at;
	struct piece quoted = {};
	enum parsed parsed;

	if ((void *)(icmp + 1) > cursor->end)
		return PARSED_MALFORMED;
	if (icmp->type != ICMP_UNREACHABLE && icmp->type != ICMP_TIME_EXCEEDED &&
	    icmp->type != ICMP_PARAMETER_PROBLEM)
		return PARSED_PROTOCOL;
	cursor->at += sizeof(*icmp);
	parsed = parse_ipv4(cursor, key, SENT, &quoted);
	if (parsed == PARSED_FLOW)
		parsed = parse_ports(cursor, key, SENT);
	return icmp_error(parsed, key);
}

static __always_inline enum parsed parse_icmpv6(hook_context *packet, struct cursor *cursor,
						struct filter_key *key)
{
	struct icmp *icmp = cursor->at;
	struct piece quoted = {};
	enum parsed parsed;

	if ((void *)(icmp + 1) > cursor->end)
		return PARSED_MALFORMED;
	if (icmp->type < ICMPV6_UNREACHABLE || icmp->type > ICMPV6_PARAMETER_PROBLEM)
		return PARSED_PROTOCOL;
	cursor->at += sizeof(*icmp);
	parsed = parse_ipv6(cursor, key, SENT);
	if (parsed == PARSED_FLOW)
		parsed = to_transport(packet, cursor, key, &quoted);
	if (parsed == PARSED_FLOW)
		parsed = parse_ports(cursor, key, SENT);
	return icmp_error(parsed, key);
}

/* The flow of a frame received from the network. */
static __always_inline enum parsed parse_received(hook_context *packet, struct filter_key *key,
						  struct piece *piece)
{
	struct cursor cursor = frame_of(packet);
	struct ethhdr *eth = cursor.at;
	enum parsed parsed;

	if ((void *)(eth + 1) > cursor.end)
		return PARSED_MALFORMED;
	cursor.at += sizeof(*eth);
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		parsed = parse_ipv4(&cursor, key, RECEIVED, piece);
		if (parsed != PARSED_FLOW)
			return parsed;
		if (key->protocol == IPPROTO_ICMP)
			return parse_icmpv4(&cursor, key);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		parsed = parse_ipv6(&cursor, key, RECEIVED);
		if (parsed != PARSED_FLOW)
			return parsed;
		parsed = to_transport(packet, &cursor, key, piece);
		if (parsed != PARSED_FLOW)
			return parsed;
		if (key->protocol == IPPROTO_ICMPV6)
			return parse_icmpv6(packet, &cursor, key);
	} else {
		return PARSED_NOT_IP;
	}
	return parse_ports(&cursor, key, RECEIVED);
}

/* RFC 4727: an experimental option, copied to fragments. */
#define OPTION_ENCLOSED 158
#define DSCP_MASK 0xfc

/* RFC 4727: an experimental option; a host that does not know it skips it. */
#define OPTION_ENCLOSED_V6 0x1e
#define OPTION_PAD_N 1

/*
 * A handle for active demultiplexing (MS §VI), as it follows an IPv4 header. The length of an IPv6
 * option excludes type and length.
 */
struct enclosed {
	__u8 type;
	__u8 length;
	__be16 index;
	__be32 nonce[2];
};

/* A destination options header with that option only, preceded by two bytes of padding. */
struct enclosed_v6 {
	__u8 next;
	__u8 length;
	__u8 pad;
	__u8 pad_length;
	struct enclosed option;
};

_Static_assert(sizeof(struct enclosed) == 12, "the option of a handle");
_Static_assert(sizeof(struct enclosed_v6) == 16, "the header of a handle");

/* Whether an IPv4 header has that option, and no other. */
static __always_inline bool encloses_handle(const struct cursor *cursor)
{
	const struct iphdr *ip = cursor->at;
	const struct enclosed *enclosed = (const void *)(ip + 1);

	return settings.marker && (const void *)(enclosed + 1) <= cursor->end && ip->ihl == 8 &&
	       ip->version == 4 && ip->protocol == IPPROTO_TCP &&
	       enclosed->type == OPTION_ENCLOSED && enclosed->length == sizeof(*enclosed);
}

/* Whether that header follows an IPv6 header. */
static __always_inline bool encloses_handle_v6(const struct cursor *cursor)
{
	const struct ipv6hdr *ip = cursor->at;
	const struct enclosed_v6 *enclosed = (const void *)(ip + 1);

	return settings.marker && (const void *)(enclosed + 1) <= cursor->end &&
	       ip->nexthdr == IPPROTO_DSTOPTS && enclosed->next == IPPROTO_TCP &&
	       enclosed->length == 1 && enclosed->pad == OPTION_PAD_N &&
	       enclosed->pad_length == 0 && enclosed->option.type == OPTION_ENCLOSED_V6 &&
	       enclosed->option.length == sizeof(struct enclosed) - 2;
}

/*
 * Leaves the cursor at the transport header. The only extension header permitted is one with a handle.
 */
static __always_inline enum parsed parse_ipv6_sent(struct cursor *cursor, struct filter_key *key,
						   struct piece *piece)
{
	bool encloses = encloses_handle_v6(cursor);
	enum parsed parsed = parse_ipv6(cursor, key, SENT);

	piece->transport = ETH_HLEN + sizeof(struct ipv6hdr);
	if (encloses) {
		key->protocol = IPPROTO_TCP;
		cursor->at += sizeof(struct enclosed_v6);
		piece->transport += sizeof(struct enclosed_v6);
	}
	return parsed;
}

/*
 * The addresses and the protocol of a frame that a channel sends; leaves the cursor at its transport
 * header.
 */
static __always_inline enum parsed parse_sent(struct cursor *cursor, struct filter_key *key,
					      struct piece *piece)
{
	struct ethhdr *eth = cursor->at;

	if ((void *)(eth + 1) > cursor->end)
		return PARSED_MALFORMED;
	cursor->at += sizeof(*eth);
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		__u8 *version_and_length = cursor->at;

		/* No options but a handle are permitted: source routes among them would undermine the checks. */
		if ((void *)(version_and_length + 1) > cursor->end ||
		    (*version_and_length != 0x45 && !encloses_handle(cursor)))
			return PARSED_MALFORMED;
		piece->transport = ETH_HLEN + (*version_and_length & 0xf) * 4;
		/* Fragments are not permitted: the kernel makes them from a datagram that can be checked. */
		if (parse_ipv4(cursor, key, SENT, piece) != PARSED_FLOW || piece->is_fragment)
			return PARSED_MALFORMED;
		return PARSED_FLOW;
	}
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return parse_ipv6_sent(cursor, key, piece);
	return PARSED_NOT_IP;
}

#endif
