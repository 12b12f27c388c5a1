/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * One datagram to many (PX 5.1). A copy shares the payload; its destination is written into the
 * datagram, which is cloned, one after the other. Source and device stay those that the transmit
 * filter has found good.
 *
 * Where a destination is on the network, the kernel's routes and neighbours say. They are asked with
 * the verdict of a program, and one that clones has only one: so a clone comes to the transmit filter
 * once more, by its tap, with a mark that nobody else can set, and has a verdict of its own there.
 * The last copy is the datagram itself. Of a kind of frame that is its owner's own, a copy names its station: it leaves at
 * once.
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

/* To a station of the link; any that is, since its owner could send there himself. */
static __always_inline bool aim_at_station(struct __sk_buff *skb,
					   const struct portolan_destination *destination)
{
	return bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_dest), destination->address,
				   ETH_ALEN, 0) == 0;
}

/* To a host that has the protocol, too. */
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

/* To a port of a host. The key says what is there. */
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
 * Makes the datagram the copy for the destination of that index; answers 1 if it cannot go there.
 * Global, so that the verifier looks at it once.
 */
__noinline int make_copy(struct __sk_buff *skb, __u32 index)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_sending *sending = bpf_map_lookup_elem(&extension_sendings, &zero);

	/* There are never more than fit; the verifier does not know. */
	if (!work || !sending ||
	    !aim_at(skb, work, &sending->destinations[index % PORTOLAN_COPIES])) {
		count(extension_copy_refused);
		return 1;
	}
	account_copy(work);
	return 0;
}

/* What the loop has beside its turn. */
struct copying {
	struct __sk_buff *skb;
	/* Turns that make clones. */
	__u32 clones;
	/* Where those for stations of the link leave; 0 for others, whose way the kernel is asked for. */
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

/* Can what the extension left be sent to several? */
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
