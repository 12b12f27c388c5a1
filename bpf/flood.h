/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Listeners under a flood of SYNs: what the server, alone, writes for the program that answers them
 * (syn_answer.bpf.c).
 */
#ifndef FLOOD_H
#define FLOOD_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>

#include "lookup.h"
#include "maps.h"

/* By what the listener is bound to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct binding_key);
	__type(value, struct flood);
} floods SEC(".maps");

/* How many there are. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} flood_count SEC(".maps");

/* Of delegated listeners: flows that are known to the process, and have no rows. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct filter_key);
	__type(value, __u8);
} spared_flows SEC(".maps");

/* The routes of the host, as far as they say where answers go. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct path_key);
	__type(value, struct return_path);
} return_paths SEC(".maps");

/* Something for a listener that no flow claims, while any of them is flooded? */
static __always_inline bool may_be_flooding(const struct flow_row *row,
					    const struct filter_key *key, __u16 flags)
{
	__u32 zero = 0;
	const __u32 *count;

	if (flags != RECORD_BINDING || key->protocol != IPPROTO_TCP || row->flags & ROW_RAW)
		return false;
	count = bpf_map_lookup_elem(&flood_count, &zero);
	return count && *count;
}

/* A listener on the very address goes before one on any: the other's flood is none of its. */
static __always_inline struct flood *find_flood(const struct filter_key *key)
{
	struct binding_key binding = exact_binding(key);

	if (!bpf_map_lookup_elem(&bindings, &binding))
		widen(&binding);
	return bpf_map_lookup_elem(&floods, &binding);
}

/* A SYN for a connection that its process has already? Of others the packet filter knows the rows. */
static __always_inline bool is_spared(const struct flow_row *row, const struct filter_key *key)
{
	return row->flags & ROW_DELEGATED && bpf_map_lookup_elem(&spared_flows, key);
}

/* The way back to the peer, if it is the device by which its SYN came; else NULL. */
static __always_inline const struct return_path *way_back(const struct filter_key *key,
							  __u32 interface)
{
	const struct path_key destination = { .prefix = 128, .address = key->remote };
	const struct return_path *path = bpf_map_lookup_elem(&return_paths, &destination);

	return path && path->interface == interface ? path : NULL;
}

#endif
