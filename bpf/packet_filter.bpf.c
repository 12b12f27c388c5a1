// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The packet filter, at tc ingress of each managed device: every application gets exactly the
 * packets of its own sessions; whatever no session claims goes on to later filters and the kernel's
 * stack, untouched.
 */
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "active.h"
#include "counters.h"
#include "deliver.h"
#include "extension.h"
#include "flood.h"
#include "fragments.h"
#include "groups.h"
#include "lookup.h"
#include "maps.h"
#include "martian.h"
#include "parse.h"
#include "raw.h"
#include "search.h"
#include "settings.h"
#include "stray.h"

/* What the server injects may be for a loopback address, which no frame of a network is. */
enum origin {
	FROM_NETWORK,
	FROM_SERVER,
};

/* The row that claims a packet with ports; counts why if there is none. */
static __always_inline struct flow_row *claim(const struct filter_key *key,
					      const enum origin origin, __u16 *flags)
{
	struct flow_row *row = find_owner(key);

	if (row)
		return row;
	row = find_binding(key);
	if (!row) {
		count(receive_pass_unclaimed);
		return NULL;
	}
	if (origin == FROM_NETWORK && !is_local(&key->local)) {
		count(receive_pass_not_local);
		return NULL;
	}
	*flags |= RECORD_BINDING;
	return row;
}

/* A later fragment can be another header's than TCP's and UDP's only in IPv6, by extensions. */
static __always_inline bool may_be_ours(const struct filter_key *key)
{
	return key->protocol == IPPROTO_TCP || key->protocol == IPPROTO_UDP ||
	       key->protocol == IPPROTO_DSTOPTS;
}

/*
 * A frame of neither IPv4 nor IPv6 may be a program's own; else it is the kernel's, for that reason.
 * Global, so that the verifier looks at it once.
 */
__noinline int filter_frame(struct __sk_buff *skb, __u32 reason)
{
	const struct filter_key key = { .local_port = skb->protocol };
	struct flow_row *row = find_raw_frame(skb);

	if (!row) {
		count(reason);
		return TC_ACT_UNSPEC;
	}
	if (row->flags & ROW_EXTENDED)
		raise_received(skb, row, &key, RECORD_RAW, skb->ifindex,
			       EVENT_ETHERNET_RECEIVE);
	return deliver_raw(skb, row, skb->ifindex);
}

/*
 * A packet of another protocol than TCP and UDP that is whole and for this host may be a program's
 * own; else it is the kernel's. Global as above.
 */
__noinline int filter_protocol(struct __sk_buff *skb, const struct filter_key *key,
			       __u32 interface)
{
	struct flow_row *row;

	if (!key)
		return TC_ACT_UNSPEC;
	row = find_raw_packet(key);
	if (!row || !is_local(&key->local)) {
		count(receive_pass_protocol);
		return TC_ACT_UNSPEC;
	}
	if (row->flags & ROW_EXTENDED && skb->ifindex == interface)
		raise_received(skb, row, key, RECORD_RAW, interface, EVENT_IP_RECEIVE);
	return deliver_raw(skb, row, interface);
}

/*
 * Delivers the frame, which came by a device, if a session claims it; else counts why not and
 * answers TC_ACT_UNSPEC. What the server held, and lets in, is not held again.
 */
static __always_inline int filter(struct __sk_buff *skb, __u32 interface,
				  const enum origin origin)
{
	struct filter_key key = {};
	struct piece piece = {};
	enum parsed parsed = parse_received(skb, &key, &piece);
	__u16 flags = parsed == PARSED_ICMP_ERROR ? RECORD_ICMP_ERROR : 0;
	struct flow_row *row;
	bool is_refused;
	int verdict;

	switch (parsed) {
	case PARSED_FLOW:
	case PARSED_ICMP_ERROR:
		row = claim(&key, origin, &flags);
		/* A flow's row names its peer. */
		is_refused = row && flags & RECORD_BINDING && parsed == PARSED_FLOW &&
			     origin == FROM_NETWORK && is_martian(&key);
		if (is_refused)
			row = NULL;
		if (piece.is_fragment && parsed == PARSED_FLOW)
			remember(skb, &key, &piece, row, flags);
		if (is_refused) {
			count(receive_drop_martian);
			return TC_ACT_SHOT;
		}
		if (row && origin == FROM_NETWORK && !piece.is_fragment &&
		    is_stray_too_many(skb, row, &key, flags)) {
			count(receive_drop_stray);
			return TC_ACT_SHOT;
		}
		break;
	case PARSED_LATER_FRAGMENT:
		if (!may_be_ours(&key)) {
			count(receive_pass_fragment);
			return TC_ACT_UNSPEC;
		}
		row = find_fragment(skb, &key, &piece, origin == FROM_NETWORK, &flags);
		break;
	case PARSED_PROTOCOL:
		if (!piece.is_fragment)
			return filter_protocol(skb, &key, interface);
		count(receive_pass_protocol);
		return TC_ACT_UNSPEC;
	case PARSED_NOT_IP:
		return filter_frame(skb, receive_pass_not_ip);
	default:
		count(receive_pass_malformed);
		return TC_ACT_UNSPEC;
	}
	if (!row)
		return TC_ACT_UNSPEC;
	if (row->flags & ROW_EXTENDED && parsed == PARSED_FLOW && origin == FROM_NETWORK) {
		if (piece.is_fragment)
			count(extension_unseen);
		else
			raise_received(skb, row, &key,
				       row->flags & ROW_RAW ? flags | RECORD_RAW : flags,
				       interface, key.protocol == IPPROTO_TCP ? EVENT_TCP_RECEIVE :
								     EVENT_UDP_RECEIVE);
	} else if (origin == FROM_NETWORK && may_be_flooding(row, &key, flags) &&
		   !piece.is_fragment) {
		raise_to(skb, MANAGER_SYN, row, &key, flags, interface, EVENT_TCP_RECEIVE);
	}
	if (piece.is_fragment)
		flags |= RECORD_FRAGMENT;
	if (row->flags & ROW_RAW)
		verdict = deliver_raw(skb, row, interface);
	else
		verdict = deliver(skb, row, key.protocol, flags, interface);
	/* The kernel keeps its own path MTU and redirect state. */
	return parsed == PARSED_ICMP_ERROR ? TC_ACT_UNSPEC : verdict;
}

SEC("tc")
int packet_filter(struct __sk_buff *skb)
{
	if (skb->vlan_present) {
		count(receive_pass_vlan);
		return TC_ACT_UNSPEC;
	}
	if (skb->pkt_type == PACKET_OTHERHOST) {
		count(receive_pass_not_to_host);
		return TC_ACT_UNSPEC;
	}
	if (skb->pkt_type != PACKET_HOST) {
		const struct delivery delivery = delivery_of(skb);

		if (!distribute(skb, &delivery,
				skb->pkt_type == PACKET_LOOPBACK ? COPY_FROM_KERNEL :
								   COPY_FROM_WIRE))
			return filter_frame(skb, receive_pass_not_to_host);
		return TC_ACT_UNSPEC;
	}
	if (settings.marker) {
		struct flow_row row;

		if (find_by_handle(skb, &row))
			return deliver(skb, &row, IPPROTO_TCP, 0, skb->ifindex);
	}
	return filter(skb, skb->ifindex, FROM_NETWORK);
}

/*
 * At tc ingress of the server's re-injection tap: frames that reached a session's former holder, and
 * datagrams that only the kernel's stack saw. The kernel has no use for any of them. Where the
 * sender's address would be, the server writes which device they came in by; where the device's own
 * would be, of a datagram to many, whom the kernel gave it to.
 */
SEC("tc")
int inject_filter(struct __sk_buff *skb)
{
	struct delivery delivery = { .flags = RECORD_BINDING | RECORD_COPY };
	__u32 interface;
	int verdict;

	if (bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_source), &interface,
			       sizeof(interface))) {
		count(receive_drop_unclaimed);
		return TC_ACT_SHOT;
	}
	delivery.interface = interface;
	if (distribute(skb, &delivery, COPY_FROM_SERVER))
		return TC_ACT_SHOT;
	verdict = filter(skb, interface, FROM_SERVER);
	if (verdict != TC_ACT_UNSPEC)
		return verdict;
	count(receive_drop_unclaimed);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
