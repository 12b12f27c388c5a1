/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Replaces the payload of a sent datagram. Its headers, which have been checked, stay the same except
 * for lengths and checksums.
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
#include "payload.h"
#include "reply.h"
#include "rewrite.h"

/* Sets the length of what is behind the IP header. */
static __always_inline bool set_ip_length(struct __sk_buff *skb, const struct layout *at,
					  __u32 length)
{
	const __u32 length_v4 = ETH_HLEN + offsetof(struct iphdr, tot_len);
	__be16 before, after = bpf_htons(length);

	if (at->width != 4)
		return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, payload_len),
					   &after, sizeof(after), 0) == 0;
	after = bpf_htons(sizeof(struct iphdr) + length);
	return bpf_skb_load_bytes(skb, length_v4, &before, sizeof(before)) == 0 &&
	       bpf_skb_store_bytes(skb, length_v4, &after, sizeof(after), 0) == 0 &&
	       bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), before, after,
				   sizeof(after)) == 0;
}

/* Returns false if the new payload cannot be sent. Datagrams to be segmented are not changed. */
static __always_inline bool replace(struct __sk_buff *skb, const struct extension_work *work,
				    struct portolan_view *view)
{
	const struct layout at = layout_of(&work->key, 0);
	struct udphdr udp;

	if (work->key.protocol != IPPROTO_UDP || skb->gso_size ||
	    !put_payload(skb, at.transport + sizeof(udp), view))
		return false;
	udp = udp_of(work, view);
	return set_ip_length(skb, &at, sizeof(udp) + view->length) &&
	       bpf_skb_store_bytes(skb, at.transport, &udp, sizeof(udp), 0) == 0;
}

/* The same for a raw protocol, whose owner computes its checksums. */
static __always_inline bool replace_raw(struct __sk_buff *skb, const struct extension_work *work,
					struct portolan_view *view)
{
	const struct layout at = layout_of(&work->key, 0);

	if (skb->gso_size || !put_payload(skb, headers_of(work), view))
		return false;
	return is_of_ethernet(work) || set_ip_length(skb, &at, view->length);
}

#endif
