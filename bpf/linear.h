/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * The packet filter's historical form: each packet is compared with all flows in turn, as in packet
 * filters before they were merged (MS §VI, Fig. 20). A baseline for measurements.
 */
#ifndef LINEAR_H
#define LINEAR_H

#include "maps.h"

/* A place for a flow. The server changes it only while its version is even. */
struct linear_row {
	__u32 version;
	__u32 reserved;
	struct filter_key key;
	struct flow_row row;
};

_Static_assert(sizeof(struct linear_row) == 72, "LinearRow");

/* As many as `flows` with linear search, else 1. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct linear_row);
} linear_rows SEC(".maps");

/* Index behind the last row in use. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} linear_length SEC(".maps");

#define KEY_WORDS (sizeof(struct filter_key) / sizeof(__u64))

struct search {
	union {
		struct filter_key key;
		__u64 words[KEY_WORDS];
	};
	struct flow_row *found;
};

static __always_inline bool is_sought(const struct linear_row *row, const struct search *search)
{
	const __u64 *words = (const void *)&row->key;

	/* Ports and protocol first: they differ most often. */
	for (int i = KEY_WORDS - 1; i >= 0; i--)
		if (words[i] != search->words[i])
			return false;
	return true;
}

/* A row that changes during the comparison is skipped; the flow's new row is further on. */
static long compare(__u32 index, struct search *search)
{
	struct linear_row *row = bpf_map_lookup_elem(&linear_rows, &index);
	__u32 version;

	if (!row)
		return 1;
	version = *(volatile __u32 *)&row->version;
	if (!(version & 1) || !is_sought(row, search) ||
	    *(volatile __u32 *)&row->version != version)
		return 0;
	search->found = &row->row;
	return 1;
}

static __always_inline struct flow_row *find_linear(const struct filter_key *key)
{
	struct search search = { .key = *key };
	__u32 zero = 0;
	__u32 *length = bpf_map_lookup_elem(&linear_length, &zero);

	if (length)
		bpf_loop(*length, compare, &search, 0);
	return search.found;
}

#endif
