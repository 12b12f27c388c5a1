/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Output through a managed device, after all checks. */
#ifndef SEND_H
#define SEND_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/pkt_sched.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "maps.h"
#include "parse.h"

/*
 * The mark of a frame that passes the transmit filter again ("po"), after its check, with its class.
 * Frames that a program writes have no mark.
 */
#define MARK_AGAIN 0x706f0000
#define MARK_CLASS 0xffff

/*
 * The priority of a packet that has no class: by its type of service, as the kernel sets it for its own packets (IP_TOS)
 * and for those that it forwards (rt_tos2priority).
 */
static __always_inline __u16 class_by_service(const struct __sk_buff *skb)
{
	const struct iphdr *ip = (void *)(long)skb->data + ETH_HLEN;

	if (skb->protocol != bpf_htons(ETH_P_IP) || (const void *)(ip + 1) > (void *)(long)skb->data_end)
		return 0;
	switch (ip->tos & (IPTOS_LOWDELAY | IPTOS_THROUGHPUT)) {
	case IPTOS_LOWDELAY:
		return CHOSEN_PRIORITY | TC_PRIO_INTERACTIVE;
	case IPTOS_THROUGHPUT:
		return CHOSEN_PRIORITY | TC_PRIO_BULK;
	case IPTOS_LOWDELAY | IPTOS_THROUGHPUT:
		return CHOSEN_PRIORITY | TC_PRIO_INTERACTIVE_BULK;
	default:
		return 0;
	}
}

/* Only the server sets classes: nobody can send in another's. */
static __always_inline void classify(struct __sk_buff *skb, __u16 class)
{
	if (class)
		skb->priority = priority_of(class);
}

static __always_inline int send(struct __sk_buff *skb, __u32 egress, __u16 class)
{
	classify(skb, class);
	count(transmit_sent);
	return bpf_redirect(egress, 0);
}

/* The kernel finds the destination. Frames that it forwards to this host lose their class. */
static __always_inline int send_again(struct __sk_buff *skb, __u32 egress)
{
	classify(skb, skb->mark & MARK_CLASS);
	skb->mark = 0;
	count(transmit_sent);
	return bpf_redirect_neigh(egress, NULL, 0, 0);
}

/* Whether it has no destination address, because the sender does not know the neighbour's. */
static __always_inline bool is_unaddressed(const struct __sk_buff *skb)
{
	const struct ethhdr *eth = (void *)(long)skb->data;
	const __u8 *station = eth->h_dest;

	if ((const void *)(eth + 1) > (void *)(long)skb->data_end)
		return false;
	return !(*(const __u32 *)station | *(const __u16 *)(station + 4));
}

/*
 * Sends an IP packet. A packet that the kernel keeps until a neighbour is resolved is sent as a clone,
 * so that it does not count in the tap's send buffer, which all sessions of the channel share.
 */
static __always_inline int send_packet(struct __sk_buff *skb, __u32 egress, __u16 class)
{
	class = class ?: class_by_service(skb);
	if (!is_unaddressed(skb))
		return send(skb, egress, class);
	count(transmit_unaddressed);
	skb->mark = MARK_AGAIN | class;
	bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
	return TC_ACT_STOLEN;
}

/* Whether the kernel will, or a router may, fragment it. For IPv6 the kernel sets the identification. */
static __always_inline bool needs_identification(struct __sk_buff *skb,
						 const struct filter_key *key,
						 const struct piece *piece)
{
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return false;
	return !piece->dont_fragment || (key->protocol == IPPROTO_UDP && skb->gso_size);
}

/*
 * Sets the identification of a datagram that may arrive in fragments: with a number of its own choice, a
 * library could mix its fragments into datagrams of others (RFC 7739). Counted per pair of addresses,
 * so that none is reused soon (RFC 6864).
 */
static __always_inline void identify(struct __sk_buff *skb, const struct filter_key *key)
{
	__u32 packets = skb->gso_segs ?: 1;
	const __u32 at = ETH_HLEN + offsetof(struct iphdr, id);
	__u32 index = (key->local.words[3] * 0x9e3779b1U ^ key->remote.words[3]) * 0x85ebca6bU >> 22;
	__u32 *next = bpf_map_lookup_elem(&identifications, &index);
	__be16 before, after;

	if (!next || bpf_skb_load_bytes(skb, at, &before, sizeof(before)))
		return;
	if (*next == 0)
		__sync_val_compare_and_swap(next, 0, bpf_get_prandom_u32() | 1);
	after = bpf_htons(__sync_fetch_and_add(next, packets));
	bpf_skb_store_bytes(skb, at, &after, sizeof(after), 0);
	bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), before, after,
			    sizeof(after));
}

#endif
