//! Programs of control groups that decide on sockets (`IPAddressDeny=` and `SocketBindDeny=` of systemd, and those of
//! container networks).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::null_mut;

use libbpf_rs::libbpf_sys::{self, bpf_attach_type};
use rustix::io::Errno;

/// Those that may refuse a socket, or change where it leads.
const DECIDING: [bpf_attach_type; 13] = [
    libbpf_sys::BPF_CGROUP_INET_INGRESS,
    libbpf_sys::BPF_CGROUP_INET_EGRESS,
    libbpf_sys::BPF_CGROUP_INET_SOCK_CREATE,
    libbpf_sys::BPF_CGROUP_INET4_BIND,
    libbpf_sys::BPF_CGROUP_INET6_BIND,
    libbpf_sys::BPF_CGROUP_INET4_POST_BIND,
    libbpf_sys::BPF_CGROUP_INET6_POST_BIND,
    libbpf_sys::BPF_CGROUP_INET4_CONNECT,
    libbpf_sys::BPF_CGROUP_INET6_CONNECT,
    libbpf_sys::BPF_CGROUP_UDP4_SENDMSG,
    libbpf_sys::BPF_CGROUP_UDP6_SENDMSG,
    libbpf_sys::BPF_CGROUP_UDP4_RECVMSG,
    libbpf_sys::BPF_CGROUP_UDP6_RECVMSG,
];

/// Whether a program decides on sockets of processes in the control group, its own or that of one above it. Waits for
/// the kernel's lock of control groups.
pub fn has_deciding_programs(cgroup: impl AsFd) -> io::Result<bool> {
    for kind in DECIDING {
        if count(&cgroup, kind)? > 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn count(cgroup: impl AsFd, kind: bpf_attach_type) -> io::Result<u32> {
    let mut count = 0;
    let descriptor = cgroup.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and `count` is the only memory written: without an array the kernel only counts.
    let result = unsafe {
        libbpf_sys::bpf_prog_query(
            descriptor,
            kind,
            libbpf_sys::BPF_F_QUERY_EFFECTIVE,
            null_mut(),
            null_mut(),
            &raw mut count,
        )
    };
    if result >= 0 {
        return Ok(count);
    }
    match Errno::from_raw_os_error(-result) {
        // A kernel without this kind.
        Errno::INVAL => Ok(0),
        errno => Err(errno.into()),
    }
}
