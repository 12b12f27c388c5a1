/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * What the header before a frame on a tap (virtio-net) leaves to the kernel or the device: completing a checksum, and
 * segmentation. The kernel takes the checksum's position from the header, and would write two bytes there past the
 * filter, over a port or an address. So it must be the position in the packet's own transport header. A device segments
 * by the kind that the header names, whatever the packet is: it must be the packet's own.
 */
#ifndef OFFLOAD_H
#define OFFLOAD_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "parse.h"

#define CHECKSUM_PARTIAL 3
#define TCP_CHECKSUM_AT 16
#define UDP_CHECKSUM_AT 6

/* The kernel's SKB_GSO_*. */
#define SEGMENTS_TCPV4 (1 << 0)
#define SEGMENTS_TCPV6 (1 << 4)
#define SEGMENTS_UDP_FRAGMENTS (1 << 16)
#define SEGMENTS_UDP (1 << 17)
#define SEGMENTS_ANY (SEGMENTS_TCPV4 | SEGMENTS_TCPV6 | SEGMENTS_UDP_FRAGMENTS | SEGMENTS_UDP)

/* The kernel's types; the layouts come from its BTF. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct skb_shared_info {
	unsigned int gso_type;
};

struct sk_buff {
	unsigned char *head;
	unsigned int end;
	__u8 ip_summed : 2;
	__u16 csum_start;
	__u16 csum_offset;
	__u16 mac_header;
};

#pragma clang attribute pop

/* Linux 6.2. */
extern void *bpf_cast_to_kern_ctx(void *context) __ksym __weak;

/* A checksum that is still to be completed. */
struct offload {
	bool is_partial;
	/* Offset from the first byte of the frame. */
	__u16 start;
	__u16 offset;
};

static __always_inline struct offload offload_of(struct __sk_buff *skb)
{
	struct offload offload = {};

	if (&bpf_cast_to_kern_ctx) {
		struct sk_buff *kernels = bpf_cast_to_kern_ctx(skb);

		offload.is_partial = BPF_CORE_READ_BITFIELD(kernels, ip_summed) == CHECKSUM_PARTIAL;
		offload.start = kernels->csum_start - kernels->mac_header;
		offload.offset = kernels->csum_offset;
	} else {
		/* A program's context pointer is the address of the kernel's skb. */
		struct sk_buff *kernels = (void *)skb;
		__u8 is_partial = BPF_CORE_READ_BITFIELD_PROBED(kernels, ip_summed);

		offload.is_partial = is_partial == CHECKSUM_PARTIAL;
		offload.start = BPF_CORE_READ(kernels, csum_start) -
				BPF_CORE_READ(kernels, mac_header);
		offload.offset = BPF_CORE_READ(kernels, csum_offset);
	}
	return offload;
}

static __always_inline __u32 kind_of_segments(struct __sk_buff *skb)
{
	/* A program's context pointer is the address of the kernel's skb. */
	struct sk_buff *kernels = (void *)skb;
	struct skb_shared_info *shared;

	if (&bpf_cast_to_kern_ctx) {
		kernels = bpf_cast_to_kern_ctx(skb);
		shared = (void *)(kernels->head + kernels->end);
	} else {
		shared = (void *)(BPF_CORE_READ(kernels, head) + BPF_CORE_READ(kernels, end));
	}
	return BPF_CORE_READ(shared, gso_type) & SEGMENTS_ANY;
}

/* Whether the packet's segmentation, if any, is of the packet's own kind. */
static __always_inline bool has_own_segments(struct __sk_buff *skb, __u8 protocol)
{
	__u32 kind;

	if (!skb->gso_size)
		return true;
	kind = kind_of_segments(skb);
	/* No frame of a tap has a size without a kind; with BPF_PROG_TEST_RUN only a size can be set. */
	if (!kind)
		return true;
	if (protocol == IPPROTO_UDP)
		return kind == SEGMENTS_UDP || kind == SEGMENTS_UDP_FRAGMENTS;
	return kind == (skb->protocol == bpf_htons(ETH_P_IPV6) ? SEGMENTS_TCPV6 : SEGMENTS_TCPV4);
}

/* Whether the kernel will write nothing into the packet but the checksum of the transport header at `start`. */
static __always_inline bool has_own_checksum(struct __sk_buff *skb, __u8 protocol, __u32 start)
{
	struct offload offload = offload_of(skb);
	__u16 own = protocol == IPPROTO_TCP ? TCP_CHECKSUM_AT : UDP_CHECKSUM_AT;

	return !offload.is_partial || (offload.start == start && offload.offset == own);
}

/* Whether there is nothing to complete or segment, which the kernel cannot do for an unknown protocol. */
static __always_inline bool is_complete(struct __sk_buff *skb)
{
	return !skb->gso_size && !offload_of(skb).is_partial;
}

#endif
