// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * The packet filter in the driver (MB §4.1, SHM-IPF): the same code at XDP, before the kernel makes a
 * buffer of the frame. It serves the sessions configured for it, and only their simple packets;
 * everything else continues to the packet filter at tc, unchanged.
 */
#define IN_DRIVER

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

#include "context.h"
#include "counters.h"
#include "deliver.h"
#include "kernel_connection.h"
#include "lookup.h"
#include "maps.h"
#include "martian.h"
#include "opening.h"
#include "search.h"
#include "parse.h"
#include "policy.h"
#include "settings.h"

/* Whether the kernel may have merged packets before this hook. */
enum hook {
	HOOK_NATIVE,
	HOOK_GENERIC,
};

static __always_inline int leave(enum counter reason)
{
	count(reason);
	return XDP_PASS;
}

static __always_inline bool is_mac(const __u8 *a, const __u8 *b)
{
	for (int i = 0; i < ETH_ALEN; i++)
		if (a[i] != b[i])
			return false;
	return true;
}

/* Whether the frame is for this device only; the kernel determines that (pkt_type) later. */
static __always_inline bool is_for_station(struct xdp_md *packet)
{
	struct ethhdr *eth = (void *)(unsigned long)packet->data;
	struct interface_table *table;
	__u32 zero = 0;

	table = bpf_map_lookup_elem(&interfaces, &zero);
	if (!table || (void *)(eth + 1) > (void *)(unsigned long)packet->data_end)
		return false;
	for (int i = 0; i < MAX_INTERFACES; i++) {
		const struct interface *entry = &table->entries[i];

		if (entry->ifindex == 0)
			return false;
		if (entry->ifindex == packet->ingress_ifindex)
			return is_mac(entry->mac, eth->h_dest);
	}
	return false;
}

/*
 * Longer than the device's MTU: several merged packets. If the merged packet is shorter than that, it
 * does not matter for TCP; for datagrams see `enum hook`.
 */
static __always_inline bool is_large(struct xdp_md *packet)
{
	__u32 length = bpf_xdp_get_buff_len(packet) - ETH_HLEN;

	return bpf_check_mtu(packet, 0, &length, 0, 0) != 0;
}

static __always_inline bool is_in_one_buffer(struct xdp_md *packet)
{
	return packet->data_end - packet->data == bpf_xdp_get_buff_len(packet);
}

/* A tap does not take frames in several buffers. */
static __always_inline int deliver_or_leave(struct xdp_md *packet, const struct flow_row *row,
					    __u8 protocol, __u16 flags)
{
	struct doorbell *doorbell = doorbell_of(row);

	if (row->flags & ROW_EXTENDED)
		return leave(driver_left_extended);
	if (doorbell && goes_by_tap(row, doorbell) && !is_in_one_buffer(packet))
		return leave(driver_left_piecemeal);
	return deliver(packet, row, protocol, flags, packet->ingress_ifindex);
}

/* The row that claims a packet with ports, if its session is served here. */
static __always_inline struct flow_row *find_served(const struct filter_key *key, __u16 *flags)
{
	struct flow_row *row = find_owner(key);

	if (!row) {
		row = find_binding(key);
		*flags = RECORD_BINDING;
	}
	if (!row || !(row->flags & ROW_IN_DRIVER))
		return NULL;
	return *flags && (!is_local(&key->local) || is_martian(key)) ? NULL : row;
}

static __always_inline int filter(struct xdp_md *packet, const enum hook hook)
{
	struct filter_key key = {};
	struct piece piece = {};
	struct flow_row *row;
	__u16 flags = 0;

	if (!is_for_station(packet))
		return leave(driver_left_not_to_host);
	if (is_large(packet))
		return leave(driver_left_large);
	if (parse_received(packet, &key, &piece) != PARSED_FLOW || piece.is_fragment)
		return leave(driver_left_other);
	row = find_served(&key, &flags);
	if (!row || (flags && key.protocol == IPPROTO_TCP && opening_of(packet) != OPENS &&
		     is_of_kernel_connection(packet, &key)))
		return leave(driver_left_unclaimed);
	if (flags && is_for_policy(row, OPENS))
		return leave(driver_left_policy);
	if (hook == HOOK_GENERIC && key.protocol == IPPROTO_UDP)
		return leave(driver_left_datagram);
	return deliver_or_leave(packet, row, key.protocol, flags);
}

SEC("xdp.frags")
int driver_filter(struct xdp_md *packet)
{
	return filter(packet, HOOK_NATIVE);
}

/*
 * For devices whose drivers have no such hook: the kernel runs it after merging packets. Not for
 * several buffers: for a program that accepts those, Linux 6.18 copies each frame into an skb that
 * has lost the length of its link header, which programs at tc cannot parse.
 */
SEC("xdp")
int generic_filter(struct xdp_md *packet)
{
	return filter(packet, HOOK_GENERIC);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
