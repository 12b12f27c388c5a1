/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Whose flow a packet is of, by the way of searching that was chosen. */
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
