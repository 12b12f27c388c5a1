/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * Received fragments. Only the first one of a datagram has ports: its row is remembered for the later
 * ones. A later one that arrives before the first goes to the kernel, as if Portolan were not there,
 * and a copy of it to the server, which keeps it until the first one has determined the owner.
 */
#ifndef FRAGMENTS_H
#define FRAGMENTS_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "counters.h"
#include "deliver.h"
#include "maps.h"
#include "parse.h"

#define SECOND 1000000000ULL
/* After this time without a fragment, an identification stands for another datagram (RFC 791 §3.2: 15 s). */
#define FRAGMENT_SILENCE (15 * SECOND)
/* Limit of the copies for the server, which share its ring with SYNs. */
#define HOLD_PERIOD (SECOND / 10)
#define HOLD_MOST 512

static __always_inline struct fragment_key fragment_key_of(const struct filter_key *key,
							   const struct piece *piece)
{
	struct fragment_key fragment = {
		.local = key->local,
		.remote = key->remote,
		.identification = piece->identification,
	};

	if (key->local.words[0] == 0 && key->local.words[1] == 0 &&
	    key->local.words[2] == bpf_htonl(0xffff))
		fragment.protocol = key->protocol;
	return fragment;
}

static __always_inline bool has_budget(__u64 now)
{
	__u32 zero = 0;
	struct hold_budget *budget = bpf_map_lookup_elem(&hold_budget, &zero);

	if (!budget)
		return false;
	if (now - budget->since > HOLD_PERIOD) {
		budget->since = now;
		budget->used = 0;
	}
	return __sync_fetch_and_add(&budget->used, 1) < HOLD_MOST;
}

/* Gives the server a copy. A function of its own, because it contains all of deliver(). */
static __noinline int hold(struct __sk_buff *skb)
{
	const struct delivery delivery = {
		.flags = RECORD_FRAGMENT | RECORD_EARLY_FRAGMENT,
		.interface = skb->ifindex,
	};
	struct flow_row server = { .channel = SERVER_CHANNEL, .slot = ~0U };

	if (!has_budget(bpf_ktime_get_ns())) {
		count(receive_pass_fragment_flood);
		return 0;
	}
	return deliver_by_ring(skb, &server, &delivery);
}

static __always_inline bool is_fresh(const struct fragment_row *known, __u64 now)
{
	return known && now - known->heard < FRAGMENT_SILENCE;
}

/* Records the owner of the datagram, as determined by its first fragment. */
static __always_inline void enter(struct __sk_buff *skb, const struct filter_key *key,
				  const struct piece *piece, struct fragment_row *entry)
{
	struct fragment_key fragment = fragment_key_of(key, piece);
	struct fragment_row *known = bpf_map_lookup_elem(&fragments, &fragment);
	bool is_awaited;

	entry->heard = bpf_ktime_get_ns();
	is_awaited = is_fresh(known, entry->heard) && known->state == FRAGMENT_AWAITED;
	bpf_map_update_elem(&fragments, &fragment, entry, BPF_ANY);
	/* Tells the server to release what it holds. */
	if (is_awaited && entry->state != FRAGMENT_PASSED)
		hold(skb);
}

/*
 * The first fragment belongs to `row`, or to the kernel if there is none: later ones will, too. Global, so that the
 * verifier checks it once. Returns 0.
 */
__noinline int remember(struct __sk_buff *skb, const struct filter_key *key,
			const struct piece *piece, const struct flow_row *row, __u16 flags)
{
	struct fragment_row entry = {
		.state = row ? FRAGMENT_CLAIMED : FRAGMENT_PASSED,
		.flags = flags,
	};

	if (!key || !piece)
		return 0;
	if (row)
		entry.row = *row;
	enter(skb, key, piece, &entry);
	return 0;
}

/* The first fragment is for all members of its port, if there are any. */
static __always_inline void remember_port(struct __sk_buff *skb, const struct filter_key *key,
					  const struct piece *piece, bool any)
{
	struct fragment_row entry = {
		.state = any ? FRAGMENT_FOR_MANY : FRAGMENT_PASSED,
		.local_port = key->local_port,
	};

	enter(skb, key, piece, &entry);
}

/* Records that fragments have arrived before the first one, and copies this one to the server. */
static __always_inline void await_first(struct __sk_buff *skb, const struct fragment_key *fragment,
					const struct fragment_row *known, __u64 now)
{
	struct fragment_row awaited = { .heard = now, .state = FRAGMENT_AWAITED };

	if (!known)
		bpf_map_update_elem(&fragments, fragment, &awaited, BPF_ANY);
	hold(skb);
}

/* Gets the port of a later fragment for many; returns false if the first one is missing. */
static __always_inline bool recall_port(struct __sk_buff *skb, struct filter_key *key,
					const struct piece *piece, bool may_hold)
{
	struct fragment_key fragment = fragment_key_of(key, piece);
	struct fragment_row *known = bpf_map_lookup_elem(&fragments, &fragment);
	__u64 now = bpf_ktime_get_ns();

	if (is_fresh(known, now)) {
		known->heard = now;
		key->local_port = known->local_port;
		if (known->state == FRAGMENT_FOR_MANY)
			return true;
	} else {
		known = NULL;
	}
	if (may_hold && !(known && known->state == FRAGMENT_PASSED))
		await_first(skb, &fragment, known, now);
	return false;
}

/* The row of a later fragment, whose flags are added; none if it goes to the kernel. */
static __always_inline struct flow_row *find_fragment(struct __sk_buff *skb,
						      const struct filter_key *key,
						      const struct piece *piece, bool may_hold,
						      __u16 *flags)
{
	struct fragment_key fragment = fragment_key_of(key, piece);
	struct fragment_row *known = bpf_map_lookup_elem(&fragments, &fragment);
	__u64 now = bpf_ktime_get_ns();

	if (is_fresh(known, now)) {
		known->heard = now;
		if (known->state == FRAGMENT_CLAIMED) {
			*flags |= known->flags;
			return &known->row;
		}
	} else {
		known = NULL;
	}
	count(receive_pass_fragment);
	if (!may_hold || (known && known->state == FRAGMENT_PASSED) || !is_local(&key->local))
		return NULL;
	await_first(skb, &fragment, known, now);
	return NULL;
}

#endif
