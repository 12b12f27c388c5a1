// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The transmit filter, at tc ingress of each channel's tap: a channel sends only packets of its own
 * sessions, through the device whose MAC address they carry, in their class there. Everything else
 * is dropped and counted.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "extension.h"
#include "lookup.h"
#include "maps.h"
#include "offload.h"
#include "parse.h"
#include "raw.h"
#include "send.h"

#define DROP(reason)                                                                               \
	do {                                                                                       \
		count(transmit_drop_##reason);                                                     \
		return TC_ACT_SHOT;                                                                \
	} while (0)

static __always_inline bool same_mac(const __u8 *a, const __u8 *b)
{
	return *(__u32 *)a == *(__u32 *)b && *(__u16 *)(a + 4) == *(__u16 *)(b + 4);
}

/* The managed device with this MAC address; 0 if there is none. */
static __always_inline __u32 egress_of(const __u8 *mac)
{
	__u32 zero = 0;
	struct interface_table *table = bpf_map_lookup_elem(&interfaces, &zero);

	if (!table)
		return 0;
	for (int i = 0; i < MAX_INTERFACES; i++) {
		const struct interface *interface = &table->entries[i];

		if (!interface->ifindex)
			return 0;
		if (same_mac(interface->mac, mac))
			return interface->ifindex;
	}
	return 0;
}

/* Sends a frame of a raw protocol, if it belongs to the channel. */
static __always_inline int send_raw_frame(struct __sk_buff *skb, const struct ethhdr *eth,
					  const struct tap *tap)
{
	const struct filter_key key = { .local_port = eth->h_proto };
	struct flow_row sender = { .channel = tap->channel };
	enum sender who = raw_sender(RAW_ETHERTYPE, eth->h_proto, &sender);
	__u32 egress;

	if (who == SENDER_UNKNOWN)
		DROP(not_ip);
	if (who == SENDER_FOREIGN)
		DROP(foreign);
	egress = egress_of(eth->h_source);
	if (!egress)
		DROP(source_mac);
	if (!is_complete(skb))
		DROP(offload);
	sender.class = tap->class;
	if (sender.flags & ROW_EXTENDED_SENDING)
		raise_sent(skb, &sender, &key, egress, false, EVENT_ETHERNET_SEND);
	return send(skb, egress, sender.class);
}

/* Sends an IP packet of a raw protocol, whose source must be this host. */
static __always_inline int send_raw_packet(struct __sk_buff *skb, const struct filter_key *key,
					   const struct piece *piece, const struct tap *tap,
					   __u32 egress)
{
	bool is_numbered = needs_identification(skb, key, piece);
	struct flow_row sender = { .channel = tap->channel };
	enum sender who = raw_sender(RAW_IP_PROTOCOL, bpf_htons(key->protocol), &sender);

	if (who == SENDER_UNKNOWN)
		DROP(protocol);
	if (who == SENDER_FOREIGN)
		DROP(foreign);
	if (!is_local(&key->local))
		DROP(source_address);
	if (!is_complete(skb))
		DROP(offload);
	if (is_numbered)
		identify(skb, key);
	sender.class = tap->class;
	if (sender.flags & ROW_EXTENDED_SENDING)
		raise_sent(skb, &sender, key, egress, is_numbered, EVENT_IP_SEND);
	return send_packet(skb, egress, sender.class);
}

/* A library sends from its flows, from UDP ports that it has bound, and from TCP ports delegated to it. */
static __always_inline int send_from_session(struct __sk_buff *skb, struct cursor *cursor,
					     struct filter_key *key,
					     const struct piece *piece, const struct tap *tap,
					     __u32 egress)
{
	struct flow_row sender = { .channel = tap->channel };
	bool is_numbered = needs_identification(skb, key, piece);
	struct flow_row *row;

	switch (parse_ports(cursor, key, SENT)) {
	case PARSED_FLOW:
		break;
	case PARSED_PROTOCOL:
		return send_raw_packet(skb, key, piece, tap, egress);
	default:
		DROP(malformed);
	}
	row = find_flow(key);
	if (row) {
		if (row->channel != tap->channel)
			DROP(foreign);
		sender = *row;
	} else {
		enum sender who = key->protocol == IPPROTO_UDP ? find_sender(key, &sender) :
								 find_delegate(key, &sender);

		if (who == SENDER_UNKNOWN)
			DROP(no_flow);
		if (!is_local(&key->local))
			DROP(source_address);
		if (who == SENDER_FOREIGN)
			DROP(foreign);
	}
	if (!has_own_checksum(skb, key->protocol, piece->transport) ||
	    !has_own_segments(skb, key->protocol))
		DROP(offload);
	sender.class = class_of(sender.class, tap->class);
	if (is_numbered)
		identify(skb, key);
	if (sender.flags & ROW_EXTENDED_SENDING)
		raise_sent(skb, &sender, key, egress, is_numbered,
			   key->protocol == IPPROTO_TCP ? EVENT_TCP_SEND : EVENT_UDP_SEND);
	return send_packet(skb, egress, sender.class);
}

/* The server also sends for relayed sessions, which keep their classes. */
static __always_inline __u16 class_at_server(struct cursor *cursor, struct filter_key *key)
{
	struct flow_row *row;

	if (parse_ports(cursor, key, SENT) != PARSED_FLOW)
		return 0;
	row = find_flow(key);
	return row ? row->class : 0;
}

SEC("tc")
int transmit_filter(struct __sk_buff *skb)
{
	struct cursor cursor = frame_of(skb);
	const struct ethhdr *eth = cursor.at;
	struct filter_key key = {};
	struct piece piece = {};
	__u32 ifindex = skb->ifindex;
	struct tap *tap = bpf_map_lookup_elem(&taps, &ifindex);
	enum parsed parsed;
	__u32 egress;

	if (!tap)
		DROP(no_channel);
	/* The kernel has moved the tag out of the frame, and would insert it again at egress. */
	if (skb->vlan_present)
		DROP(vlan);
	parsed = parse_sent(&cursor, &key, &piece);
	if (parsed == PARSED_NOT_IP)
		return send_raw_frame(skb, eth, tap);
	if (parsed != PARSED_FLOW)
		DROP(malformed);
	egress = egress_of(eth->h_source);
	if (!egress)
		DROP(source_mac);
	if ((skb->mark & ~MARK_CLASS) == MARK_AGAIN)
		return send_again(skb, egress);
	if (tap->channel == SERVER_CHANNEL) {
		if (!is_local(&key.local))
			DROP(source_address);
		return send_packet(skb, egress, class_of(class_at_server(&cursor, &key), tap->class));
	}
	return send_from_session(skb, &cursor, &key, &piece, tap, egress);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
