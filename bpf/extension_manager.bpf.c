// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The protocol managers of PacketRecv (PX 3.1): they show a packet to the extensions of its endpoint,
 * and carry out their decisions. An extension has no access to the packet and does not choose its
 * source; what it leaves in the view is checked here.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "chain.h"
#include "counters.h"
#include "extension.h"
#include "forward.h"
#include "maps.h"
#include "owner.h"
#include "reply.h"
#include "reply_raw.h"
#include "send.h"
#include "view.h"

static __always_inline enum shown show_what_came(struct __sk_buff *skb,
						 struct extension_work *work,
						 struct portolan_view *view)
{
	switch (work->event) {
	case EVENT_ETHERNET_RECEIVE:
		return show_frame(skb, RECEIVED, work, view);
	case EVENT_IP_RECEIVE:
		return show_packet(skb, work, view);
	default:
		return show(skb, RECEIVED, work, view);
	}
}

/* PacketRecv of UDP, TCP, Ethernet and IP. */
SEC("tc")
int extension_receive(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_view *view = bpf_map_lookup_elem(&extension_views, &zero);

	if (!work || !view)
		return TC_ACT_SHOT;
	if (!is_paid(skb, work))
		return TC_ACT_SHOT;
	if (!find_chain(work, work->event))
		return give_to_owner(skb, work);
	switch (show_what_came(skb, work, view)) {
	case SHOWN:
		call_next(skb, work, view);
		count(extension_passed);
		break;
	case NOT_SHOWN:
		count(extension_unseen);
		break;
	case BAD_CHECKSUM:
		count(extension_bad_checksum);
		break;
	}
	return give_to_owner(skb, work);
}

/* Carries out the decision of an extension. */
SEC("tc")
int extension_apply(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_view *view = bpf_map_lookup_elem(&extension_views, &zero);
	struct extension_statistics *statistics;

	if (!work || !view)
		return TC_ACT_SHOT;
	statistics = bpf_map_lookup_elem(&extension_statistics, &work->number);
	if (!statistics)
		return TC_ACT_SHOT;
	if (work->run.is_skipped) {
		account(statistics, skipped);
		call_next(skb, work, view);
		count(extension_passed);
		return give_to_owner(skb, work);
	}
	charge_time(work, statistics);
	switch (work->run.verdict) {
	case PORTOLAN_PASS:
		account(statistics, passed);
		call_next(skb, work, view);
		count(extension_passed);
		return give_to_owner(skb, work);
	case PORTOLAN_CONSUME:
		account(statistics, consumed);
		count(extension_consumed);
		return TC_ACT_SHOT;
	case PORTOLAN_DELIVER:
		account(statistics, delivered);
		count(extension_delivered);
		return give_to_owner(skb, work);
	case PORTOLAN_REPLY:
		if (has_no_transport(work) ? reply_raw(skb, work, view) :
					     reply(skb, work, view)) {
			classify(skb, work->row.class);
			account(statistics, replied);
			count(extension_replied);
			return bpf_redirect(work->interface, 0);
		}
		break;
	case PORTOLAN_FORWARD:
		if (!has_no_transport(work) && forward(skb, work, view)) {
			account(statistics, forwarded);
			count(extension_forwarded);
			return bpf_redirect_neigh(work->interface, NULL, 0, 0);
		}
		break;
	}
	account(statistics, refused);
	count(extension_refused);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
