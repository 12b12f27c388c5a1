/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* From a key to the row that claims it; several sockets may share an endpoint. */
#ifndef LOOKUP_H
#define LOOKUP_H

#include <bpf/bpf_endian.h>

#include "maps.h"

/* The seed is chosen at the first look-up of a shared binding, so that peers cannot select one of its sockets. */
volatile struct lasting lasting SEC(".data.lasting");

static __always_inline struct flow_row *find_flow(const struct filter_key *key)
{
	return bpf_map_lookup_elem(&flows, key);
}

/* IPv4-mapped addresses stand for IPv4 (RFC 4291 §2.5.5.2). */
static __always_inline bool is_ipv4(const union address *address)
{
	return address->words[0] == 0 && address->words[1] == 0 &&
	       address->words[2] == bpf_htonl(0xffff);
}

static __always_inline struct binding_key exact_binding(const struct filter_key *key)
{
	return (struct binding_key){
		.local = key->local,
		.local_port = key->local_port,
		.protocol = key->protocol,
	};
}

/* The binding to any address of the same family. */
static __always_inline void to_wildcard(struct binding_key *binding)
{
	if (!is_ipv4(&binding->local))
		binding->local.words[2] = 0;
	binding->local.words[0] = 0;
	binding->local.words[1] = 0;
	binding->local.words[3] = 0;
}

/* The finalizer of MurmurHash3 over the peer's address and port. */
static __always_inline __u32 hash_of_peer(const struct filter_key *key)
{
	__u32 hash = lasting.share_seed;

	if (!hash) {
		__sync_val_compare_and_swap(&lasting.share_seed, 0, bpf_get_prandom_u32() | 1);
		hash = lasting.share_seed;
	}
	for (int i = 0; i < 4; i++) {
		hash ^= key->remote.words[i];
		hash *= 0x85ebca6b;
		hash ^= hash >> 13;
	}
	hash ^= key->remote_port;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* SO_REUSEPORT: the flow's hash selects a bucket, which the server has assigned to a socket. */
static __always_inline struct flow_row *share_of(const struct binding_key *binding,
						 const struct filter_key *key)
{
	struct share_key share = {
		.binding = *binding,
		.bucket = hash_of_peer(key) % SHARE_BUCKETS,
	};

	return bpf_map_lookup_elem(&shares, &share);
}

static __always_inline struct flow_row *row_of(const struct binding_key *binding,
					       const struct filter_key *key)
{
	struct flow_row *row = bpf_map_lookup_elem(&bindings, binding);

	return row && row->flags & ROW_REUSEPORT ? share_of(binding, key) : row;
}

/* A binding to the exact address takes precedence over one to any address. */
static __always_inline struct flow_row *find_binding(const struct filter_key *key)
{
	struct binding_key binding = exact_binding(key);
	struct flow_row *row = row_of(&binding, key);

	if (row)
		return row;
	to_wildcard(&binding);
	return row_of(&binding, key);
}

enum sender {
	SENDER_UNKNOWN,
	SENDER_FOREIGN,
	SENDER_OWNER,
};

/* Whether the channel is one of several that send from the binding; stores only that there may be handlers. */
static __always_inline bool is_among_senders(const struct binding_key *binding,
					     struct flow_row *sender)
{
	struct sender_key key = { .binding = *binding, .channel = sender->channel };
	const __u16 *class = bpf_map_lookup_elem(&senders, &key);

	if (!class)
		return false;
	sender->class = *class;
	sender->flags = ROW_EXTENDED_SENDING;
	return true;
}

/* Whether the channel has a socket with that binding, alone or among others; if so, stores its row. */
static __always_inline enum sender sender_on(const struct binding_key *binding,
					     struct flow_row *sender)
{
	struct flow_row *row = bpf_map_lookup_elem(&bindings, binding);

	if (row && !(row->flags & ROW_SHARED)) {
		if (row->channel != sender->channel)
			return SENDER_FOREIGN;
		*sender = *row;
		return SENDER_OWNER;
	}
	if (is_among_senders(binding, sender))
		return SENDER_OWNER;
	return row ? SENDER_FOREIGN : SENDER_UNKNOWN;
}

/* Whether the channel may send from an endpoint that has no flow. */
static __always_inline enum sender find_sender(const struct filter_key *key,
					       struct flow_row *sender)
{
	struct binding_key binding = exact_binding(key);
	enum sender exact = sender_on(&binding, sender);
	enum sender any;

	if (exact == SENDER_OWNER)
		return exact;
	to_wildcard(&binding);
	any = sender_on(&binding, sender);
	return any == SENDER_UNKNOWN ? exact : any;
}

/*
 * Whether the channel performs handshakes of that port itself, alone or among others. A listener on the exact address takes
 * precedence over one on any address, which does not own its port.
 */
static __always_inline enum sender find_delegate(const struct filter_key *key,
						 struct flow_row *sender)
{
	struct binding_key binding = exact_binding(key);
	struct flow_row *row = bpf_map_lookup_elem(&bindings, &binding);

	if (!row) {
		to_wildcard(&binding);
		row = bpf_map_lookup_elem(&bindings, &binding);
	}
	if (!row || !(row->flags & ROW_DELEGATED))
		return SENDER_UNKNOWN;
	if (row->flags & ROW_SHARED)
		return is_among_senders(&binding, sender) ? SENDER_OWNER : SENDER_FOREIGN;
	if (row->channel != sender->channel)
		return SENDER_FOREIGN;
	*sender = *row;
	return SENDER_OWNER;
}

#endif
