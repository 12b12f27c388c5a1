//! The operating system as Portolan needs it: clock, taps, rings, shared memory, UNIX sockets with
//! descriptors, rtnetlink, sysctls, namespaces, waiting. Contains all unsafe blocks for these, and makes
//! no decisions. System calls never pass through a libc function that a preload shim could interpose.

pub mod accounts;
pub mod allocator;
pub mod capability;
pub mod clock;
pub mod datagram;
pub mod descriptor;
pub mod device;
pub mod doorbell;
pub mod leak;
pub mod local_delivery;
pub mod map;
mod mapping;
pub mod memory;
pub mod namespace;
pub mod namespace_lock;
pub mod netfilter;
pub mod netlink;
pub mod owner;
pub mod pi;
pub mod port_right;
pub mod probes;
pub mod process;
mod raw;
pub mod refused_calls;
pub mod ring;
pub mod rx_path;
pub mod sched;
pub mod shm;
pub mod signals;
pub mod sleeps;
pub mod sock_diag;
pub mod socket_filter;
pub mod sysctl;
pub mod tap;
pub mod thread;
pub mod traffic;
pub mod unix;
pub mod wait;
pub mod wake_cost;
pub mod word;

#[cfg(test)]
mod testing;
