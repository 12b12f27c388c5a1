// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The packet filter, at tc ingress of each managed device: every application gets exactly the
 * packets of its own sessions; packets claimed by no session continue to later filters and the
 * kernel's stack, unchanged.
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
#include "kernel_connection.h"
#include "lookup.h"
#include "maps.h"
#include "martian.h"
#include "opening.h"
#include "parse.h"
#include "performer.h"
#include "policy.h"
#include "raw.h"
#include "search.h"
#include "settings.h"
#include "stray.h"

/* The server may inject packets to loopback addresses, which never arrive from a network. */
enum origin {
	FROM_NETWORK,
	FROM_SERVER,
};

/* The row that claims a packet with ports; counts the reason if there is none. */
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

/* A later fragment can have another next header than TCP and UDP only in IPv6, with extension headers. */
static __always_inline bool may_be_ours(const struct filter_key *key)
{
	return key->protocol == IPPROTO_TCP || key->protocol == IPPROTO_UDP ||
	       key->protocol == IPPROTO_DSTOPTS;
}

/*
 * A frame that is neither IPv4 nor IPv6 may belong to a raw flow; else it goes to the kernel, for that reason.
 * Global, so that the verifier checks it once.
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
 * A packet, neither TCP nor UDP, that is unfragmented and for this host may belong to a raw flow; else
 * it goes to the kernel. Global as above.
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

/* A packet from a network that only a binding claims. */
enum claim {
	/* A datagram, or a segment that opens a connection. */
	CLAIM_OPENS,
	CLAIM_CONTINUES,
	/* For the kernel's stack. */
	CLAIM_KERNELS,
};

/* Counts the reason if it is the kernel's. Global as above. */
__noinline int judge_claim(struct __sk_buff *skb, const struct filter_key *key,
			   const struct flow_row *row)
{
	int opening = OPENS;

	if (!key || !row)
		return CLAIM_OPENS;
	if (key->protocol == IPPROTO_TCP)
		opening = opening_of(skb);
	if (opening != OPENS && is_of_kernel_connection(skb, key)) {
		count(receive_pass_connection);
		return CLAIM_KERNELS;
	}
	if (is_for_policy(row, opening)) {
		count(receive_pass_policy);
		return CLAIM_KERNELS;
	}
	return opening == CONTINUES ? CLAIM_CONTINUES : CLAIM_OPENS;
}

/*
 * Delivers a frame that arrived on a device if a session claims it; else counts the reason and
 * returns TC_ACT_UNSPEC. Frames that the server held and re-injects are not held again.
 */
static __always_inline int filter(struct __sk_buff *skb, __u32 interface,
				  const enum origin origin)
{
	struct filter_key key = {};
	struct piece piece = {};
	enum parsed parsed = parse_received(skb, &key, &piece);
	__u16 flags = parsed == PARSED_ICMP_ERROR ? RECORD_ICMP_ERROR : 0;
	struct flow_row *row;
	int claimed = CLAIM_OPENS;
	bool is_refused;
	int verdict;

	switch (parsed) {
	case PARSED_FLOW:
	case PARSED_ICMP_ERROR:
		row = claim(&key, origin, &flags);
		/* A flow's row names its peer. */
		is_refused = row && flags & RECORD_BINDING && parsed == PARSED_FLOW &&
			     origin == FROM_NETWORK && is_martian(&key);
		if (row && !is_refused && flags == RECORD_BINDING && origin == FROM_NETWORK)
			claimed = judge_claim(skb, &key, row);
		if (is_refused || claimed == CLAIM_KERNELS)
			row = NULL;
		if (row && flags == RECORD_BINDING && is_of_several(row) &&
		    claimed == CLAIM_OPENS && origin == FROM_NETWORK && is_unattended(row)) {
			count(receive_syn_passed_by);
			row = &row_of_server;
		}
		if (piece.is_fragment && parsed == PARSED_FLOW)
			remember(skb, &key, &piece, row, flags);
		if (is_refused) {
			count(receive_drop_martian);
			return TC_ACT_SHOT;
		}
		if (row && claimed == CLAIM_CONTINUES && !piece.is_fragment &&
		    is_stray_too_many(row, &key, flags)) {
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
	/* The kernel maintains its own path MTU and redirect state. */
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
 * datagrams that only the kernel's stack received. None of them are for the kernel. The source MAC
 * address is replaced by the index of the device on which the frame arrived; for a datagram to many,
 * the destination MAC address is replaced by the recipient chosen by the kernel.
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
