/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * TCP connections of the kernel's stack on a port that is a session's now: the kernel accepted them while
 * there was no server, or before the program ran on Portolan. Their segments match the listener's binding,
 * and no flow.
 */
#ifndef KERNEL_CONNECTION_H
#define KERNEL_CONNECTION_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "context.h"
#include "lookup.h"

static __always_inline struct bpf_sock *find_kernel_socket(hook_context *packet,
							   const struct filter_key *key)
{
	struct bpf_sock_tuple tuple = {};

	if (is_ipv4(&key->local)) {
		tuple.ipv4.saddr = key->remote.words[3];
		tuple.ipv4.daddr = key->local.words[3];
		tuple.ipv4.sport = key->remote_port;
		tuple.ipv4.dport = key->local_port;
		return bpf_skc_lookup_tcp(packet, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS,
					  0);
	}
	__builtin_memcpy(tuple.ipv6.saddr, key->remote.words, sizeof(tuple.ipv6.saddr));
	__builtin_memcpy(tuple.ipv6.daddr, key->local.words, sizeof(tuple.ipv6.daddr));
	tuple.ipv6.sport = key->remote_port;
	tuple.ipv6.dport = key->local_port;
	return bpf_skc_lookup_tcp(packet, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
}

/*
 * Of a TCP segment that only a binding claims and that does not open a connection: the listener gets those that do. So it may
 * have a connection between the endpoints of one that the kernel has in TIME-WAIT; late segments of that one are reset.
 */
static __always_inline bool is_of_kernel_connection(hook_context *packet,
						    const struct filter_key *key)
{
	struct bpf_sock *socket;
	bool is_connection;

	socket = find_kernel_socket(packet, key);
	if (!socket)
		return false;
	is_connection = socket->state != BPF_TCP_LISTEN && socket->state != BPF_TCP_TIME_WAIT;
	bpf_sk_release(socket);
	return is_connection;
}

#endif
