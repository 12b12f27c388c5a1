// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The transmit filter, at tc ingress of each channel's tap: a channel sends only packets of its own
 * sessions, out of the device whose MAC address they carry, in the class that they have there.
 * Everything else is dropped and counted.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"
#include "raw.h"

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

/* Only the server writes classes: nobody sends in one that is not his. */
static __always_inline int send(struct __sk_buff *skb, __u32 egress, __u16 class)
{
	if (class)
		skb->priority = TRAFFIC_HANDLE << 16 | class;
	count(transmit_sent);
	return bpf_redirect(egress, 0);
}

/* Will it be cut by the kernel, or may it be by a router? Of IPv6 the kernel numbers fragments. */
static __always_inline bool needs_identification(struct __sk_buff *skb,
						 const struct filter_key *key,
						 const struct piece *piece)
{
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return false;
	return !piece->dont_fragment || (key->protocol == IPPROTO_UDP && skb->gso_size);
}

/*
 * Numbers a datagram that may arrive in fragments: by a number that a library chose it could mix
 * its fragments into those of others (RFC 7739). Counted for each pair of addresses, so that none
 * comes again soon (RFC 6864).
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

/* A frame of a protocol that its channel has for its own. */
static __always_inline int send_raw_frame(struct __sk_buff *skb, const struct ethhdr *eth,
					  const struct tap *tap)
{
	enum sender sender = raw_sender(RAW_ETHERTYPE, eth->h_proto, tap->channel);
	__u32 egress;

	if (sender == SENDER_UNKNOWN)
		DROP(not_ip);
	if (sender == SENDER_FOREIGN)
		DROP(foreign);
	egress = egress_of(eth->h_source);
	if (!egress)
		DROP(source_mac);
	return send(skb, egress, tap->class);
}

/* The same of an IP packet, whose source is to be this host. */
static __always_inline int send_raw_packet(struct __sk_buff *skb, const struct filter_key *key,
					   const struct piece *piece, const struct tap *tap,
					   __u32 egress)
{
	enum sender sender = raw_sender(RAW_IP_PROTOCOL, bpf_htons(key->protocol), tap->channel);

	if (sender == SENDER_UNKNOWN)
		DROP(protocol);
	if (sender == SENDER_FOREIGN)
		DROP(foreign);
	if (!is_local(&key->local))
		DROP(source_address);
	if (needs_identification(skb, key, piece))
		identify(skb, key);
	return send(skb, egress, tap->class);
}

/* A library sends from its flows, from UDP ports that it has bound, and from TCP ports that are delegated to it. */
static __always_inline int send_from_session(struct __sk_buff *skb, struct cursor *cursor,
					     struct filter_key *key,
					     const struct piece *piece, const struct tap *tap,
					     __u32 egress)
{
	__u32 channel = tap->channel;
	struct flow_row *row;
	__u16 class = 0;

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
		if (row->channel != channel)
			DROP(foreign);
		class = row->class;
	} else {
		enum sender sender = key->protocol == IPPROTO_UDP ? find_sender(key, channel, &class) :
								    find_delegate(key, channel);

		if (sender == SENDER_UNKNOWN)
			DROP(no_flow);
		if (!is_local(&key->local))
			DROP(source_address);
		if (sender == SENDER_FOREIGN)
			DROP(foreign);
	}
	if (needs_identification(skb, key, piece))
		identify(skb, key);
	return send(skb, egress, class ?: tap->class);
}

/* The server sends for relayed sessions, too, which keep their classes. */
static __always_inline __u16 class_at_server(struct cursor *cursor, struct filter_key *key,
					     const struct tap *tap)
{
	struct flow_row *row;

	if (!tap->class || parse_ports(cursor, key, SENT) != PARSED_FLOW)
		return tap->class;
	row = find_flow(key);
	return row && row->class ? row->class : tap->class;
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
	/* The kernel has moved the tag out of the frame, and would put it back at egress. */
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
	if (tap->channel == SERVER_CHANNEL) {
		if (!is_local(&key.local))
			DROP(source_address);
		return send(skb, egress, class_at_server(&cursor, &key, tap));
	}
	return send_from_session(skb, &cursor, &key, &piece, tap, egress);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
