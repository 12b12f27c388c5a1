// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * Answers the SYNs of a flood with cookies, without waking anybody. The port's owner would give the same
 * answer, byte for byte, and accepts the acknowledgement that returns the cookie.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "cookie.h"
#include "counters.h"
#include "extension.h"
#include "flood.h"
#include "maps.h"
#include "owner.h"
#include "rewrite.h"
#include "send.h"
#include "syn.h"

#define ASSUMED_SIZE_V4 536
#define ASSUMED_SIZE_V6 1220

/* The answer with all possible options. */
struct answer {
	struct tcphdr header;
	__u8 size_option[2];
	__be16 size;
	__u8 stamp_option[4];
	__be32 stamp;
	__be32 echo;
	__u8 scale_option[3];
	__u8 scale;
} __attribute__((packed));

#define ANSWER_PLAIN offsetof(struct answer, stamp_option)
#define ANSWER_STAMPED offsetof(struct answer, scale_option)
#define ANSWER_SCALED sizeof(struct answer)

struct syn_work {
	struct syn syn;
	struct answer answer;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct syn_work);
} syn_work SEC(".maps");

/* The options that the answer agrees to. Without timestamps there is nothing to encode them in. */
static __always_inline __u8 agreed(const struct flood *flood, const struct syn *syn)
{
	const __u8 asks = TCP_ECE | TCP_CWR;
	__u8 terms = 0;

	if (!(flood->flags & FLOOD_TIMESTAMPS) || !syn->has_stamp)
		return 0;
	if (syn->permits_sack)
		terms |= FLOOD_SACK;
	if ((syn->segment.bytes[TCP_FLAGS_AT] & asks) == asks)
		terms |= FLOOD_ECN;
	return FLOOD_TIMESTAMPS | (terms & flood->flags);
}

/* The timestamp clock shown to the peer, which depends on the two hosts but not on ports. */
static __always_inline __u32 clock_for(const struct flood *flood, const struct filter_key *key,
				       __u64 now_ms)
{
	struct filter_key hosts = *key;
	struct flow_words words;

	hosts.local_port = 0;
	hosts.remote_port = 0;
	__builtin_memcpy(&words, &hosts, sizeof(words));
	return (__u32)now_ms + keyed_hash(flood, &words, HASH_TIMESTAMP, 0);
}

/* Writes the options behind the MSS option; returns the length of the segment. */
static __always_inline __u32 put_options(const struct flood *flood, const struct filter_key *key,
					 const struct syn *syn, struct answer *answer, __u8 terms,
					 __u64 now_ms)
{
	__u32 bits = syn->has_scale ? syn->scale : COOKIE_NO_SCALE;

	if (!(terms & FLOOD_TIMESTAMPS))
		return ANSWER_PLAIN;
	if (syn->has_scale && bits > SCALE_MAX)
		bits = SCALE_MAX;
	if (syn->permits_sack)
		bits |= COOKIE_SACK;
	if (terms & FLOOD_ECN)
		bits |= COOKIE_ECN;
	answer->stamp_option[0] = terms & FLOOD_SACK ? OPTION_SACK_PERMITTED : OPTION_NOP;
	answer->stamp_option[1] = terms & FLOOD_SACK ? 2 : OPTION_NOP;
	answer->stamp_option[2] = OPTION_TIMESTAMPS;
	answer->stamp_option[3] = 10;
	answer->stamp = bpf_htonl(cookie_stamp(bits, clock_for(flood, key, now_ms)));
	answer->echo = syn->stamp;
	if (!syn->has_scale || flood->scale == FLOOD_NO_SCALE)
		return ANSWER_STAMPED;
	answer->scale_option[0] = OPTION_NOP;
	answer->scale_option[1] = OPTION_SCALE;
	answer->scale_option[2] = 3;
	answer->scale = flood->scale;
	return ANSWER_SCALED;
}

/* The MSS of this end: that of the path, or less if the owner requests it. */
static __always_inline __u16 own_size(const struct flood *flood, const struct filter_key *key,
				      const struct return_path *path)
{
	const __u32 headers = is_ipv4(&key->local) ? 40 : 60;
	__u32 size = path->mtu > headers ? path->mtu - headers : 0;

	/* As in the TCP engine, which leaves room for headers. */
	if (size > 0xffff)
		size = 0xffff - 120;
	return flood->max_segment && flood->max_segment < size ? flood->max_segment : size;
}

static __always_inline __u32 make_answer(const struct flood *flood, const struct filter_key *key,
					 const struct return_path *path, struct syn_work *work)
{
	const __u16 assumed = is_ipv4(&key->local) ? ASSUMED_SIZE_V4 : ASSUMED_SIZE_V6;
	const __u64 now_ms = bpf_ktime_get_ns() / NANOSECONDS_OF_MILLISECOND;
	const struct syn *syn = &work->syn;
	const __u32 number = bpf_ntohl(syn->segment.header.seq);
	struct answer *answer = &work->answer;
	const __u8 terms = agreed(flood, syn);
	struct flow_words words;
	__u32 length;

	__builtin_memcpy(&words, key, sizeof(words));
	__builtin_memset(answer, 0, sizeof(*answer));
	answer->size_option[0] = OPTION_MSS;
	answer->size_option[1] = 4;
	answer->size = bpf_htons(own_size(flood, key, path));
	length = put_options(flood, key, syn, answer, terms, now_ms);
	answer->header.source = key->local_port;
	answer->header.dest = key->remote_port;
	answer->header.seq =
		bpf_htonl(cookie_number(flood, &words, number, syn->size ?: assumed, now_ms));
	answer->header.ack_seq = bpf_htonl(number + 1);
	answer->header.doff = length / 4;
	((__u8 *)answer)[TCP_FLAGS_AT] = TCP_SYN | TCP_ACK | (terms & FLOOD_ECN ? TCP_ECE : 0);
	answer->header.window = bpf_htons(flood->window);
	return length;
}

static __always_inline void sum_up(const struct filter_key *key, struct syn_work *work,
				   __u32 length)
{
	__u64 sum = sum_of_pseudo_header(key, bpf_htons(length));

	if (work->syn.checksum == CHECKSUM_PSEUDO_HEADER) {
		work->answer.header.check = fold(sum);
		return;
	}
	sum += (__u32)bpf_csum_diff(NULL, 0, (__be32 *)&work->answer, length, 0);
	work->answer.header.check = ~fold(sum);
}

static __always_inline bool write_ip(struct __sk_buff *skb, const struct flood *flood,
				     const struct filter_key *key, __u32 length)
{
	struct ipv6hdr v6 = {
		.version = 6,
		.priority = flood->traffic_class >> 4,
		.flow_lbl = { flood->traffic_class << 4 },
		.payload_len = bpf_htons(length),
		.nexthdr = IPPROTO_TCP,
		.hop_limit = flood->hop_limit,
	};
	struct iphdr v4 = {
		.version = 4,
		.ihl = 5,
		.tos = flood->traffic_class,
		.tot_len = bpf_htons(sizeof(v4) + length),
		.frag_off = flood->flags & FLOOD_DONT_FRAGMENT ? bpf_htons(IPV4_DONT_FRAGMENT) : 0,
		.ttl = flood->hop_limit,
		.protocol = IPPROTO_TCP,
		.saddr = key->local.words[3],
		.daddr = key->remote.words[3],
	};

	if (is_ipv4(&key->local)) {
		v4.check = ~fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)&v4, sizeof(v4), 0));
		return bpf_skb_store_bytes(skb, ETH_HLEN, &v4, sizeof(v4),
					   BPF_F_RECOMPUTE_CSUM) == 0;
	}
	__builtin_memcpy(&v6.saddr, &key->local, sizeof(v6.saddr));
	__builtin_memcpy(&v6.daddr, &key->remote, sizeof(v6.daddr));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &v6, sizeof(v6), BPF_F_RECOMPUTE_CSUM) == 0;
}

static __always_inline bool write_answer(struct __sk_buff *skb, const struct flood *flood,
					 const struct filter_key *key, struct syn_work *work,
					 __u32 offset, __u32 length)
{
	asm volatile("" : "+r"(length));
	if (length == 0 || length > sizeof(work->answer))
		return false;
	sum_up(key, work, length);
	if (skb->len != offset + length && bpf_skb_change_tail(skb, offset + length, 0))
		return false;
	return write_ip(skb, flood, key, length) &&
	       bpf_skb_store_bytes(skb, offset, &work->answer, length, BPF_F_RECOMPUTE_CSUM) == 0;
}

/* Sets the class in which the owner would have sent it. */
static __always_inline void classify_for(struct __sk_buff *skb, const struct flow_row *row)
{
	struct channel *channel = bpf_map_lookup_elem(&channels, &row->channel);
	struct tap *tap = channel ? bpf_map_lookup_elem(&taps, &channel->tap_ifindex) : NULL;

	classify(skb, class_of(row->class, tap ? tap->class : 0));
}

static __always_inline int drop(struct flood *flood)
{
	__sync_fetch_and_add(&flood->dropped, 1);
	count(receive_drop_syn);
	return TC_ACT_SHOT;
}

SEC("tc")
int answer_syn(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct extension_work *work = bpf_map_lookup_elem(&extension_work, &zero);
	struct syn_work *mine = bpf_map_lookup_elem(&syn_work, &zero);
	const struct return_path *path;
	struct flood *flood;
	__u32 offset, length;

	if (!work || !mine || !is_paid(skb, work))
		return TC_ACT_SHOT;
	flood = find_flood(&work->key);
	if (!flood || is_spared(&work->row, &work->key) ||
	    !may_be_sent_to(&work->key, &work->key.remote))
		return give_to_owner(skb, work);
	path = way_back(&work->key, work->interface);
	if (!path || !read_syn(skb, &work->key, flood->least_hops, &mine->syn, &offset))
		return give_to_owner(skb, work);
	if (flood->flags & FLOOD_FULL)
		return drop(flood);
	length = make_answer(flood, &work->key, path, mine);
	/* It may be partly written. */
	if (!write_answer(skb, flood, &work->key, mine, offset, length))
		return drop(flood);
	classify_for(skb, &work->row);
	__sync_fetch_and_add(&flood->answered, 1);
	count(receive_answered_syn);
	return bpf_redirect_neigh(work->interface, NULL, 0, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
