/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Finds the flow of a packet, by the configured algorithm. */
#ifndef SEARCH_H
#define SEARCH_H

#include "linear.h"
#include "lookup.h"
#include "maps.h"
#include "settings.h"

static __always_inline struct flow_row *find_owner(const struct filter_key *key)
{
	return settings.algorithm == ALGORITHM_LINEAR ? find_linear(key) : find_flow(key);
}

#endif
