/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* What an extension sees of a packet: a bounded copy. */
#ifndef VIEW_H
#define VIEW_H

#include <stdbool.h>
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
#include "parse.h"
#include "sum.h"

enum shown {
	SHOWN,
	NOT_SHOWN,
	/* Its checksum is wrong. */
	BAD_CHECKSUM,
};

/*
 * Shows the IP header, if it has no options, or only a handle. Returns its length including options, or 0 for other
 * headers. `end` is the end of the packet.
 */
static __always_inline __u32 show_ip(struct cursor *cursor, const struct filter_key *key,
				     struct portolan_view *view, __u32 *end)
{
	if (is_ipv4(&key->local)) {
		struct iphdr *ip = cursor->at;
		__u32 length = sizeof(*ip);

		if ((void *)(ip + 1) > cursor->end)
			return 0;
		if (ip->ihl != 5) {
			if (!encloses_handle(cursor))
				return 0;
			length += sizeof(struct enclosed);
		}
		view->flags = 0;
		view->hop_limit = ip->ttl;
		view->traffic_class = ip->tos;
		*end = ETH_HLEN + bpf_ntohs(ip->tot_len);
		return length;
	} else {
		struct ipv6hdr *ip = cursor->at;
		__u32 length = sizeof(*ip);

		if ((void *)(ip + 1) > cursor->end)
			return 0;
		if (ip->nexthdr != key->protocol) {
			if (!encloses_handle_v6(cursor))
				return 0;
			length += sizeof(struct enclosed_v6);
		}
		view->flags = PORTOLAN_IPV6;
		view->hop_limit = ip->hop_limit;
		view->traffic_class = ip->priority << 4 | ip->flow_lbl[0] >> 4;
		*end = ETH_HLEN + sizeof(*ip) + bpf_ntohs(ip->payload_len);
		return length;
	}
}

/* Copies what fits of the payload; clears the rest of an earlier packet. */
static __always_inline bool show_payload(struct __sk_buff *skb, __u32 offset, __u32 length,
					 struct portolan_view *view)
{
	__u32 captured = length < PORTOLAN_PAYLOAD ? length : PORTOLAN_PAYLOAD;

	__builtin_memset(view->payload, 0, sizeof(view->payload));
	view->packet_length = length;
	view->captured = captured;
	view->length = captured;
	view->mark = 0;
	if (captured == 0)
		return true;
	/* Otherwise the compiler would fold this into the test above, where the verifier does not see it. */
	asm volatile("" : "+r"(captured));
	if (captured == 0 || captured > PORTOLAN_PAYLOAD)
		return false;
	return bpf_skb_load_bytes(skb, offset, view->payload, captured) == 0;
}

/*
 * Verifies the checksum. A packet from this host's own devices may have that of the pseudo-header only.
 * If the payload is not captured as a whole, the checksum is computed anew for a reply.
 */
static __always_inline enum shown check_datagram(const struct udphdr *udp,
						 struct extension_work *work,
						 struct portolan_view *view)
{
	__u64 pseudo = sum_of_pseudo_header(&work->key, udp->len);
	__u16 found = udp->check;

	work->checksum = CHECKSUM_WHOLE;
	if (found == fold(pseudo)) {
		work->checksum = CHECKSUM_PSEUDO_HEADER;
	} else if (found == 0) {
		if (!is_ipv4(&work->key.local))
			return BAD_CHECKSUM;
		work->checksum = CHECKSUM_NONE;
	} else if (view->captured == view->packet_length) {
		__u64 sum = pseudo + sum_of_ports(&work->key) + udp->len + found +
			    sum_of_payload(view->payload, view->captured);

		if (fold(sum) != 0xffff)
			return BAD_CHECKSUM;
	}
	if (view->captured == view->packet_length)
		view->flags |= PORTOLAN_CHECKED;
	return SHOWN;
}

/* Fields shown for both events. */
static __always_inline void show_ends(const struct extension_work *work,
				      struct portolan_view *view)
{
	view->interface = work->interface;
	__builtin_memcpy(view->local, &work->key.local, sizeof(view->local));
	__builtin_memcpy(view->remote, &work->key.remote, sizeof(view->remote));
	view->local_port = bpf_ntohs(work->key.local_port);
	view->remote_port = bpf_ntohs(work->key.remote_port);
	view->protocol = work->key.protocol;
	view->to_port = 0;
	view->from_port = view->local_port;
}

/* How far the checksum of a sent packet is complete; the owner is trusted. */
static __always_inline enum shown note_checksum(const struct udphdr *udp,
						struct extension_work *work)
{
	if (udp->check == 0)
		work->checksum = CHECKSUM_NONE;
	else if (udp->check == fold(sum_of_pseudo_header(&work->key, udp->len)))
		work->checksum = CHECKSUM_PSEUDO_HEADER;
	else
		work->checksum = CHECKSUM_WHOLE;
	return SHOWN;
}

/* A sent datagram may be one to be segmented; a received merged one is several, and not shown. */
static __always_inline enum shown show_datagram(struct __sk_buff *skb, struct cursor *cursor,
						__u32 offset, const enum direction direction,
						struct extension_work *work,
						struct portolan_view *view)
{
	struct udphdr *udp = cursor->at;
	struct udphdr header;
	__u32 length;

	if ((direction == RECEIVED && skb->gso_size) || (void *)(udp + 1) > cursor->end)
		return NOT_SHOWN;
	header = *udp;
	/* The frame may be padded, and may claim to be longer than it is. */
	length = bpf_ntohs(header.len);
	if (length < sizeof(header) || offset + length > skb->len)
		return NOT_SHOWN;
	view->tcp_flags = 0;
	view->sequence = 0;
	view->acknowledgment = 0;
	if (!show_payload(skb, offset + sizeof(header), length - sizeof(header), view))
		return NOT_SHOWN;
	return direction == SENT ? note_checksum(&header, work) :
				   check_datagram(&header, work, view);
}

/* The two ends verify the checksum of a segment. */
static __always_inline enum shown show_segment(struct __sk_buff *skb, struct cursor *cursor,
					       __u32 offset, __u32 end, struct portolan_view *view)
{
	struct tcphdr *tcp = cursor->at;

	if ((void *)(tcp + 1) > cursor->end)
		return NOT_SHOWN;
	offset += tcp->doff * 4;
	if (tcp->doff < 5 || offset > end || end > skb->len)
		return NOT_SHOWN;
	view->tcp_flags = ((__u8 *)tcp)[13];
	view->sequence = bpf_ntohl(tcp->seq);
	view->acknowledgment = bpf_ntohl(tcp->ack_seq);
	return show_payload(skb, offset, end - offset, view) ? SHOWN : NOT_SHOWN;
}

/* Clears the fields that only transports have. */
static __always_inline void show_no_transport(const struct extension_work *work,
					      struct portolan_view *view)
{
	view->interface = work->interface;
	view->local_port = 0;
	view->remote_port = 0;
	view->to_port = 0;
	view->from_port = 0;
	view->tcp_flags = 0;
	view->sequence = 0;
	view->acknowledgment = 0;
}

static __always_inline void show_station(__u8 *end, const __u8 *mac)
{
	__builtin_memset(end, 0, sizeof(union address));
	__builtin_memcpy(end, mac, ETH_ALEN);
}

/* A frame of a raw EtherType: both stations, and what follows the header. */
static __always_inline enum shown show_frame(struct __sk_buff *skb, const enum direction direction,
					     const struct extension_work *work,
					     struct portolan_view *view)
{
	struct ethhdr eth;

	if (skb->len < sizeof(eth) || bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return NOT_SHOWN;
	show_no_transport(work, view);
	view->flags = PORTOLAN_ETHERNET;
	view->local_port = bpf_ntohs(eth.h_proto);
	view->protocol = 0;
	view->hop_limit = 0;
	view->traffic_class = 0;
	show_station(view->local, direction == RECEIVED ? eth.h_dest : eth.h_source);
	show_station(view->remote, direction == RECEIVED ? eth.h_source : eth.h_dest);
	return show_payload(skb, sizeof(eth), skb->len - sizeof(eth), view) ? SHOWN : NOT_SHOWN;
}

/* A packet of a raw IP protocol. */
static __always_inline enum shown show_packet(struct __sk_buff *skb,
					      const struct extension_work *work,
					      struct portolan_view *view)
{
	struct cursor cursor = frame_of(skb);
	__u32 length, end;

	cursor.at += ETH_HLEN;
	length = show_ip(&cursor, &work->key, view, &end);
	if (length == 0 || skb->gso_size || end < ETH_HLEN + length || end > skb->len)
		return NOT_SHOWN;
	show_ends(work, view);
	show_no_transport(work, view);
	length += ETH_HLEN;
	return show_payload(skb, length, end - length, view) ? SHOWN : NOT_SHOWN;
}

static __always_inline enum shown show(struct __sk_buff *skb, const enum direction direction,
				       struct extension_work *work, struct portolan_view *view)
{
	struct cursor cursor = frame_of(skb);
	__u32 length, end;

	cursor.at += ETH_HLEN;
	length = show_ip(&cursor, &work->key, view, &end);
	if (length == 0)
		return NOT_SHOWN;
	work->options = length - (is_ipv4(&work->key.local) ? sizeof(struct iphdr) :
							      sizeof(struct ipv6hdr));
	cursor.at += length;
	show_ends(work, view);
	if (work->key.protocol == IPPROTO_UDP)
		return show_datagram(skb, &cursor, ETH_HLEN + length, direction, work,
				     view);
	return show_segment(skb, &cursor, ETH_HLEN + length, end, view);
}

#endif
