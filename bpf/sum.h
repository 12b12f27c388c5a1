/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* The Internet checksum (RFC 1071): one's complement sums, in memory byte order. */
#ifndef SUM_H
#define SUM_H

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include <portolan/extension.h>

#include "lookup.h"
#include "portolan.h"

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u64 sum_of_address(const union address *address)
{
	if (is_ipv4(address))
		return address->words[3];
	return (__u64)address->words[0] + address->words[1] + address->words[2] + address->words[3];
}

/* RFC 768, RFC 8200 §8.1. */
static __always_inline __u64 sum_of_pseudo_header(const struct filter_key *key, __be16 length)
{
	return sum_of_address(&key->local) + sum_of_address(&key->remote) +
	       bpf_htons(key->protocol) + length;
}

static __always_inline __u64 sum_of_ports(const struct filter_key *key)
{
	return (__u64)key->local_port + key->remote_port;
}

/* The bytes from `length` to the next multiple of four must be zero. */
static __always_inline __u64 sum_of_payload(__u8 *payload, __u32 length)
{
	__u32 size = (length + 3) & ~3U;

	asm volatile("" : "+r"(size));
	if (size == 0 || size > PORTOLAN_PAYLOAD)
		return 0;
	return (__u32)bpf_csum_diff(NULL, 0, (__be32 *)payload, size, 0);
}

#endif
