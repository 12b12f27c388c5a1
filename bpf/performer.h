/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * SYNs for one of several processes that perform the handshakes of a port. A process that was stopped, or gets no
 * processor, would answer late: the server answers in its place, and another process accepts. A program that computes
 * does attend, by its background thread.
 */
#ifndef PERFORMER_H
#define PERFORMER_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "attention.h"
#include "deliver.h"
#include "maps.h"

/* Twice the interval at which a background thread looks. */
#define ATTENDS_WITHIN_NS (20 * 1000 * 1000)

/* Of a channel: when the first SYN came since its owner last polled. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} unanswered_since SEC(".maps");

/*
 * Where a listener's rows lead to that name no session of the server. Nobody changes it, but functions that are verified
 * alone take no read-only memory.
 */
static struct flow_row row_of_server = { .slot = 0xffffffff };

/* Global, so that the verifier checks it once. */
__noinline int is_unattended(const struct flow_row *row)
{
	struct doorbell *doorbell;
	__u64 attended, now;
	__u64 *since;
	__u32 channel;

	if (!row)
		return false;
	channel = row->channel;
	since = bpf_map_lookup_elem(&unanswered_since, &channel);
	doorbell = doorbell_of(row);
	if (!since || !doorbell)
		return false;
	attended = load_once(doorbell->attended_at);
	/* Some poll without a clock. */
	if (!attended)
		return false;
	now = bpf_ktime_get_ns();
	if (*since > attended)
		return now - *since > ATTENDS_WITHIN_NS;
	*since = now;
	return false;
}

static __always_inline bool is_of_several(const struct flow_row *row)
{
	const __u16 flags = ROW_DELEGATED | ROW_SHARED;

	return (row->flags & flags) == flags;
}

#endif
