//! Proof for another process of the right to bind a port below the first unprivileged one: a kernel socket bound to
//! that port in the same network namespace. The kernel has made all its checks for the very process that bound it. A
//! process ID would not do: by the time it is checked, it may belong to another program.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, bind, getsockname, ipproto, listen,
    socket_with, sockopt,
};

use crate::{descriptor, socket_filter};

/// Returns a socket that proves the right to bind `local`'s port. `ACCES`: there is no such right.
///
/// Tries a datagram socket first. If that port is taken, returns a listening stream socket that drops everything it
/// receives: the address of a stream socket that does not listen may be that of an accepted connection.
pub fn show(local: SocketAddr) -> Result<OwnedFd, Errno> {
    match show_by(local, SocketType::DGRAM, ipproto::UDP) {
        Err(Errno::ADDRINUSE) => {
            let socket = show_by(local, SocketType::STREAM, ipproto::TCP)?;
            socket_filter::nothing(&socket)?;
            listen(&socket, 0)?;
            Ok(socket)
        }
        shown => shown,
    }
}

fn show_by(local: SocketAddr, kind: SocketType, protocol: Protocol) -> Result<OwnedFd, Errno> {
    let family = match local {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &local)?;
    Ok(socket)
}

/// Whether the right to bind `shown` covers `local`: the same port, at this or the unspecified address.
pub fn covers(shown: SocketAddr, local: SocketAddr) -> bool {
    let ip = shown.ip().to_canonical();
    shown.port() == local.port() && (ip.is_unspecified() || ip == local.ip().to_canonical())
}

/// Whether it is an internet socket.
pub fn could_be(socket: impl AsFd) -> bool {
    matches!(
        sockopt::socket_domain(&socket),
        Ok(AddressFamily::INET | AddressFamily::INET6)
    )
}

/// The address that `socket` proves the right to bind. May block while another thread sends on the socket from
/// memory that must first be fetched.
pub fn shown_address(socket: impl AsFd) -> Result<Option<SocketAddr>, Errno> {
    if !could_be(&socket) || network_of(&socket)? != own_network()? {
        return Ok(None);
    }
    let is_bound = match sockopt::socket_protocol(&socket)? {
        Some(ipproto::UDP) => true,
        Some(ipproto::TCP) => sockopt::socket_acceptconn(&socket)?,
        _ => false,
    };
    if !is_bound {
        return Ok(None);
    }
    Ok(Some(SocketAddr::try_from(getsockname(&socket)?)?))
}

/// The cookie of a socket's network namespace (`SO_NETNS_COOKIE`).
fn network_of(socket: impl AsFd) -> Result<u64, Errno> {
    let mut cookie = [0; size_of::<u64>()];
    descriptor::socket_option(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

fn own_network() -> Result<u64, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
    network_of(socket?)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;
    use crate::testing::as_nobody;

    const LOW: u16 = 1021;

    fn is_shown(socket: impl AsFd, local: SocketAddr) -> bool {
        let shown = shown_address(socket).ok().flatten();
        shown.is_some_and(|shown| covers(shown, local))
    }

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn who_may_bind_a_low_port_shows_it() {
        assert!(is_shown(show(at(LOW)).unwrap(), at(LOW)));
        let taken = UdpSocket::bind(at(LOW - 1)).unwrap();
        assert!(
            is_shown(show(at(LOW - 1)).unwrap(), at(LOW - 1)),
            "by a listener"
        );
        assert!(!is_shown(&taken, at(LOW)));
    }

    #[test]
    fn an_address_is_no_right_to_others() {
        let socket = show(at(LOW - 4)).unwrap();
        assert!(is_shown(&socket, at(LOW - 4)));
        for other in ["0.0.0.0", "127.0.0.2", "::"] {
            let other = SocketAddr::new(other.parse().unwrap(), LOW - 4);
            assert!(!is_shown(&socket, other), "{other}");
        }
        let any = show(SocketAddr::from(([0, 0, 0, 0], LOW - 5))).unwrap();
        assert!(is_shown(any, at(LOW - 5)));
    }

    #[test]
    fn who_may_not_cannot() {
        let refused = as_nobody(|| show(at(LOW - 2)));
        assert_eq!(refused.map(|_| ()), Err(Errno::ACCESS));
    }

    #[test]
    fn a_connection_at_a_low_port_shows_nothing() {
        let listener = TcpListener::bind(at(LOW - 3)).unwrap();
        let client = TcpStream::connect(at(LOW - 3)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert!(is_shown(&listener, at(LOW - 3)));
        assert!(!is_shown(&accepted, at(LOW - 3)));
        drop(client);
        assert!(
            !is_shown(&accepted, at(LOW - 3)),
            "nor when its peer has gone"
        );
    }

    #[test]
    fn what_is_no_socket_shows_nothing() {
        assert!(!is_shown(std::fs::File::open("/dev/null").unwrap(), at(0)));
    }
}
