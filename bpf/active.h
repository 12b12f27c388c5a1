/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Active demultiplexing (MS §VI): a packet that encloses the handle of its receiver needs no search. The marker says
 * that it does, the option is the first, the row is where its index says. Who the peer is stays unseen here: the
 * session looks.
 */
#ifndef ACTIVE_H
#define ACTIVE_H

#include "counters.h"
#include "maps.h"
#include "parse.h"
#include "settings.h"

/* A place for a flow that has an exclusive receiver; nonce 0 if it is free or changes. */
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

/* What the packet encloses, if it is a whole TCP segment that is marked so. */
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

/* Is the handle good? Then `row` is its owner's. One that changes meanwhile is stale. */
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
	if (row->flags & (ROW_SHARED | ROW_DEALT)) {
		count(receive_handle_not_exclusive);
		return false;
	}
	/* Those see it on its way from the flow. */
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
