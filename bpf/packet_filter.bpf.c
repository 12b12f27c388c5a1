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
#include "lookup.h"
#include "maps.h"
#include "parse.h"

static __always_inline enum counter pass_reason(enum parsed parsed)
{
	switch (parsed) {
	case PARSED_NOT_IP:
		return receive_pass_not_ip;
	case PARSED_FRAGMENT:
		return receive_pass_fragment;
	case PARSED_PROTOCOL:
		return receive_pass_protocol;
	default:
		return receive_pass_malformed;
	}
}

/* Delivers the frame if a session claims it, else counts why not and answers TC_ACT_UNSPEC. */
static __always_inline int filter(struct __sk_buff *skb)
{
	struct filter_key key = {};
	enum parsed parsed = parse_received(skb, &key);
	__u16 flags = parsed == PARSED_ICMP_ERROR ? RECORD_ICMP_ERROR : 0;
	struct flow_row *row;
	int verdict;

	if (parsed != PARSED_FLOW && parsed != PARSED_ICMP_ERROR) {
		count(pass_reason(parsed));
		return TC_ACT_UNSPEC;
	}
	row = find_flow(&key);
	if (!row) {
		row = find_binding(&key);
		if (!row) {
			count(receive_pass_unclaimed);
			return TC_ACT_UNSPEC;
		}
		if (!is_local(&key.local)) {
			count(receive_pass_not_local);
			return TC_ACT_UNSPEC;
		}
		flags |= RECORD_BINDING;
	}
	verdict = deliver(skb, row, flags);
	/* The kernel keeps its own path MTU and redirect state. */
	return parsed == PARSED_ICMP_ERROR ? TC_ACT_UNSPEC : verdict;
}

SEC("tc")
int packet_filter(struct __sk_buff *skb)
{
	if (skb->pkt_type != PACKET_HOST) {
		count(receive_pass_not_to_host);
		return TC_ACT_UNSPEC;
	}
	if (skb->vlan_present) {
		count(receive_pass_vlan);
		return TC_ACT_UNSPEC;
	}
	return filter(skb);
}

/*
 * At tc ingress of the server's re-injection tap: frames that reached a session's former holder.
 * They carry the MAC address of the device they came in by, not the tap's. The kernel has seen
 * neither them nor, being for a session of ours, has it any use for them.
 */
SEC("tc")
int inject_filter(struct __sk_buff *skb)
{
	int verdict = filter(skb);

	if (verdict != TC_ACT_UNSPEC)
		return verdict;
	count(receive_drop_unclaimed);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
