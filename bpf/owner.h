/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* What a manager does for the owner of a packet: it enforces the budget, and delivers what no extension takes. */
#ifndef OWNER_H
#define OWNER_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "budget.h"
#include "deliver.h"
#include "extension.h"

/* Called before anything is spent on the packet. Returns false if it must be dropped. */
static __always_inline bool is_paid(struct __sk_buff *skb, struct extension_work *work)
{
	if (!is_budgeted(&work->row))
		return true;
	if (exceeds_budget(skb, &work->row))
		return false;
	/* Charge only once. */
	work->row.budget = 0;
	return true;
}

static __always_inline int give_to_owner(struct __sk_buff *skb, const struct extension_work *work)
{
	if (is_raw(work))
		return deliver_raw(skb, &work->row, work->interface);
	return deliver(skb, &work->row, work->key.protocol, work->flags, work->interface);
}

#endif
