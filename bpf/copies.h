/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * One datagram to many destinations (PX 5.1). Copies share the payload; the destination is written into
 * the datagram, which is cloned, once per copy. Source and device stay as the transmit filter has
 * checked them.
 *
 * The kernel's routes and neighbours determine where a destination is on the network. A program uses
 * them by its verdict, and a cloning program has only one: so each clone passes the transmit filter
 * again, through its tap, with a mark that nobody else can set, and gets its own verdict there. The
 * last copy is the datagram itself. A copy of a raw frame names its station, and is sent directly.
 */
#ifndef COPIES_H
#define COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "chain.h"
#include "counters.h"
#include "extension.h"
#include "rewrite.h"
#include "send.h"

/* To a station on the link; any is permitted, since the owner could send there itself. */
static __always_inline bool aim_at_station(struct __sk_buff *skb,
					   const struct portolan_destination *destination)
{
	return bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_dest), destination->address,
				   ETH_ALEN, 0) == 0;
}

/* To a host, for a raw IP protocol. */
static __always_inline bool aim_at_host(struct __sk_buff *skb, struct extension_work *work,
					const struct portolan_destination *destination)
{
	const struct layout at = layout_of(&work->key, 0);
	union address to;

	__builtin_memcpy(&to, destination->address, sizeof(to));
	if (!may_be_sent_to(&work->key, &to) ||
	    !change_destination(skb, &at, &work->key.remote, &to))
		return false;
	work->key.remote = to;
	if (work->is_numbered)
		identify(skb, &work->key);
	return true;
}

/* To a port of a host. The key holds the present addresses and ports. */
static __always_inline bool aim_at_port(struct __sk_buff *skb, struct extension_work *work,
					const struct portolan_destination *destination)
{
	const struct layout at = layout_of(&work->key, 0);
	struct ends before = {
		.addresses = { work->key.local, work->key.remote },
		.ports = { .source = work->key.local_port, .destination = work->key.remote_port },
	};
	struct ends after = before;

	__builtin_memcpy(&after.addresses[1], destination->address, sizeof(after.addresses[1]));
	after.ports.destination = bpf_htons(destination->port);
	if (!after.ports.destination || !may_be_sent_to(&work->key, &after.addresses[1]) ||
	    !change_ends(skb, &at, &work->key, &before, &after))
		return false;
	work->key.remote = after.addresses[1];
	work->key.remote_port = after.ports.destination;
	if (work->is_numbered)
		identify(skb, &work->key);
	return true;
}

/* Writes a destination into the packet. */
static __always_inline bool aim_at(struct __sk_buff *skb, struct extension_work *work,
				   const struct portolan_destination *destination)
{
	switch (work->event) {
	case EVENT_ETHERNET_SEND:
		return aim_at_station(skb, destination);
	case EVENT_IP_SEND:
		return aim_at_host(skb, work, destination);
	default:
		return aim_at_port(skb, work, destination);
	}
}

static __always_inline void account_copy(const struct extension_work *work)
{
	__u32 number = work->number;
	struct extension_statistics *statistics =
		bpf_map_lookup_elem(&extension_statistics, &number);

	if (statistics)
		account(statistics, copied);
	count(extension_copied);
}

/*
 * Makes the datagram the copy for the destination with that index; returns 1 if it cannot be sent
 * there. Global, so that the verifier checks it once.
 */
__noinline int make_copy(struct __sk_buff *skb, __u32 index)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_sending *sending = bpf_map_lookup_elem(&extension_sendings, &zero);

	/* The index is always in range; the verifier does not know. */
	if (!work || !sending ||
	    !aim_at(skb, work, &sending->destinations[index % PORTOLAN_COPIES])) {
		count(extension_copy_refused);
		return 1;
	}
	account_copy(work);
	return 0;
}

/* State of the cloning loop. */
struct copying {
	struct __sk_buff *skb;
	/* Number of iterations that make clones. */
	__u32 clones;
	/* Output device of copies for stations on the link; 0 for others, which the kernel routes. */
	__u32 egress;
};

static long clone_in_turn(__u32 turn, struct copying *copying)
{
	struct __sk_buff *skb = copying->skb;

	if (turn >= copying->clones)
		return 1;
	if (make_copy(skb, turn))
		return 0;
	if (copying->egress)
		bpf_clone_redirect(skb, copying->egress, 0);
	else
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
	return 0;
}

/* Whether the packet may be sent to several destinations. */
static __always_inline bool may_copy(const struct extension_work *work,
				     const struct portolan_sending *sending)
{
	return (work->key.protocol == IPPROTO_UDP || has_no_transport(work)) &&
	       sending->copies > 0 && sending->copies <= PORTOLAN_COPIES;
}

static __always_inline int send_copies(struct __sk_buff *skb, const struct extension_work *work,
				       const struct portolan_sending *sending)
{
	const bool is_of_link = is_of_ethernet(work);
	const __u32 egress = work->interface;
	struct copying copying = {
		.skb = skb,
		.clones = sending->copies - 1,
		.egress = is_of_link ? egress : 0,
	};

	classify(skb, work->row.class);
	if (!is_of_link)
		skb->mark = MARK_AGAIN | work->row.class;
	bpf_loop(PORTOLAN_COPIES, clone_in_turn, &copying, 0);
	skb->mark = 0;
	if (make_copy(skb, copying.clones))
		return TC_ACT_SHOT;
	count(transmit_sent);
	return is_of_link ? bpf_redirect(egress, 0) : bpf_redirect_neigh(egress, NULL, 0, 0);
}

#endif
