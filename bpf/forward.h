/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Sends a packet on to another host, as if it came from here: from an address of this host, and
 * from a port whose handler the extension is, too. Nothing but addresses, ports and hops changes,
 * so that what the two ends say to each other stays between them.
 */
#ifndef FORWARD_H
#define FORWARD_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"

/* Where things are in a packet that is shown: its headers have no options. */
struct layout {
	__u32 addresses;
	/* Of each. */
	__u32 width;
	__u32 hops;
	__u32 transport;
	__u32 checksum;
};

static __always_inline struct layout layout_of(const struct filter_key *key)
{
	const __u32 check = key->protocol == IPPROTO_TCP ? offsetof(struct tcphdr, check) :
							   offsetof(struct udphdr, check);

	if (is_ipv4(&key->local))
		return (struct layout){
			.addresses = ETH_HLEN + offsetof(struct iphdr, saddr),
			.width = 4,
			.hops = ETH_HLEN + offsetof(struct iphdr, ttl),
			.transport = ETH_HLEN + sizeof(struct iphdr),
			.checksum = ETH_HLEN + sizeof(struct iphdr) + check,
		};
	return (struct layout){
		.addresses = ETH_HLEN + offsetof(struct ipv6hdr, saddr),
		.width = 16,
		.hops = ETH_HLEN + offsetof(struct ipv6hdr, hop_limit),
		.transport = ETH_HLEN + sizeof(struct ipv6hdr),
		.checksum = ETH_HLEN + sizeof(struct ipv6hdr) + check,
	};
}

/* Is the extension called for what comes to that port, too? Then its owner has it. */
static __always_inline bool has_port(const struct extension_work *work, __be16 port)
{
	const struct guard_key guard = {
		.channel = work->row.channel,
		.port = port,
		.protocol = work->key.protocol,
		.event = work->event,
	};
	struct chain *chain;

	if (port == work->key.local_port)
		return true;
	chain = bpf_map_lookup_elem(&guards, &guard);
	if (!chain)
		return false;
	for (__u32 i = 0; i < CHAIN_MAX; i++) {
		if (i < chain->count && chain->numbers[i] == work->number)
			return true;
	}
	return false;
}

/* Nobody is sent to a group, to all, or back here. */
static __always_inline bool may_be_sent_to(const struct filter_key *key, const union address *to)
{
	if (is_ipv4(&key->local) != is_ipv4(to) || is_local(to) || is_broadcast(to))
		return false;
	if (is_ipv4(to))
		return to->octets[12] != 0 && to->octets[12] != 127 && to->octets[12] < 224;
	return to->octets[0] != 0xff && (to->words[0] || to->words[1] || to->words[2]);
}

/* Two forwarders that send to each other would never end. */
static __always_inline bool take_hop(struct __sk_buff *skb, const struct layout *at)
{
	__u16 before, after;
	__u8 hops;

	if (bpf_skb_load_bytes(skb, at->hops, &hops, sizeof(hops)) || hops <= 1)
		return false;
	if (at->width == 4) {
		if (bpf_skb_load_bytes(skb, at->hops, &before, sizeof(before)))
			return false;
		after = before - bpf_htons(0x0100);
		if (bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), before,
					after, sizeof(after)))
			return false;
	}
	hops -= 1;
	return bpf_skb_store_bytes(skb, at->hops, &hops, sizeof(hops), 0) == 0;
}

/* A UDP checksum of 0 is none, and stays so. */
static __always_inline __u64 checksum_flags(const struct filter_key *key)
{
	return key->protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

static __always_inline bool change_addresses(struct __sk_buff *skb, const struct layout *at,
					     const struct filter_key *key,
					     const union address *to)
{
	const __u64 flags = checksum_flags(key) | BPF_F_PSEUDO_HDR;
	union address before[2] = { key->remote, key->local };
	union address after[2] = { key->local, *to };
	__s64 difference;

	if (at->width == 4) {
		__be32 before_v4[2] = { key->remote.words[3], key->local.words[3] };
		__be32 after_v4[2] = { key->local.words[3], to->words[3] };

		difference = bpf_csum_diff(before_v4, sizeof(before_v4), after_v4,
					   sizeof(after_v4), 0);
		return bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), 0,
					   difference, 0) == 0 &&
		       bpf_l4_csum_replace(skb, at->checksum, 0, difference, flags) == 0 &&
		       bpf_skb_store_bytes(skb, at->addresses, after_v4, sizeof(after_v4), 0) == 0;
	}
	difference = bpf_csum_diff(before[0].words, sizeof(before), after[0].words, sizeof(after),
				   0);
	return bpf_l4_csum_replace(skb, at->checksum, 0, difference, flags) == 0 &&
	       bpf_skb_store_bytes(skb, at->addresses, after, sizeof(after), 0) == 0;
}

static __always_inline bool change_ports(struct __sk_buff *skb, const struct layout *at,
					 const struct filter_key *key, struct ports *after)
{
	struct ports before = { .source = key->remote_port, .destination = key->local_port };
	__s64 difference = bpf_csum_diff((__be32 *)&before, sizeof(before), (__be32 *)after,
					 sizeof(*after), 0);

	return bpf_l4_csum_replace(skb, at->checksum, 0, difference, checksum_flags(key)) == 0 &&
	       bpf_skb_store_bytes(skb, at->transport, after, sizeof(*after), 0) == 0;
}

/* False if the extension has not the port, or names nobody that it can go to. */
static __always_inline bool forward(struct __sk_buff *skb, const struct extension_work *work,
				    const struct portolan_view *view)
{
	const struct layout at = layout_of(&work->key);
	struct ports ports = {
		.source = bpf_htons(view->from_port),
		.destination = bpf_htons(view->to_port),
	};
	union address to;

	__builtin_memcpy(&to, view->to, sizeof(to));
	if (!view->to_port || !has_port(work, ports.source) || !may_be_sent_to(&work->key, &to))
		return false;
	return take_hop(skb, &at) && change_addresses(skb, &at, &work->key, &to) &&
	       change_ports(skb, &at, &work->key, &ports);
}

#endif
