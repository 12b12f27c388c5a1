/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Segments to a listener that begin no connection and belong to none. Its owner answers them by resets, few of them
 * (RFC 9293 §3.10.7.1): more than that is a flood, which costs its owner nothing. While cookies are out such a segment may be
 * the end of a handshake.
 */
#ifndef STRAY_H
#define STRAY_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flood.h"
#include "lookup.h"
#include "maps.h"

#define STRAY_PRICE 1000000ULL
#define STRAY_BURST 1000000000ULL

#define TCP_FLAGS 13
#define TCP_SYN 0x02
#define TCP_ACK 0x10

/* By the clock of bpf_ktime_get_ns(): until when cookies may come back, as the server writes it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} cookies_until SEC(".maps");

/* Until when what has been let through is paid for (GCRA, ITU-T I.371). Several processors may let some more through. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} strays_paid SEC(".maps");

/* Where TCP's flags are in a packet whose headers are as usual; else 0. */
static __always_inline __u32 flags_at(struct __sk_buff *skb)
{
	__u8 first;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &first, sizeof(first)))
			return 0;
		return ETH_HLEN + (first & 0xf) * 4 + TCP_FLAGS;
	}
	if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, nexthdr), &first,
			       sizeof(first)) ||
	    first != IPPROTO_TCP)
		return 0;
	return ETH_HLEN + sizeof(struct ipv6hdr) + TCP_FLAGS;
}

static __always_inline bool opens(struct __sk_buff *skb)
{
	__u32 at = flags_at(skb);
	__u8 flags;

	return !at || bpf_skb_load_bytes(skb, at, &flags, sizeof(flags)) ||
	       (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline bool has_room_for_stray(__u64 now)
{
	__u32 zero = 0;
	__u64 *paid = bpf_map_lookup_elem(&strays_paid, &zero);
	__u64 until;

	if (!paid)
		return true;
	until = *paid > now ? *paid : now;
	if (until - now >= STRAY_BURST)
		return false;
	*paid = until + STRAY_PRICE;
	return true;
}

/* Is it one more segment to a listener than its owner has resets for? A process that has the handshakes counts by itself. */
static __always_inline bool is_stray_too_many(struct __sk_buff *skb, const struct flow_row *row,
					      const struct filter_key *key, __u16 flags)
{
	const __u64 *until;
	__u32 zero = 0;
	__u64 now;

	if (flags != RECORD_BINDING || key->protocol != IPPROTO_TCP ||
	    row->flags & (ROW_RAW | ROW_DELEGATED) || opens(skb))
		return false;
	now = bpf_ktime_get_ns();
	until = bpf_map_lookup_elem(&cookies_until, &zero);
	return until && *until <= now && !may_be_flooding(row, key, flags) &&
	       !has_room_for_stray(now);
}

#endif
