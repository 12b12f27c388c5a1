/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Parses a SYN that may be answered in the filter: only plain ones, unfragmented, with a valid
 * checksum, no payload and regular options. Anything unusual is left to the owner.
 */
#ifndef SYN_H
#define SYN_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"
#include "sum.h"

#define TCP_FLAGS_AT 13
#define TCP_SYN 0x02
#define TCP_ACK 0x10
#define TCP_ECE 0x40
#define TCP_CWR 0x80

/* RFC 9293 §3.1, RFC 7323, RFC 2018. */
#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_MSS 2
#define OPTION_SCALE 3
#define OPTION_SACK_PERMITTED 4
#define OPTION_TIMESTAMPS 8
#define OPTIONS_MAX 40

/* RFC 7323 §2.3. */
#define SCALE_MAX 14

/* As in the packet, with padding behind it, so that a masked index stays in bounds. */
union segment {
	struct tcphdr header;
	__u8 bytes[128];
};

struct syn {
	union segment segment;
	enum checksum checksum;
	/* The values of its options; 0 if absent. */
	__u16 size;
	bool has_scale;
	__u8 scale;
	bool permits_sack;
	bool has_stamp;
	__be32 stamp;
};

/* The length of the packet's payload behind an IP header without options; 0 for other packets. */
static __always_inline __u32 read_ip(struct __sk_buff *skb, const struct filter_key *key,
				     __u8 least_hops, __u32 *offset)
{
	struct iphdr v4;
	struct ipv6hdr v6;
	__u32 length;

	if (is_ipv4(&key->local)) {
		*offset = ETH_HLEN + sizeof(v4);
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &v4, sizeof(v4)) || v4.ihl != 5 ||
		    v4.ttl < least_hops)
			return 0;
		if (fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)&v4, sizeof(v4), 0)) != 0xffff)
			return 0;
		length = bpf_ntohs(v4.tot_len);
		return length > sizeof(v4) ? length - sizeof(v4) : 0;
	}
	*offset = ETH_HLEN + sizeof(v6);
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &v6, sizeof(v6)) || v6.nexthdr != IPPROTO_TCP ||
	    v6.hop_limit < least_hops)
		return 0;
	return bpf_ntohs(v6.payload_len);
}

/* A checksum left partial by the sending device is accepted, since the answer's may be completed, too. */
static __always_inline bool is_intact(const struct filter_key *key, struct syn *syn, __u32 length)
{
	const __u64 pseudo = sum_of_pseudo_header(key, bpf_htons(length));

	syn->checksum = CHECKSUM_WHOLE;
	if (syn->segment.header.check == fold(pseudo)) {
		syn->checksum = CHECKSUM_PSEUDO_HEADER;
		return true;
	}
	return fold(pseudo + (__u32)bpf_csum_diff(NULL, 0, (__be32 *)&syn->segment, length, 0)) ==
	       0xffff;
}

static __always_inline __u8 byte(const struct syn *syn, __u32 at)
{
	return syn->segment.bytes[at & (sizeof(syn->segment) - 1)];
}

/* Returns false if the length of the option does not match its kind. */
static __always_inline bool take_option(struct syn *syn, __u8 kind, __u8 length, __u32 at)
{
	switch (kind) {
	case OPTION_MSS:
		syn->size = byte(syn, at + 2) << 8 | byte(syn, at + 3);
		return length == 4;
	case OPTION_SCALE:
		syn->has_scale = true;
		syn->scale = byte(syn, at + 2);
		return length == 3;
	case OPTION_SACK_PERMITTED:
		syn->permits_sack = true;
		return length == 2;
	case OPTION_TIMESTAMPS:
		syn->has_stamp = true;
		syn->stamp = bpf_htonl((__u32)byte(syn, at + 2) << 24 | byte(syn, at + 3) << 16 |
				       byte(syn, at + 4) << 8 | byte(syn, at + 5));
		return length == 10;
	default:
		return true;
	}
}

/*
 * Position of the option after the one at `at`; 0 if that one does not fit. Global, so that the verifier
 * checks it once and not for every sequence of options.
 */
__noinline int next_option(struct syn *syn, __u32 at, __u32 end)
{
	__u8 kind, length;

	if (!syn)
		return 0;
	kind = byte(syn, at);
	if (kind == OPTION_END)
		return end;
	if (kind == OPTION_NOP)
		return at + 1;
	length = byte(syn, at + 1);
	if (length < 2 || at + length > end || !take_option(syn, kind, length, at))
		return 0;
	return at + length;
}

static __always_inline bool read_options(struct syn *syn, __u32 end)
{
	__u32 at = sizeof(struct tcphdr);

	for (int i = 0; i < OPTIONS_MAX && at < end; i++) {
		at = next_option(syn, at, end);
		if (at == 0)
			return false;
	}
	return true;
}

/* Returns false if the SYN may not be answered here. */
static __always_inline bool read_syn(struct __sk_buff *skb, const struct filter_key *key,
				     __u8 least_hops, struct syn *syn, __u32 *offset)
{
	__u32 length = read_ip(skb, key, least_hops, offset);
	const __u8 others = 0xff & ~(TCP_SYN | TCP_ECE | TCP_CWR);
	__u8 flags;

	if (length < sizeof(struct tcphdr) || length > sizeof(struct tcphdr) + OPTIONS_MAX ||
	    skb->gso_size || !key->remote_port)
		return false;
	asm volatile("" : "+r"(length));
	if (length == 0 || length > sizeof(struct tcphdr) + OPTIONS_MAX)
		return false;
	__builtin_memset(syn, 0, sizeof(*syn));
	if (bpf_skb_load_bytes(skb, *offset, &syn->segment, length))
		return false;
	flags = syn->segment.bytes[TCP_FLAGS_AT];
	return (flags & TCP_SYN) && !(flags & others) &&
	       syn->segment.header.doff * 4U == length && is_intact(key, syn, length) &&
	       read_options(syn, length);
}

#endif
