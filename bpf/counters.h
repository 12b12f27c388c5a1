/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* One named counter per verdict, per CPU. */
#ifndef COUNTERS_H
#define COUNTERS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

enum counter {
#define COUNTER(group, name, meaning) group##_##name,
#include "counters.def"
#undef COUNTER
	COUNTERS
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

static __always_inline void count(enum counter counter)
{
	__u32 index = counter;
	__u64 *value = bpf_map_lookup_elem(&counters, &index);

	if (value)
		*value += 1;
}

#endif
