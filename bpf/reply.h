/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Turns a datagram into the answer to it. All headers are rewritten: source and destination are those
 * of the datagram, exchanged, whatever the extension left in its view.
 */
#ifndef REPLY_H
#define REPLY_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"
#include "parse.h"
#include "payload.h"
#include "sum.h"

#define REPLY_HOPS 64

struct reply_v4 {
	struct iphdr ip;
	struct udphdr udp;
};

struct reply_v6 {
	struct ipv6hdr ip;
	struct udphdr udp;
};

static __always_inline bool turn_ethernet(struct __sk_buff *skb)
{
	struct ethhdr came, eth;

	if (bpf_skb_load_bytes(skb, 0, &came, sizeof(came)))
		return false;
	__builtin_memcpy(eth.h_dest, came.h_source, ETH_ALEN);
	__builtin_memcpy(eth.h_source, came.h_dest, ETH_ALEN);
	eth.h_proto = came.h_proto;
	return bpf_skb_store_bytes(skb, 0, &eth, sizeof(eth), 0) == 0;
}

/* The handler may have written beyond its answer. */
static __always_inline void clear_rest(struct portolan_view *view, __u32 length)
{
	for (int i = 0; i < 3; i++) {
		__u32 at = length + i;

		if (at < PORTOLAN_PAYLOAD && at & 3)
			view->payload[at] = 0;
		else
			return;
	}
}

static __always_inline __u16 reply_checksum(const struct extension_work *work,
					    struct portolan_view *view, __be16 length)
{
	__u64 pseudo = sum_of_pseudo_header(&work->key, length);
	__u16 sum;

	if (work->checksum == CHECKSUM_NONE)
		return 0;
	if (work->checksum == CHECKSUM_PSEUDO_HEADER)
		return fold(pseudo);
	clear_rest(view, view->length);
	sum = ~fold(pseudo + sum_of_ports(&work->key) + length +
		    sum_of_payload(view->payload, view->length));
	return sum ?: 0xffff;
}

static __always_inline struct udphdr udp_of(const struct extension_work *work,
					    struct portolan_view *view)
{
	const __be16 length = bpf_htons(view->length + sizeof(struct udphdr));

	return (struct udphdr){
		.source = work->key.local_port,
		.dest = work->key.remote_port,
		.len = length,
		.check = reply_checksum(work, view, length),
	};
}

/* The IP header before `length` bytes of the packet's protocol. */
static __always_inline struct iphdr v4_of(const struct extension_work *work, __u32 length)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(struct iphdr) + length),
		.frag_off = bpf_htons(IPV4_DONT_FRAGMENT),
		.ttl = REPLY_HOPS,
		.protocol = work->key.protocol,
		.saddr = work->key.local.words[3],
		.daddr = work->key.remote.words[3],
	};

	ip.check = ~fold((__u64)bpf_htons(0x4500) + ip.tot_len + ip.frag_off +
			 bpf_htons(REPLY_HOPS << 8 | work->key.protocol) + ip.saddr + ip.daddr);
	return ip;
}

static __always_inline struct ipv6hdr v6_of(const struct extension_work *work, __u32 length)
{
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons(length),
		.nexthdr = work->key.protocol,
		.hop_limit = REPLY_HOPS,
	};

	__builtin_memcpy(&ip.saddr, &work->key.local, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, &work->key.remote, sizeof(ip.daddr));
	return ip;
}

static __always_inline bool write_v4(struct __sk_buff *skb, const struct extension_work *work,
				     struct portolan_view *view)
{
	struct reply_v4 headers = { .ip = v4_of(work, sizeof(struct udphdr) + view->length) };

	headers.udp = udp_of(work, view);
	return turn_ethernet(skb) &&
	       bpf_skb_store_bytes(skb, ETH_HLEN, &headers, sizeof(headers), 0) == 0;
}

static __always_inline bool write_v6(struct __sk_buff *skb, const struct extension_work *work,
				     struct portolan_view *view)
{
	struct reply_v6 headers = { .ip = v6_of(work, sizeof(struct udphdr) + view->length) };

	headers.udp = udp_of(work, view);
	return turn_ethernet(skb) &&
	       bpf_skb_store_bytes(skb, ETH_HLEN, &headers, sizeof(headers), 0) == 0;
}

/* Returns false if the answer may not be sent. */
static __always_inline bool reply(struct __sk_buff *skb, const struct extension_work *work,
				  struct portolan_view *view)
{
	const bool is_v4 = is_ipv4(&work->key.local);
	const __u32 headers =
		ETH_HLEN + (is_v4 ? sizeof(struct reply_v4) : sizeof(struct reply_v6));

	if (work->key.protocol != IPPROTO_UDP || !put_payload(skb, headers, view))
		return false;
	return is_v4 ? write_v4(skb, work, view) : write_v6(skb, work, view);
}

#endif
