/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Source addresses that no packet from a network may have (RFC 1122 §3.2.1.3, RFC 4291 §2.5, §2.7): the
 * kernel drops such packets when it routes them, but packets claimed by a session never get there.
 */
#ifndef MARTIAN_H
#define MARTIAN_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lookup.h"
#include "maps.h"

static __always_inline bool is_multicast(const union address *address)
{
	if (is_ipv4(address))
		return (address->bytes[12] & 0xf0) == 0xe0;
	return address->bytes[0] == 0xff;
}

/* Hosts without an address yet send from 0.0.0.0: to the broadcast address, or to a link-local group. */
static __always_inline bool is_for_newcomers(__be32 v4)
{
	return v4 == bpf_htonl(0xffffffff) ||
	       (v4 & bpf_htonl(0xffffff00)) == bpf_htonl(0xe0000000);
}

/* For IPv6: ::/127 is the unspecified and the loopback address; mapped addresses stand for IPv4. */
static __always_inline bool is_martian_v6(const union address *source)
{
	if (source->bytes[0] == 0xff || is_ipv4(source))
		return true;
	return !(source->words[0] | source->words[1] | source->words[2]) &&
	       bpf_ntohl(source->words[3]) <= 1;
}

static __always_inline bool is_martian_v4(const union address *source,
					  const union address *destination)
{
	__be32 v4 = source->words[3];

	if (v4 == 0)
		return !is_for_newcomers(destination->words[3]);
	return source->bytes[12] == 127 || is_multicast(source) || v4 == bpf_htonl(0xffffffff);
}

/* The destination tells the packet's IP version. */
static __always_inline bool is_martian(const struct filter_key *key)
{
	if (is_ipv4(&key->local) ? is_martian_v4(&key->remote, &key->local) :
				   is_martian_v6(&key->remote))
		return true;
	/* An address of this host, or a broadcast address of one of its networks. */
	return bpf_map_lookup_elem(&local_addresses, &key->remote) != NULL;
}

#endif
