//! Kernel sockets that hold the ports Portolan hands out, so that neither side can take the other's. A listener's
//! socket listens: connections that only the kernel sees (loopback) arrive there.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_control::{Errno, PortClaim};
use portolan_sys::socket_filter;
use portolan_types::Protocol;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, accept_with, bind, connect, connect_unspec,
    ipproto, listen, shutdown, socket_with, sockopt,
};

/// A kernel socket bound to the endpoint of a claim.
#[derive(Debug)]
pub(crate) struct PortReservation {
    fd: OwnedFd,
    is_v6: bool,
}

/// Whether the program had the endpoint before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taking {
    First,
    /// Under the previous server: kernel connections may still use the port, and so may the program's port token.
    Again,
}

impl Taking {
    pub(crate) fn take(self, claim: &PortClaim, is_v6: bool) -> Result<PortReservation, Errno> {
        let mut claim = *claim;
        claim.reuse.address |= self == Taking::Again && claim.protocol == Protocol::Tcp;
        PortReservation::take(&claim, is_v6)
    }
}

impl PortReservation {
    /// Binds the claim's endpoint, with its reuse options. A socket of `AF_INET6` may have an IPv4 address.
    pub(crate) fn take(claim: &PortClaim, is_v6: bool) -> Result<PortReservation, Errno> {
        let local = match claim.local {
            SocketAddr::V4(v4) if is_v6 => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            local => local,
        };
        let family = match local {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let (kind, protocol) = match claim.protocol {
            Protocol::Tcp => (SocketType::STREAM, ipproto::TCP),
            Protocol::Udp => (SocketType::DGRAM, ipproto::UDP),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(family, kind, flags, Some(protocol)).map_err(errno)?;
        sockopt::set_socket_reuseaddr(&fd, claim.reuse.address).map_err(errno)?;
        sockopt::set_socket_reuseport(&fd, claim.reuse.port).map_err(errno)?;
        if local.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, claim.v6_only).map_err(errno)?;
        }
        bind(&fd, &local).map_err(errno)?;
        Ok(PortReservation {
            fd,
            is_v6: local.is_ipv6(),
        })
    }

    /// Listens, except for connections by these devices until its filter is lifted.
    pub(crate) fn listen_except_by(&self, devices: &[u32], backlog: u32) -> Result<(), Errno> {
        socket_filter::nothing_by(&self.fd, devices).map_err(errno)?;
        self.listen(backlog)
    }

    pub(crate) fn listen(&self, backlog: u32) -> Result<(), Errno> {
        listen(&self.fd, i32::try_from(backlog).unwrap_or(i32::MAX)).map_err(errno)
    }

    /// Returns another socket on the same endpoint, which does not listen. While this one listens, no other can.
    pub(crate) fn token(&self) -> Result<OwnedFd, Errno> {
        // Both must permit sharing, and this one must until it listens.
        sockopt::set_socket_reuseaddr(&self.fd, true).map_err(errno)?;
        let local = rustix::net::getsockname(&self.fd).map_err(errno)?;
        let family = if self.is_v6 {
            AddressFamily::INET6
        } else {
            AddressFamily::INET
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd =
            socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)).map_err(errno)?;
        sockopt::set_socket_reuseaddr(&fd, true).map_err(errno)?;
        let shares = sockopt::socket_reuseport(&self.fd).map_err(errno)?;
        sockopt::set_socket_reuseport(&fd, shares).map_err(errno)?;
        if self.is_v6 {
            let v6_only = sockopt::ipv6_v6only(&self.fd).map_err(errno)?;
            sockopt::set_ipv6_v6only(&fd, v6_only).map_err(errno)?;
        }
        bind(&fd, &local).map_err(errno)?;
        Ok(fd)
    }

    /// Stops listening: the kernel resets connections that were not accepted, and refuses new ones; the port stays
    /// bound, as it was before there was a token.
    pub(crate) fn stop_listening(&self, shares_address: bool) {
        // It was set before.
        let _ = sockopt::set_socket_reuseaddr(&self.fd, shares_address);
        // Fails only for a socket that does not listen, which is the goal.
        let _ = shutdown(&self.fd, Shutdown::Read);
        let _ = socket_filter::lift(&self.fd);
    }

    /// Restricts a datagram socket to this peer, so that the kernel refuses datagrams from others (port unreachable);
    /// without a peer it accepts all again.
    pub(crate) fn set_peer(&self, peer: Option<SocketAddr>) -> Result<(), Errno> {
        let connected = match (peer, self.is_v6) {
            (None, _) => connect_unspec(&self.fd),
            (Some(SocketAddr::V4(v4)), true) => {
                let mapped = v4.ip().to_ipv6_mapped();
                connect(&self.fd, &SocketAddr::new(mapped.into(), v4.port()))
            }
            (Some(peer), _) => connect(&self.fd, &peer),
        };
        connected.map_err(errno)
    }

    /// The same socket under another number.
    pub(crate) fn try_clone(&self) -> std::io::Result<PortReservation> {
        Ok(PortReservation {
            fd: self.fd.try_clone()?,
            is_v6: self.is_v6,
        })
    }

    /// A connection that reached the port through the kernel.
    pub(crate) fn accept(&self) -> Option<(OwnedFd, SocketAddr)> {
        let fd = accept_with(&self.fd, SocketFlags::CLOEXEC).ok()?;
        // It inherits its listener's filter.
        socket_filter::lift(&fd).ok()?;
        let remote = rustix::net::getpeername(&fd).ok().flatten()?;
        Some((fd, remote.try_into().ok()?))
    }

    /// Minimises the receive buffer of a socket that is never read.
    pub(crate) fn shrink(&self) {
        // The kernel raises it to its minimum.
        let _ = sockopt::set_socket_recv_buffer_size(&self.fd, 1);
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.is_v6
    }

    /// Returns the socket itself, for a program whose call falls back to the kernel.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for PortReservation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn errno(errno: rustix::io::Errno) -> Errno {
    Errno(errno.raw_os_error())
}
