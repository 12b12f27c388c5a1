/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Active demultiplexing (MS §VI): a packet that encloses the handle of its receiver needs no search. Its traffic class
 * is the marker, the handle is the first option, and its index leads to the row. The peer is not checked here; the
 * session does that.
 */
#ifndef ACTIVE_H
#define ACTIVE_H

#include "counters.h"
#include "maps.h"
#include "parse.h"
#include "settings.h"

/* A row for a flow with an exclusive receiver; nonce 0 if it is free or being changed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct handle_row);
} handles SEC(".maps");

static __always_inline struct enclosed *enclosed_in_v6(struct cursor *cursor)
{
	struct ipv6hdr *ip = cursor->at;
	struct enclosed_v6 *enclosed = (void *)(ip + 1);

	if ((void *)(ip + 1) > cursor->end)
		return NULL;
	if (((ip->priority << 4 | ip->flow_lbl[0] >> 4) & DSCP_MASK) != settings.marker)
		return NULL;
	return encloses_handle_v6(cursor) ? &enclosed->option : NULL;
}

/* The handle enclosed in the packet, if that is an unfragmented TCP segment with the marker. */
static __always_inline struct enclosed *enclosed_in(struct cursor *cursor)
{
	struct ethhdr *eth = cursor->at;
	struct iphdr *ip = (void *)(eth + 1);

	if ((void *)(ip + 1) > cursor->end)
		return NULL;
	if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		cursor->at = ip;
		return enclosed_in_v6(cursor);
	}
	if (eth->h_proto != bpf_htons(ETH_P_IP))
		return NULL;
	if ((ip->tos & DSCP_MASK) != settings.marker || ip->frag_off & bpf_htons(IPV4_FRAGMENT))
		return NULL;
	cursor->at = ip;
	return encloses_handle(cursor) ? (void *)(ip + 1) : NULL;
}

/* Whether the handle is valid; `row` is then its owner's. A handle that changes concurrently is stale. */
static __always_inline bool resolve(const struct enclosed *enclosed, struct flow_row *row)
{
	__u64 nonce = bpf_be64_to_cpu((__u64)enclosed->nonce[1] << 32 | enclosed->nonce[0]);
	__u32 index = bpf_ntohs(enclosed->index);
	struct handle_row *entry = bpf_map_lookup_elem(&handles, &index);

	if (!entry || !nonce || *(volatile __u64 *)&entry->nonce != nonce) {
		count(receive_handle_stale);
		return false;
	}
	*row = entry->row;
	if (*(volatile __u64 *)&entry->nonce != nonce) {
		count(receive_handle_stale);
		return false;
	}
	if (row->flags & (ROW_SHARED | ROW_REUSEPORT)) {
		count(receive_handle_not_exclusive);
		return false;
	}
	/* The look-up of the flow leads to the extensions. */
	if (row->flags & ROW_EXTENDED) {
		count(receive_handle_extended);
		return false;
	}
	count(receive_handle_taken);
	return true;
}

static __always_inline bool find_by_handle(struct __sk_buff *skb, struct flow_row *row)
{
	struct cursor cursor = frame_of(skb);
	struct enclosed *enclosed = enclosed_in(&cursor);

	return enclosed && resolve(enclosed, row);
}

#endif
