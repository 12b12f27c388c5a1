/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * The host's own policy (netfilter, policy rules): where there is one, packets that only a binding claims go to the
 * kernel's stack, whose socket on the port receives what the policy admits. Flows are not affected.
 */
#ifndef POLICY_H
#define POLICY_H

#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "opening.h"
#include "portolan.h"

/* Whether there is a policy; written by the server. */
volatile __u32 policy SEC(".data.policy");

/*
 * Whether a packet that only this binding claims is for the kernel's stack. That has no socket on a port whose transport
 * a program runs itself. A delegated listener's handshakes have no flows.
 */
static __always_inline bool is_for_policy(const struct flow_row *row, int opening)
{
	return policy && !(row->flags & ROW_RAW) &&
	       (opening != CONTINUES || !(row->flags & ROW_DELEGATED));
}

#endif
