/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Whether a TCP segment that only a binding claims opens a connection. */
#ifndef OPENING_H
#define OPENING_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "parse.h"

enum opening {
	/* A SYN without ACK. */
	OPENS,
	CONTINUES,
	/* IPv6 extension headers hide the flags. */
	OPENING_HIDDEN,
};

/* Global, so that the verifier checks it once. */
__noinline int opening_of(hook_context *packet)
{
	struct cursor cursor = frame_of(packet);
	struct ethhdr *eth = cursor.at;
	struct iphdr *ip = cursor.at + sizeof(*eth);
	struct tcphdr *tcp = cursor.at + sizeof(*eth) + sizeof(struct ipv6hdr);

	if ((void *)(ip + 1) > cursor.end)
		return OPENING_HIDDEN;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		tcp = (void *)ip + ip->ihl * 4;
	else if (((struct ipv6hdr *)ip)->nexthdr != IPPROTO_TCP)
		return OPENING_HIDDEN;
	if ((void *)(tcp + 1) > cursor.end)
		return OPENING_HIDDEN;
	return tcp->syn && !tcp->ack ? OPENS : CONTINUES;
}

#endif
