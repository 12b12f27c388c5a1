/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Raw protocols, run by a program: EtherTypes and IP protocols that belong to one channel. */
#ifndef RAW_H
#define RAW_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "lookup.h"
#include "maps.h"

static __always_inline struct flow_row *find_raw(__u8 kind, __be16 number)
{
	struct raw_key key = { .kind = kind, .number = number };

	return bpf_map_lookup_elem(&raw_flows, &key);
}

/* The row of a frame that carries neither IPv4 nor IPv6. */
static __always_inline struct flow_row *find_raw_frame(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6))
		return NULL;
	return find_raw(RAW_ETHERTYPE, skb->protocol);
}

static __always_inline struct flow_row *find_raw_packet(const struct filter_key *key)
{
	return find_raw(RAW_IP_PROTOCOL, bpf_htons(key->protocol));
}

/* Whether the channel has the protocol; if so, stores its row. */
static __always_inline enum sender raw_sender(__u8 kind, __be16 number, struct flow_row *sender)
{
	const struct flow_row *row = find_raw(kind, number);

	if (!row)
		return SENDER_UNKNOWN;
	if (row->channel != sender->channel)
		return SENDER_FOREIGN;
	*sender = *row;
	return SENDER_OWNER;
}

#endif
