// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The protocol managers of PacketSend (PX 3.1): they show packets that a channel may send to the
 * extensions of the source endpoint. No extension can change the source.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "chain.h"
#include "copies.h"
#include "counters.h"
#include "extension.h"
#include "maps.h"
#include "replace.h"
#include "send.h"
#include "view.h"

static __always_inline int send_on(struct __sk_buff *skb, const struct extension_work *work)
{
	return is_of_ethernet(work) ? send(skb, work->interface, work->row.class) :
				      send_packet(skb, work->interface, work->row.class);
}

/* Clears the destinations of earlier packets of others. */
static __always_inline enum shown show_sent(struct __sk_buff *skb, struct extension_work *work,
					    struct portolan_sending *sending)
{
	sending->copies = 0;
	__builtin_memset(sending->destinations, 0, sizeof(sending->destinations));
	switch (work->event) {
	case EVENT_ETHERNET_SEND:
		return show_frame(skb, SENT, work, &sending->view);
	case EVENT_IP_SEND:
		return show_packet(skb, work, &sending->view);
	default:
		return show(skb, SENT, work, &sending->view);
	}
}

/* PacketSend of UDP, TCP, Ethernet and IP. */
SEC("tc")
int extension_send(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_sending *sending = bpf_map_lookup_elem(&extension_sendings, &zero);

	if (!work || !sending)
		return TC_ACT_SHOT;
	if (!find_chain(work, work->event))
		return send_on(skb, work);
	if (show_sent(skb, work, sending) == SHOWN) {
		call_next(skb, work, &sending->view);
		count(extension_sent);
	} else {
		count(extension_send_unseen);
	}
	return send_on(skb, work);
}

/* Carries out the decision of an extension about a sent packet. */
SEC("tc")
int extension_apply_sent(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct portolan_sending *sending = bpf_map_lookup_elem(&extension_sendings, &zero);
	struct extension_statistics *statistics;

	if (!work || !sending)
		return TC_ACT_SHOT;
	statistics = bpf_map_lookup_elem(&extension_statistics, &work->number);
	if (!statistics)
		return TC_ACT_SHOT;
	if (work->run.is_skipped)
		account(statistics, skipped);
	else
		charge_time(work, statistics);
	switch (work->run.is_skipped ? PORTOLAN_PASS : work->run.verdict) {
	case PORTOLAN_PASS:
		if (!work->run.is_skipped)
			account(statistics, passed);
		call_next(skb, work, &sending->view);
		count(extension_sent);
		return send_on(skb, work);
	case PORTOLAN_CONSUME:
		account(statistics, consumed);
		count(extension_consumed);
		return TC_ACT_SHOT;
	case PORTOLAN_DELIVER:
		account(statistics, delivered);
		count(extension_sent);
		return send_on(skb, work);
	case PORTOLAN_REPLACE:
		if (has_no_transport(work) ? replace_raw(skb, work, &sending->view) :
					     replace(skb, work, &sending->view)) {
			account(statistics, replaced);
			count(extension_replaced);
			return send_on(skb, work);
		}
		break;
	case PORTOLAN_COPY:
		if (may_copy(work, sending))
			return send_copies(skb, work, sending);
		break;
	}
	account(statistics, refused);
	count(extension_refused);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
