/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Datagrams for more than one socket: to multicast groups and to broadcast addresses. Each member
 * gets a copy in its ring; the frame itself continues to the kernel, whose own sockets may need it.
 */
#ifndef GROUPS_H
#define GROUPS_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "deliver.h"
#include "fragments.h"
#include "lookup.h"
#include "maps.h"
#include "martian.h"
#include "parse.h"

/* What the copies of one datagram have in common. */
struct copies {
	struct __sk_buff *skb;
	struct member_key key;
	struct delivery delivery;
	struct recipient only;
};

static __always_inline bool is_for(const struct flow_row *row, const struct recipient *only)
{
	return !only->channel ||
	       (row->slot == only->slot && (__u16)(row->channel + 1) == only->channel);
}

static long copy_to_member(__u32 index, struct copies *copies)
{
	struct flow_row *row;

	copies->key.index = index;
	row = bpf_map_lookup_elem(&members, &copies->key);
	if (!row)
		return 1;
	if (is_for(row, &copies->only) &&
	    (!is_budgeted(row) || !exceeds_budget(copies->skb, row)))
		deliver_by_ring(copies->skb, row, &copies->delivery);
	return 0;
}

/*
 * Makes copies for all members of an address on a device; returns 0 if there are none. Uses the result of the loop, which
 * ends at the first missing member: with a counter of its own, the verifier would follow each iteration separately, for
 * seconds. Global, to be verified once.
 */
__noinline int copy_to_members(struct __sk_buff *skb, const struct member_key *first,
			       const struct delivery *delivery, const struct recipient *only)
{
	struct copies copies = { .skb = skb };

	if (!first || !delivery || !only)
		return 0;
	copies.only = *only;
	copies.key = *first;
	copies.delivery = *delivery;
	return bpf_loop(MEMBERS_MAX, copy_to_member, &copies, 0) > 1;
}

/* A broadcast is for every socket of the binding. Global as above. */
__noinline int copy_to_binding(struct __sk_buff *skb, const struct binding_key *binding,
			       const struct delivery *delivery, const struct recipient *only)
{
	struct flow_row *row;

	if (!binding || !delivery || !only)
		return false;
	row = bpf_map_lookup_elem(&bindings, binding);
	if (!row)
		return false;
	if (row->flags & ROW_SHARED) {
		const struct member_key first = {
			.group = binding->local,
			.port = binding->local_port,
		};

		return copy_to_members(skb, &first, delivery, only);
	}
	if (!is_for(row, only))
		return true;
	if (!is_budgeted(row) || !exceeds_budget(skb, row))
		deliver_by_ring(skb, row, delivery);
	return true;
}

/*
 * The endpoints of a datagram whose IP header starts at `offset`, except the ports of a later
 * fragment; false for anything else. Copies the headers: such frames are rare, and looped-back ones
 * have no Ethernet header.
 */
static __always_inline bool parse_datagram(struct __sk_buff *skb, __u32 offset,
					   struct filter_key *key, struct piece *piece)
{
	struct ports ports;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
			return false;
		if (ip.version != 4 || ip.ihl < 5 || ip.protocol != IPPROTO_UDP)
			return false;
		piece->identification = ip.id;
		piece->is_fragment = ip.frag_off & bpf_htons(IPV4_FRAGMENT);
		piece->is_later = ip.frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET);
		set_v4(&key->local, ip.daddr);
		set_v4(&key->remote, ip.saddr);
		offset += ip.ihl * 4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct fragment fragment;
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)) || ip.version != 6)
			return false;
		set_v6(&key->local, &ip.daddr);
		set_v6(&key->remote, &ip.saddr);
		offset += sizeof(ip);
		if (ip.nexthdr == IPPROTO_FRAGMENT) {
			if (bpf_skb_load_bytes(skb, offset, &fragment, sizeof(fragment)))
				return false;
			ip.nexthdr = fragment.next;
			offset += sizeof(fragment);
			set_piece(piece, &fragment);
		}
		if (ip.nexthdr != IPPROTO_UDP)
			return false;
	} else {
		return false;
	}
	key->protocol = IPPROTO_UDP;
	if (piece->is_later)
		return true;
	if (bpf_skb_load_bytes(skb, offset, &ports, sizeof(ports)))
		return false;
	key->local_port = ports.destination;
	key->remote_port = ports.source;
	return true;
}

/*
 * The layout of a frame that is not for this host only. A copy that the kernel loops back to its own
 * host (PACKET_LOOPBACK) begins with the IP header.
 */
static __always_inline struct delivery delivery_of(struct __sk_buff *skb)
{
	return (struct delivery){
		.flags = RECORD_BINDING | RECORD_COPY,
		.interface = skb->ifindex,
		.missing = skb->pkt_type == PACKET_LOOPBACK ? ETH_HLEN : 0,
	};
}

/* Where a datagram to be copied comes from. */
#define COPY_FROM_KERNEL 0
/* From other hosts only. */
#define COPY_FROM_WIRE 1
/* The recipient may be named in place of the station's own address. */
#define COPY_FROM_SERVER 2

/*
 * Copies a datagram to all its recipients; returns 0 if there are none. Global, to be verified once.
 */
__noinline int distribute(struct __sk_buff *skb, const struct delivery *asked, __u32 giver)
{
	struct recipient only = {};
	struct filter_key key = {};
	struct piece piece = {};
	struct delivery delivery;
	bool any = false;

	if (!asked || !parse_datagram(skb, asked->missing ? 0 : ETH_HLEN, &key, &piece))
		return 0;
	if (!is_multicast(&key.local) && !is_broadcast(&key.local))
		return 0;
	if (giver == COPY_FROM_SERVER && bpf_skb_load_bytes(skb, 0, &only, sizeof(only)))
		return 0;
	if (giver == COPY_FROM_WIRE && is_martian(&key)) {
		count(receive_drop_martian);
		return 0;
	}
	/* What the kernel loops back arrives in order. */
	if (piece.is_later && !recall_port(skb, &key, &piece, !asked->missing))
		return 0;
	delivery = *asked;
	if (piece.is_fragment)
		delivery.flags |= RECORD_FRAGMENT;
	if (is_multicast(&key.local)) {
		const struct member_key first = {
			.group = key.local,
			.interface = delivery.interface,
			.port = key.local_port,
		};

		any = copy_to_members(skb, &first, &delivery, &only);
	} else {
		struct binding_key binding = exact_binding(&key);

		any = copy_to_binding(skb, &binding, &delivery, &only);
		to_wildcard(&binding);
		any |= copy_to_binding(skb, &binding, &delivery, &only);
	}
	if (piece.is_fragment && !piece.is_later)
		remember_port(skb, &key, &piece, any);
	return any;
}

#endif
