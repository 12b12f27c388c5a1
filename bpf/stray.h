/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Segments to a listener that neither open a connection nor belong to one. The owner answers a limited number of them with
 * resets (RFC 9293 §3.10.7.1); the filter drops the rest. While cookies are outstanding such a segment may complete a
 * handshake.
 */
#ifndef STRAY_H
#define STRAY_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "budget.h"
#include "flood.h"
#include "lookup.h"
#include "maps.h"

#define STRAY_PRICE 1000000ULL
#define STRAY_BURST 1000000000ULL

/* Time (bpf_ktime_get_ns) until which outstanding cookies may return; written by the server. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} cookies_until SEC(".maps");

/* Virtual clock of GCRA, as in budget.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} strays_paid SEC(".maps");

static __always_inline bool has_room_for_stray(__u64 now)
{
	__u32 zero = 0;
	__u64 *paid = bpf_map_lookup_elem(&strays_paid, &zero);

	if (!paid)
		return true;
	if (!has_room(paid, now, STRAY_BURST - 1))
		return false;
	__sync_fetch_and_add(paid, STRAY_PRICE);
	return true;
}

/*
 * Whether a TCP segment that only a binding claims, and that continues a connection, exceeds what the owner answers. A
 * process that performs the handshakes itself counts for itself.
 */
static __always_inline bool is_stray_too_many(const struct flow_row *row,
					      const struct filter_key *key, __u16 flags)
{
	const __u64 *until;
	__u32 zero = 0;
	__u64 now;

	if (row->flags & (ROW_RAW | ROW_DELEGATED))
		return false;
	now = bpf_ktime_get_ns();
	until = bpf_map_lookup_elem(&cookies_until, &zero);
	return until && *until <= now && !may_be_flooding(row, key, flags) &&
	       !has_room_for_stray(now);
}

#endif
