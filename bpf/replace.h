/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Gives a datagram that is sent another payload. Its headers stay, but for lengths and checksums:
 * they have been found good.
 */
#ifndef REPLACE_H
#define REPLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "reply.h"
#include "rewrite.h"

static __always_inline bool set_ip_length(struct __sk_buff *skb, const struct layout *at,
					  __u32 udp_length)
{
	const __u32 length_v4 = ETH_HLEN + offsetof(struct iphdr, tot_len);
	__be16 before, after = bpf_htons(udp_length);

	if (at->width != 4)
		return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, payload_len),
					   &after, sizeof(after), 0) == 0;
	after = bpf_htons(sizeof(struct iphdr) + udp_length);
	return bpf_skb_load_bytes(skb, length_v4, &before, sizeof(before)) == 0 &&
	       bpf_skb_store_bytes(skb, length_v4, &after, sizeof(after), 0) == 0 &&
	       bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), before, after,
				   sizeof(after)) == 0;
}

/* False if what the extension left cannot be sent. What the device is to cut stays as it is. */
static __always_inline bool replace(struct __sk_buff *skb, const struct extension_work *work,
				    struct portolan_view *view)
{
	const struct layout at = layout_of(&work->key);
	const __u32 headers = at.transport + sizeof(struct udphdr);
	__u32 length = view->length;
	struct udphdr udp = {
		.source = work->key.local_port,
		.dest = work->key.remote_port,
		.len = bpf_htons(sizeof(udp) + length),
	};

	if (length > PORTOLAN_PAYLOAD || work->key.protocol != IPPROTO_UDP || skb->gso_size)
		return false;
	udp.check = reply_checksum(work, view, udp.len);
	if (skb->len != headers + length && bpf_skb_change_tail(skb, headers + length, 0))
		return false;
	if (!set_ip_length(skb, &at, sizeof(udp) + length) ||
	    bpf_skb_store_bytes(skb, at.transport, &udp, sizeof(udp), 0))
		return false;
	asm volatile("" : "+r"(length));
	return length == 0 || (length <= PORTOLAN_PAYLOAD &&
			       bpf_skb_store_bytes(skb, headers, view->payload, length, 0) == 0);
}

#endif
