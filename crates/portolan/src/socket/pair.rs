//! The socket pairs of connections that the server does not know: the program's descriptors are copies of the near end, and
//! both ends are kept here. A pair is used again when its connection is closed.

use std::os::fd::OwnedFd;

use portolan_sys::descriptor;
use portolan_sys::unix::{PairKind, socket_pair};
use rustix::io::Errno;

use crate::descriptors::InternalFd;
use crate::socket::Socket;

/// Pairs kept for later use.
const MOST_IDLE: usize = 64;

#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) near: InternalFd,
    pub(crate) far: InternalFd,
    is_nonblocking: bool,
}

impl Pair {
    fn new() -> Result<Pair, Errno> {
        let (near, far) = socket_pair(PairKind::Stream)?;
        Ok(Pair {
            near: InternalFd::new(near),
            far: InternalFd::new(far),
            is_nonblocking: false,
        })
    }

    /// Returns a descriptor for the program, with the lowest free number.
    pub(crate) fn descriptor(&mut self, is_nonblocking: bool) -> Result<OwnedFd, Errno> {
        self.prepare(is_nonblocking)?;
        rustix::io::fcntl_dupfd_cloexec(&self.near, 0)
    }

    pub(crate) fn prepare(&mut self, is_nonblocking: bool) -> Result<(), Errno> {
        if self.is_nonblocking != is_nonblocking {
            descriptor::set_nonblocking(&self.near, is_nonblocking)?;
            self.is_nonblocking = is_nonblocking;
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(crate) struct PairPool(Vec<Pair>);

impl PairPool {
    pub(crate) fn take(&mut self) -> Result<Pair, Errno> {
        self.0.pop().map_or_else(Pair::new, Ok)
    }

    /// Takes back a pair that was not used.
    pub(crate) fn put(&mut self, pair: Pair) {
        if self.0.len() < MOST_IDLE {
            self.0.push(pair);
        }
    }

    /// Takes back the pair of a closed socket, unless something may be left of that: a registration in an epoll set of the
    /// kernel's, or an owner for signals.
    pub(crate) fn put_used(&mut self, mut pair: Pair, closed: &Socket) {
        if !closed.is_with_kernel() && !Socket::has_owner() {
            pair.is_nonblocking = closed.is_nonblocking();
            self.put(pair);
        }
    }
}
