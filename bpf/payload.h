/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Writes the payload that an extension left in its view into a packet. */
#ifndef PAYLOAD_H
#define PAYLOAD_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_helpers.h>

#include "extension.h"
#include "lookup.h"

/* Length of the headers of a packet without transport; such packets are shown only without options. */
static __always_inline __u32 headers_of(const struct extension_work *work)
{
	if (is_of_ethernet(work))
		return ETH_HLEN;
	return ETH_HLEN +
	       (is_ipv4(&work->key.local) ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
}

/* Writes the payload behind `headers` bytes, which are not changed. Returns false if it does not fit. */
static __always_inline bool put_payload(struct __sk_buff *skb, __u32 headers,
					struct portolan_view *view)
{
	__u32 length = view->length;

	if (length > PORTOLAN_PAYLOAD)
		return false;
	if (skb->len != headers + length && bpf_skb_change_tail(skb, headers + length, 0))
		return false;
	/* Otherwise the compiler would fold what follows into the tests above, where the verifier does not see it. */
	asm volatile("" : "+r"(length));
	return length == 0 || (length <= PORTOLAN_PAYLOAD &&
			       bpf_skb_store_bytes(skb, headers, view->payload, length, 0) == 0);
}

#endif
