/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Calls the extensions for one event of an endpoint in order, and accounts their time. */
#ifndef CHAIN_H
#define CHAIN_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "extension.h"
#include "maps.h"

/* Calls the next extension that may run; returns if there is none. */
static __always_inline void call_next(struct __sk_buff *skb, struct extension_work *work,
				      struct portolan_view *view)
{
	for (int i = 0; i < CHAIN_MAX; i++) {
		struct extension_control *control;
		__u32 position = work->position;
		__u32 number;

		if (position >= work->chain.count || position >= CHAIN_MAX)
			return;
		number = work->chain.numbers[position];
		work->position = position + 1;
		work->number = number;
		control = bpf_map_lookup_elem(&extension_controls, &number);
		if (!control || control->is_stopped)
			continue;
		work->started = view->time = bpf_ktime_get_ns();
		bpf_tail_call(skb, &extensions, number);
	}
}

static __always_inline bool find_chain(struct extension_work *work, __u8 event)
{
	const struct guard_key guard = {
		.channel = work->row.channel,
		.port = work->key.local_port,
		.protocol = work->key.protocol,
		.event = event,
	};
	struct chain *chain = bpf_map_lookup_elem(&guards, &guard);

	if (!chain)
		return false;
	work->chain = *chain;
	work->position = 0;
	work->event = event;
	return true;
}

#define account(statistics, what) ((statistics)->what += 1)

/* A single overrun may be due to an interrupt; frequent ones are the extension's fault. */
static __always_inline void charge_time(struct extension_work *work,
					struct extension_statistics *statistics)
{
	__u32 number = work->number;
	struct extension_control *control = bpf_map_lookup_elem(&extension_controls, &number);
	__u64 time = work->run.ended - work->started;

	statistics->runs += 1;
	statistics->time += time;
	if (time > statistics->longest)
		statistics->longest = time;
	if (!control || time <= control->limit) {
		if (statistics->strikes)
			statistics->strikes -= 1;
		return;
	}
	count(extension_overruns);
	statistics->overruns += 1;
	statistics->strikes += OVERRUN_STRIKES;
	if (statistics->strikes >= STRIKES_MAX && !control->is_stopped) {
		control->is_stopped = 1;
		count(extension_stopped);
	}
}

#endif
