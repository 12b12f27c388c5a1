//! Bits of events, the same in poll(2) and epoll(7).

pub(crate) const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
pub(crate) const OUT: u32 = libc::EPOLLOUT as u32 | libc::EPOLLWRNORM as u32;
pub(crate) const ERR: u32 = libc::EPOLLERR as u32;
pub(crate) const HUP: u32 = libc::EPOLLHUP as u32;
pub(crate) const PRI: u32 = libc::EPOLLPRI as u32;
pub(crate) const RDHUP: u32 = libc::EPOLLRDHUP as u32;
