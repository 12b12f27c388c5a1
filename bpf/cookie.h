/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * SYN cookies (RFC 4987 §3.6), made exactly like those of crates/tcp/src/cookie.rs, which decodes them.
 * A test compares the two.
 */
#ifndef COOKIE_H
#define COOKIE_H

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "portolan.h"

/* Domain separators of the keyed hash. */
#define HASH_TIMESTAMP 2
#define HASH_OUTER 3
#define HASH_INNER 4

/* The hashed message: a flow, then a word with the domain and an extra value. */
#define HASH_FLOW_WORDS 5
#define HASH_BYTES 48ULL

#define COOKIE_SIZES 8
#define COOKIE_COUNTER_SHIFT 24
#define COOKIE_DATA_MASK ((1U << COOKIE_COUNTER_SHIFT) - 1)
#define COOKIE_STAMP_MASK 63U
#define COOKIE_NO_SCALE 15
#define COOKIE_SACK 16
#define COOKIE_ECN 32

#define NANOSECONDS_OF_MILLISECOND 1000000ULL
#define MILLISECONDS_OF_MINUTE 60000ULL

struct sip {
	__u64 v[4];
};

static __always_inline __u64 rotate(__u64 word, const int by)
{
	return word << by | word >> (64 - by);
}

static __always_inline __u64 little_endian(__u64 word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	return __builtin_bswap64(word);
#else
	return word;
#endif
}

static __always_inline void sip_round(struct sip *s)
{
	s->v[0] += s->v[1];
	s->v[1] = rotate(s->v[1], 13) ^ s->v[0];
	s->v[0] = rotate(s->v[0], 32);
	s->v[2] += s->v[3];
	s->v[3] = rotate(s->v[3], 16) ^ s->v[2];
	s->v[0] += s->v[3];
	s->v[3] = rotate(s->v[3], 21) ^ s->v[0];
	s->v[2] += s->v[1];
	s->v[1] = rotate(s->v[1], 17) ^ s->v[2];
	s->v[2] = rotate(s->v[2], 32);
}

static __always_inline void sip_word(struct sip *s, __u64 word)
{
	s->v[3] ^= word;
	sip_round(s);
	sip_round(s);
	s->v[0] ^= word;
}

/* A flow's key, aligned for access by words. */
struct flow_words {
	__u64 word[HASH_FLOW_WORDS];
};

/* SipHash-2-4, truncated to 32 bits. Global, so that the verifier checks it once. */
__noinline __u32 hash_flow(const struct flood *flood, const struct flow_words *flow, __u64 more)
{
	struct sip s;
	__u64 key[2];

	if (!flood || !flow)
		return 0;
	key[0] = little_endian(flood->secret[0]);
	key[1] = little_endian(flood->secret[1]);
	s.v[0] = key[0] ^ 0x736f6d6570736575ULL;
	s.v[1] = key[1] ^ 0x646f72616e646f6dULL;
	s.v[2] = key[0] ^ 0x6c7967656e657261ULL;
	s.v[3] = key[1] ^ 0x7465646279746573ULL;
	for (int i = 0; i < HASH_FLOW_WORDS; i++)
		sip_word(&s, little_endian(flow->word[i]));
	sip_word(&s, more);
	sip_word(&s, HASH_BYTES << 56);
	s.v[2] ^= 0xff;
	for (int i = 0; i < 4; i++)
		sip_round(&s);
	return s.v[0] ^ s.v[1] ^ s.v[2] ^ s.v[3];
}

_Static_assert(sizeof(struct filter_key) == 8 * HASH_FLOW_WORDS, "words of a flow");

static __always_inline __u32 keyed_hash(const struct flood *flood, const struct flow_words *flow,
					const __u8 domain, __u32 extra)
{
	return hash_flow(flood, flow, domain | (__u64)extra << 32);
}

/* Index of the largest size that a cookie can carry and that does not exceed the peer's. */
static __always_inline __u32 index_of_size(__u16 size)
{
	if (size >= 8960)
		return 7;
	if (size >= 1460)
		return 6;
	if (size >= 1440)
		return 5;
	if (size >= 1400)
		return 4;
	if (size >= 1360)
		return 3;
	if (size >= 1300)
		return 2;
	return size >= 1220;
}

static __always_inline __u32 cookie_number(const struct flood *flood,
					   const struct flow_words *flow, __u32 peers_number,
					   __u16 peers_size, __u64 now_ms)
{
	const __u32 minute = now_ms / MILLISECONDS_OF_MINUTE;
	const __u32 inner = keyed_hash(flood, flow, HASH_INNER, minute) + index_of_size(peers_size);

	return keyed_hash(flood, flow, HASH_OUTER, 0) + peers_number +
	       (minute << COOKIE_COUNTER_SHIFT) + (inner & COOKIE_DATA_MASK);
}

/* The clock with its low bits replaced, never later than the clock. */
static __always_inline __u32 cookie_stamp(__u32 bits, __u32 clock)
{
	__u32 value = (clock & ~COOKIE_STAMP_MASK) | bits;

	return (__s32)(value - clock) > 0 ? value - (COOKIE_STAMP_MASK + 1) : value;
}

#endif
