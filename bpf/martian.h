/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Source addresses that no packet from a network may have (RFC 1122 §3.2.1.3, RFC 4291 §2.5, §2.7): the
 * kernel drops such packets where it routes them, which those that a session claims never reach.
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

/* Hosts that have no address yet send from 0.0.0.0: to everybody, or to a group of their link. */
static __always_inline bool is_for_newcomers(__be32 v4)
{
	return v4 == bpf_htonl(0xffffffff) ||
	       (v4 & bpf_htonl(0xffffff00)) == bpf_htonl(0xe0000000);
}

/* Of IPv6 ::/127 is nobody's and loopback's, and mapped addresses are IPv4's. */
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

/* The destination says which version the packet is of. */
static __always_inline bool is_martian(const struct filter_key *key)
{
	if (is_ipv4(&key->local) ? is_martian_v4(&key->remote, &key->local) :
				   is_martian_v6(&key->remote))
		return true;
	/* An address of this host, or of all in one of its networks. */
	return bpf_map_lookup_elem(&local_addresses, &key->remote) != NULL;
}

#endif
