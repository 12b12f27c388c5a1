// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT
/*
 * Which processes have a descriptor, what is at its other end, and what runs there. The server runs this on demand, by
 * BPF_PROG_TEST_RUN. It counts the references to one open file, and how many are descriptors of named processes: the
 * difference is in other processes, or in messages. It also tells whether two descriptors are the ends of one pair, and
 * whether the process behind a connection runs a file. It changes nothing.
 */
#include <linux/bpf.h>
#include <linux/stat.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "portolan.h"

#define PIDTYPE_TGID 1
#define AF_UNIX 1

/* Numbers of one process that are looked at: a millisecond's worth. */
#define TABLE_MAX 65536

/* The kernel's own, as far as they are looked at; their layouts come from its BTF. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	long counter;
} atomic_long;

/* Up to Linux 6.12. */
struct file___counted {
	atomic_long f_count;
};

typedef struct {
	atomic_long refcnt;
} file_ref;

/* Holds one less than the number of references. */
struct file___referenced {
	file_ref f_ref;
};

struct inode {
	unsigned short i_mode;
};

struct file {
	struct inode *f_inode;
	void *private_data;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

struct hlist_node {
	struct hlist_node *next;
};

struct hlist_head {
	struct hlist_node *first;
};

struct pid {
	struct hlist_head tasks[4];
};

struct mm_struct {
	struct file *exe_file;
};

struct task_struct {
	struct files_struct *files;
	struct mm_struct *mm;
	struct hlist_node pid_links[4];
};

struct sock_common {
	unsigned short skc_family;
};

struct sock {
	struct sock_common __sk_common;
	struct pid *sk_peer_pid;
};

struct socket {
	struct sock *sk;
};

struct unix_sock {
	struct sock *peer;
};

#pragma clang attribute pop

struct search {
	struct file *wanted;
	struct file **table;
	__u32 found;
};

static __always_inline struct file *own_file(__u32 descriptor)
{
	struct task_struct *self = (struct task_struct *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(self, files, fdt);
	struct file *file = NULL;

	if (descriptor < BPF_CORE_READ(table, max_fds))
		bpf_probe_read_kernel(&file, sizeof(file), BPF_CORE_READ(table, fd) + descriptor);
	return file;
}

static __always_inline __u32 references_of(struct file *file)
{
	if (bpf_core_field_exists(struct file___referenced, f_ref))
		return BPF_CORE_READ((struct file___referenced *)file, f_ref.refcnt.counter) + 1;
	return BPF_CORE_READ((struct file___counted *)file, f_count.counter);
}

/* The process that connected, or made the pair: the one reported by SO_PEERCRED. */
static __always_inline struct task_struct *peer_of(struct file *connection)
{
	struct socket *socket = BPF_CORE_READ(connection, private_data);
	struct hlist_node *link =
		BPF_CORE_READ(socket, sk, sk_peer_pid, tasks[PIDTYPE_TGID].first);

	if (!link)
		return NULL;
	return (void *)link -
	       bpf_core_field_offset(struct task_struct, pid_links[PIDTYPE_TGID]);
}

static long compare(__u32 descriptor, struct search *search)
{
	struct file *file = NULL;

	bpf_probe_read_kernel(&file, sizeof(file), search->table + descriptor);
	search->found += file == search->wanted;
	return 0;
}

/* Number of descriptors, of the process at the other end of a connection, that refer to the file. */
static __noinline __u32 descriptors_behind(__u32 connection, struct file *wanted)
{
	struct task_struct *task = peer_of(own_file(connection));
	struct search search = { .wanted = wanted };
	struct fdtable *table;

	if (!task)
		return 0;
	table = BPF_CORE_READ(task, files, fdt);
	/* Who makes his table so long has the rest of it for nobody to look at: the descriptor counts as somebody else's. */
	if (BPF_CORE_READ(table, max_fds) > TABLE_MAX)
		return 0;
	search.table = BPF_CORE_READ(table, fd);
	bpf_loop(BPF_CORE_READ(table, max_fds), compare, &search, 0);
	return search.found;
}

SEC("syscall")
int count_fd_refs(struct holders *request)
{
	struct file *wanted = own_file(request->descriptor);

	request->references = 0;
	request->descriptors = 0;
	if (!wanted)
		return 0;
	request->references = references_of(wanted);
	/* The verifier requires constant offsets into the request. */
#pragma unroll
	for (__u32 i = 0; i < HOLDERS_MAX; i++) {
		if (i < request->count)
			request->descriptors += descriptors_behind(request->connections[i], wanted);
	}
	return 0;
}

/* The UNIX socket of a descriptor; NULL if it is anything else. */
static __always_inline struct sock *unix_socket_at(__u32 descriptor)
{
	struct file *file = own_file(descriptor);
	struct socket *socket;
	struct sock *sock;

	if ((BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) != S_IFSOCK)
		return NULL;
	socket = BPF_CORE_READ(file, private_data);
	sock = BPF_CORE_READ(socket, sk);
	return BPF_CORE_READ(sock, __sk_common.skc_family) == AF_UNIX ? sock : NULL;
}

SEC("syscall")
int are_pair(struct pair_ends *request)
{
	struct sock *far = unix_socket_at(request->far);
	struct sock *near = unix_socket_at(request->near);

	request->are_pair = far && near &&
			    BPF_CORE_READ((struct unix_sock *)far, peer) == near &&
			    BPF_CORE_READ((struct unix_sock *)near, peer) == far;
	return 0;
}

/* Process IDs and file names may have been reused: the inodes are compared. */
SEC("syscall")
int runs_file(struct running_file *request)
{
	struct task_struct *task = peer_of(own_file(request->connection));
	struct file *named = own_file(request->file);
	struct inode *inode = NULL;

	if (task && named)
		inode = BPF_CORE_READ(task, mm, exe_file, f_inode);
	request->is_running = inode && inode == BPF_CORE_READ(named, f_inode);
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
