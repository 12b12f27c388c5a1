/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Sends a packet on to another host, as if it came from here: from an address of this host, and from
 * a port that the same extension handles. Only addresses, ports and the hop limit change, so that the
 * data of the two ends is left alone.
 */
#ifndef FORWARD_H
#define FORWARD_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"
#include "rewrite.h"

/* Whether the extension also handles that port; its owner then has it. */
static __always_inline bool has_port(const struct extension_work *work, __be16 port)
{
	const struct guard_key guard = {
		.channel = work->row.channel,
		.port = port,
		.protocol = work->key.protocol,
		.event = work->event,
	};
	struct chain *chain;

	if (port == work->key.local_port)
		return true;
	chain = bpf_map_lookup_elem(&guards, &guard);
	if (!chain)
		return false;
	for (__u32 i = 0; i < CHAIN_MAX; i++) {
		if (i < chain->count && chain->numbers[i] == work->number)
			return true;
	}
	return false;
}

/* Otherwise two forwarders that send to each other would never end. */
static __always_inline bool take_hop(struct __sk_buff *skb, const struct layout *at)
{
	__u16 before, after;
	__u8 hops;

	if (bpf_skb_load_bytes(skb, at->hops, &hops, sizeof(hops)) || hops <= 1)
		return false;
	if (at->width == 4) {
		if (bpf_skb_load_bytes(skb, at->hops, &before, sizeof(before)))
			return false;
		after = before - bpf_htons(0x0100);
		if (bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), before,
					after, sizeof(after)))
			return false;
	}
	hops -= 1;
	return bpf_skb_store_bytes(skb, at->hops, &hops, sizeof(hops), 0) == 0;
}

/* Returns false if the extension does not handle the port, or the destination is not permitted. */
static __always_inline bool forward(struct __sk_buff *skb, const struct extension_work *work,
				    const struct portolan_view *view)
{
	const struct layout at = layout_of(&work->key, work->options);
	struct ends before = {
		.addresses = { work->key.remote, work->key.local },
		.ports = { .source = work->key.remote_port, .destination = work->key.local_port },
	};
	struct ends after = {
		.addresses = { work->key.local },
		.ports = {
			.source = bpf_htons(view->from_port),
			.destination = bpf_htons(view->to_port),
		},
	};

	__builtin_memcpy(&after.addresses[1], view->to, sizeof(after.addresses[1]));
	if (!view->to_port || !has_port(work, after.ports.source) ||
	    !may_be_sent_to(&work->key, &after.addresses[1]))
		return false;
	return take_hop(skb, &at) && change_ends(skb, &at, &work->key, &before, &after);
}

#endif
