/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Listeners under a flood of SYNs: tables that only the server writes, for the program that answers
 * the SYNs (syn_answer.bpf.c).
 */
#ifndef FLOOD_H
#define FLOOD_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>

#include "lookup.h"
#include "maps.h"

/* By the listener's binding. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct binding_key);
	__type(value, struct flood);
} floods SEC(".maps");

/* Number of entries in `floods`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} flood_count SEC(".maps");

/* For delegated listeners: flows known to the process that have no rows. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct filter_key);
	__type(value, __u8);
} spared_flows SEC(".maps");

/* The host's routes, as far as needed for the paths of answers. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct path_key);
	__type(value, struct return_path);
} return_paths SEC(".maps");

/* Whether the packet is for a listener, claimed by no flow, while any listener is flooded. */
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

/* A listener on the exact address takes precedence over one on any address: a flood of that does not concern it. */
static __always_inline struct flood *find_flood(const struct filter_key *key)
{
	struct binding_key binding = exact_binding(key);

	if (!bpf_map_lookup_elem(&bindings, &binding))
		to_wildcard(&binding);
	return bpf_map_lookup_elem(&floods, &binding);
}

/* Whether the SYN is for a connection already known to its process. For other listeners such flows have rows. */
static __always_inline bool is_spared(const struct flow_row *row, const struct filter_key *key)
{
	return row->flags & ROW_DELEGATED && bpf_map_lookup_elem(&spared_flows, key);
}

/* The path to the peer, if it uses the device on which the SYN arrived; else NULL. */
static __always_inline const struct return_path *way_back(const struct filter_key *key,
							  __u32 interface)
{
	const struct path_key destination = { .prefix = 128, .address = key->remote };
	const struct return_path *path = bpf_map_lookup_elem(&return_paths, &destination);

	return path && path->interface == interface ? path : NULL;
}

#endif
