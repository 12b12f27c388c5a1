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

#include "counters.h"
#include "deliver.h"
#include "fragments.h"
#include "groups.h"
#include "linear.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"
#include "settings.h"

static __always_inline enum counter pass_reason(enum parsed parsed)
{
	switch (parsed) {
	case PARSED_NOT_IP:
		return receive_pass_not_ip;
	case PARSED_PROTOCOL:
		return receive_pass_protocol;
	default:
		return receive_pass_malformed;
	}
}

/* What the server injects may be for a loopback address, which no frame of a network is. */
enum origin {
	FROM_NETWORK,
	FROM_SERVER,
};

static __always_inline struct flow_row *find_owner(const struct filter_key *key)
{
	return settings.algorithm == ALGORITHM_LINEAR ? find_linear(key) : find_flow(key);
}

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
	int verdict;

	switch (parsed) {
	case PARSED_FLOW:
	case PARSED_ICMP_ERROR:
		row = claim(&key, origin, &flags);
		if (piece.is_fragment && parsed == PARSED_FLOW)
			remember(skb, &key, &piece, row, flags);
		break;
	case PARSED_LATER_FRAGMENT:
		if (!may_be_ours(&key)) {
			count(receive_pass_fragment);
			return TC_ACT_UNSPEC;
		}
		row = find_fragment(skb, &key, &piece, origin == FROM_NETWORK, &flags);
		break;
	default:
		count(pass_reason(parsed));
		return TC_ACT_UNSPEC;
	}
	if (!row)
		return TC_ACT_UNSPEC;
	if (piece.is_fragment)
		flags |= RECORD_FRAGMENT;
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
	if (skb->pkt_type != PACKET_HOST) {
		const struct delivery delivery = delivery_of(skb);

		if (skb->pkt_type == PACKET_OTHERHOST || !distribute(skb, &delivery))
			count(receive_pass_not_to_host);
		return TC_ACT_UNSPEC;
	}
	return filter(skb, skb->ifindex, FROM_NETWORK);
}

/*
 * At tc ingress of the server's re-injection tap: frames that reached a session's former holder, and
 * datagrams that only the kernel's stack saw. The kernel has no use for any of them. Where the
 * device's own address would be, the server writes which device they came in by.
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
	if (distribute(skb, &delivery))
		return TC_ACT_SHOT;
	verdict = filter(skb, interface, FROM_SERVER);
	if (verdict != TC_ACT_UNSPEC)
		return verdict;
	count(receive_drop_unclaimed);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
