/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* From a key to the row that claims it. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include "maps.h"

static __always_inline struct flow_row *find_flow(const struct filter_key *key)
{
	return bpf_map_lookup_elem(&flows, key);
}

/* A binding to the very address goes before one to any address. */
static __always_inline struct flow_row *find_binding(const struct filter_key *key)
{
	struct binding_key binding = {
		.local = key->local,
		.local_port = key->local_port,
		.protocol = key->protocol,
	};
	struct flow_row *row = bpf_map_lookup_elem(&bindings, &binding);

	if (row)
		return row;
	__builtin_memset(&binding.local, 0, sizeof(binding.local));
	return bpf_map_lookup_elem(&bindings, &binding);
}

#endif
