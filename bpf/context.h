/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * The differences between the two hooks of the packet filter: tc ingress, where a frame is an skb,
 * and XDP (`IN_DRIVER`), where it is the driver's buffer. The code between is the same.
 *
 * At XDP some properties of an skb are unknown: whether it was merged from several packets, its VLAN
 * tag, and whether it is for this host. The XDP programs must deal with that.
 */
#ifndef CONTEXT_H
#define CONTEXT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#ifdef IN_DRIVER

#define HOOK_IS_DRIVERS 1
#define VERDICT_DROP XDP_DROP
#define VERDICT_PASS XDP_PASS

typedef struct xdp_md hook_context;

static __always_inline __u64 length_of(hook_context *packet)
{
	return bpf_xdp_get_buff_len(packet);
}

static __always_inline __u32 segment_size_of(hook_context *packet)
{
	(void)packet;
	return 0;
}

static __always_inline __be16 protocol_of(hook_context *packet)
{
	struct ethhdr *eth = (void *)(unsigned long)packet->data;

	return (void *)(eth + 1) > (void *)(unsigned long)packet->data_end ? 0 : eth->h_proto;
}

/* Drivers leave the headers in the first buffer. */
static __always_inline void make_linear(hook_context *packet, __u32 length)
{
	(void)packet;
	(void)length;
}

static __always_inline long load_bytes(hook_context *packet, __u32 offset, void *to, __u64 length)
{
	return bpf_xdp_load_bytes(packet, offset, to, length);
}

static __always_inline long store_bytes(hook_context *packet, const void *from, __u32 length)
{
	return bpf_xdp_store_bytes(packet, 0, (void *)from, length);
}

#else

#define HOOK_IS_DRIVERS 0
#define VERDICT_DROP TC_ACT_SHOT
#define VERDICT_PASS TC_ACT_UNSPEC

typedef struct __sk_buff hook_context;

static __always_inline __u64 length_of(hook_context *packet)
{
	return packet->len;
}

static __always_inline __u32 segment_size_of(hook_context *packet)
{
	return packet->gso_size;
}

static __always_inline __be16 protocol_of(hook_context *packet)
{
	return packet->protocol;
}

static __always_inline void make_linear(hook_context *packet, __u32 length)
{
	__u32 there = packet->len;

	bpf_skb_pull_data(packet, there < length ? there : length);
}

static __always_inline long load_bytes(hook_context *packet, __u32 offset, void *to, __u64 length)
{
	return bpf_skb_load_bytes(packet, offset, to, length);
}

static __always_inline long store_bytes(hook_context *packet, const void *from, __u32 length)
{
	return bpf_skb_store_bytes(packet, 0, from, length, 0);
}

#endif
#endif
