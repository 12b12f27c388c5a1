/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Turns a frame of a raw protocol into the answer to it. It is sent to the station that the frame came from, with this
 * host's address as its source; the EtherType stays the same.
 */
#ifndef REPLY_RAW_H
#define REPLY_RAW_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"
#include "maps.h"
#include "payload.h"
#include "reply.h"

/* Set in addresses of groups, including broadcast. */
#define GROUP_BIT 1

static __always_inline bool station_of(__u32 ifindex, __u8 *mac)
{
	__u32 zero = 0;
	const struct interface_table *table = bpf_map_lookup_elem(&interfaces, &zero);

	if (!table)
		return false;
	for (int i = 0; i < MAX_INTERFACES; i++) {
		if (table->entries[i].ifindex != ifindex)
			continue;
		__builtin_memcpy(mac, table->entries[i].mac, ETH_ALEN);
		return true;
	}
	return false;
}

/* A frame to a group is answered from this station's own address. */
static __always_inline bool answer_station(struct __sk_buff *skb,
					   const struct extension_work *work, struct ethhdr *eth)
{
	struct ethhdr came;

	if (bpf_skb_load_bytes(skb, 0, &came, sizeof(came)) || came.h_source[0] & GROUP_BIT)
		return false;
	__builtin_memcpy(eth->h_dest, came.h_source, ETH_ALEN);
	eth->h_proto = came.h_proto;
	return station_of(work->interface, eth->h_source);
}

static __always_inline bool write_headers(struct __sk_buff *skb,
					  const struct extension_work *work, __u32 length)
{
	struct ethhdr eth;

	if (!answer_station(skb, work, &eth) || bpf_skb_store_bytes(skb, 0, &eth, sizeof(eth), 0))
		return false;
	if (is_of_ethernet(work))
		return true;
	if (is_ipv4(&work->key.local)) {
		struct iphdr ip = v4_of(work, length);

		return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0) == 0;
	} else {
		struct ipv6hdr ip = v6_of(work, length);

		return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0) == 0;
	}
}

/* Returns false if the answer may not be sent. */
static __always_inline bool reply_raw(struct __sk_buff *skb, const struct extension_work *work,
				      struct portolan_view *view)
{
	return put_payload(skb, headers_of(work), view) && write_headers(skb, work, view->length);
}

#endif
