/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Changes addresses and ports of a packet that was shown, and the checksums over them. */
#ifndef REWRITE_H
#define REWRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "lookup.h"
#include "maps.h"
#include "parse.h"

/* Source and destination of a packet. */
struct ends {
	union address addresses[2];
	struct ports ports;
};

/* Offsets in a packet that was shown: its headers have no options but a handle. */
struct layout {
	__u32 addresses;
	/* Length of an address. */
	__u32 width;
	__u32 hops;
	__u32 transport;
	__u32 checksum;
};

/* `options` is the length of the options behind the IP header. */
static __always_inline struct layout layout_of(const struct filter_key *key, __u32 options)
{
	const __u32 check = key->protocol == IPPROTO_TCP ? offsetof(struct tcphdr, check) :
							   offsetof(struct udphdr, check);

	if (is_ipv4(&key->local))
		return (struct layout){
			.addresses = ETH_HLEN + offsetof(struct iphdr, saddr),
			.width = 4,
			.hops = ETH_HLEN + offsetof(struct iphdr, ttl),
			.transport = ETH_HLEN + sizeof(struct iphdr) + options,
			.checksum = ETH_HLEN + sizeof(struct iphdr) + options + check,
		};
	return (struct layout){
		.addresses = ETH_HLEN + offsetof(struct ipv6hdr, saddr),
		.width = 16,
		.hops = ETH_HLEN + offsetof(struct ipv6hdr, hop_limit),
		.transport = ETH_HLEN + sizeof(struct ipv6hdr) + options,
		.checksum = ETH_HLEN + sizeof(struct ipv6hdr) + options + check,
	};
}

/* Packets must not be sent to a group, to a broadcast address, or back to this host. */
static __always_inline bool may_be_sent_to(const struct filter_key *key, const union address *to)
{
	if (is_ipv4(&key->local) != is_ipv4(to) || is_local(to) || is_broadcast(to))
		return false;
	if (is_ipv4(to))
		return to->bytes[12] != 0 && to->bytes[12] != 127 && to->bytes[12] < 224;
	return to->bytes[0] != 0xff && (to->words[0] || to->words[1] || to->words[2]);
}

/* A UDP checksum of 0 means none, and is kept. */
static __always_inline __u64 checksum_flags(const struct filter_key *key)
{
	return key->protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

static __always_inline bool change_addresses(struct __sk_buff *skb, const struct layout *at,
					     const struct filter_key *key, struct ends *before,
					     struct ends *after)
{
	const __u64 flags = checksum_flags(key) | BPF_F_PSEUDO_HDR;
	__s64 difference;

	if (at->width == 4) {
		__be32 before_v4[2] = { before->addresses[0].words[3],
					before->addresses[1].words[3] };
		__be32 after_v4[2] = { after->addresses[0].words[3], after->addresses[1].words[3] };

		difference = bpf_csum_diff(before_v4, sizeof(before_v4), after_v4,
					   sizeof(after_v4), 0);
		return bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), 0,
					   difference, 0) == 0 &&
		       bpf_l4_csum_replace(skb, at->checksum, 0, difference, flags) == 0 &&
		       bpf_skb_store_bytes(skb, at->addresses, after_v4, sizeof(after_v4), 0) == 0;
	}
	difference = bpf_csum_diff(before->addresses[0].words, sizeof(before->addresses),
				   after->addresses[0].words, sizeof(after->addresses), 0);
	return bpf_l4_csum_replace(skb, at->checksum, 0, difference, flags) == 0 &&
	       bpf_skb_store_bytes(skb, at->addresses, after->addresses, sizeof(after->addresses),
				   0) == 0;
}

/* For a protocol without ports, whose own checksums are unknown here. */
static __always_inline bool change_destination(struct __sk_buff *skb, const struct layout *at,
					       const union address *before,
					       const union address *after)
{
	__be32 to = after->words[3];

	if (at->width != 4)
		return bpf_skb_store_bytes(skb, at->addresses + sizeof(*after), after,
					   sizeof(*after), 0) == 0;
	return bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check),
				   before->words[3], to, sizeof(to)) == 0 &&
	       bpf_skb_store_bytes(skb, at->addresses + sizeof(to), &to, sizeof(to), 0) == 0;
}

static __always_inline bool change_ports(struct __sk_buff *skb, const struct layout *at,
					 const struct filter_key *key, struct ends *before,
					 struct ends *after)
{
	__s64 difference = bpf_csum_diff((__be32 *)&before->ports, sizeof(before->ports),
					 (__be32 *)&after->ports, sizeof(after->ports), 0);

	return bpf_l4_csum_replace(skb, at->checksum, 0, difference, checksum_flags(key)) == 0 &&
	       bpf_skb_store_bytes(skb, at->transport, &after->ports, sizeof(after->ports), 0) == 0;
}

static __always_inline bool change_ends(struct __sk_buff *skb, const struct layout *at,
					const struct filter_key *key, struct ends *before,
					struct ends *after)
{
	return change_addresses(skb, at, key, before, after) &&
	       change_ports(skb, at, key, before, after);
}

#endif
