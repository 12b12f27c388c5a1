//! Kernel sockets that hold the ports Portolan hands out, so that neither side can take the
//! other's. A listener's one listens: connections that only the kernel sees (loopback) arrive
//! there.

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
pub struct PortReservation {
    fd: OwnedFd,
    is_v6: bool,
}

/// Whether the endpoint was the program's before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    First,
    /// Under the server before this one: connections of the kernel's may still be on the port, and the program's token.
    Again,
}

impl Taking {
    pub fn take(self, claim: &PortClaim, is_v6: bool) -> Result<PortReservation, Errno> {
        let mut claim = *claim;
        claim.reuse.address |= self == Taking::Again && claim.protocol == Protocol::Tcp;
        PortReservation::take(&claim, is_v6)
    }
}

impl PortReservation {
    /// Binds the claim's endpoint, with its reuse options. A socket of `AF_INET6` may have an address of
    /// IPv4.
    pub fn take(claim: &PortClaim, is_v6: bool) -> Result<PortReservation, Errno> {
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

    /// Listens, but not for connections by these devices until its filter is lifted.
    pub fn listen_except_by(&self, devices: &[u32], backlog: u32) -> Result<(), Errno> {
        socket_filter::nothing_by(&self.fd, devices).map_err(errno)?;
        self.listen(backlog)
    }

    pub fn listen(&self, backlog: u32) -> Result<(), Errno> {
        listen(&self.fd, i32::try_from(backlog).unwrap_or(i32::MAX)).map_err(errno)
    }

    /// Another socket on the same endpoint, which does not listen. While this one does nobody else can.
    pub fn token(&self) -> Result<OwnedFd, Errno> {
        // Both must agree to share it, and this one must until it listens.
        sockopt::set_socket_reuseaddr(&self.fd, true).map_err(errno)?;
        let local = rustix::net::getsockname(&self.fd).map_err(errno)?;
        let family = match self.is_v6 {
            true => AddressFamily::INET6,
            false => AddressFamily::INET,
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

    /// The kernel resets what it has not handed out, and refuses what comes; the port stays, as it was before there was a
    /// token.
    pub fn stop_listening(&self, shares_address: bool) {
        // It was set before.
        let _ = sockopt::set_socket_reuseaddr(&self.fd, shares_address);
        // Only a socket that does not listen is refused, which is what is wanted.
        let _ = shutdown(&self.fd, Shutdown::Read);
        let _ = socket_filter::lift(&self.fd);
    }

    /// From now on a datagram socket takes what comes from that peer only, and the kernel refuses
    /// what others send there (port unreachable); without a peer it takes all again.
    pub fn set_peer(&self, peer: Option<SocketAddr>) -> Result<(), Errno> {
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
    pub fn try_clone(&self) -> std::io::Result<PortReservation> {
        Ok(PortReservation {
            fd: self.fd.try_clone()?,
            is_v6: self.is_v6,
        })
    }

    /// A connection that reached the port through the kernel.
    pub fn accept(&self) -> Option<(OwnedFd, SocketAddr)> {
        let fd = accept_with(&self.fd, SocketFlags::CLOEXEC).ok()?;
        // It has its listener's filter.
        socket_filter::lift(&fd).ok()?;
        let remote = rustix::net::getpeername(&fd).ok().flatten()?;
        Some((fd, remote.try_into().ok()?))
    }

    /// Nobody reads from it: what the kernel delivers there takes as little memory as can be.
    pub fn shrink(&self) {
        // The kernel raises it to the least that it allows.
        let _ = sockopt::set_socket_recv_buffer_size(&self.fd, 1);
    }

    pub fn is_v6(&self) -> bool {
        self.is_v6
    }

    /// The socket itself, for a program whose call is the kernel's after all.
    pub fn into_fd(self) -> OwnedFd {
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
