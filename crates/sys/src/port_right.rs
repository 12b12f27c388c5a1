//! Proof for another process of the right to bind a port below the first unprivileged one: a kernel socket bound to
//! that port in the same network namespace. The kernel has made all its checks for the very process that bound it. A
//! process ID would not do: by the time it is checked, it may belong to another program.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use portolan_proto::control::Reuse;
use portolan_types::Protocol;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
    sockopt,
};

use crate::{namespace, socket_filter};

/// What a socket is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundPort {
    pub protocol: Protocol,
    pub local: SocketAddr,
    /// The unspecified IPv6 address does not include those of IPv4.
    pub v6_only: bool,
}

/// Returns a socket that proves the right to bind `wanted`. `ACCES`: there is no such right.
///
/// If the port is taken, returns one of the other protocol. A user who has a port shares it with nobody but himself: the
/// server, whose socket takes it, accepts that as well.
pub fn show(wanted: BoundPort, reuse: Reuse) -> Result<OwnedFd, Errno> {
    match show_by(wanted, reuse) {
        Err(Errno::ADDRINUSE) => {
            let protocol = match wanted.protocol {
                Protocol::Tcp => Protocol::Udp,
                Protocol::Udp => Protocol::Tcp,
            };
            show_by(BoundPort { protocol, ..wanted }, reuse)
        }
        shown => shown,
    }
}

fn show_by(wanted: BoundPort, reuse: Reuse) -> Result<OwnedFd, Errno> {
    let local = wanted.local;
    let family = match local {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let (kind, protocol) = match wanted.protocol {
        Protocol::Tcp => (SocketType::STREAM, ipproto::TCP),
        Protocol::Udp => (SocketType::DGRAM, ipproto::UDP),
    };
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, wanted.v6_only)?;
    }
    if wanted.protocol == Protocol::Tcp {
        // Processes that share the port may show it at the same time.
        sockopt::set_socket_reuseport(&socket, reuse.port)?;
    }
    bind(&socket, &local)?;
    if wanted.protocol == Protocol::Tcp {
        // The address of a stream socket that does not listen may be that of an accepted connection.
        socket_filter::nothing(&socket)?;
        listen(&socket, 0)?;
    }
    Ok(socket)
}

/// Whether it is an internet socket.
pub fn could_be(socket: impl AsFd) -> bool {
    matches!(
        sockopt::socket_domain(&socket),
        Ok(AddressFamily::INET | AddressFamily::INET6)
    )
}

/// The port that `socket` proves the right to bind. May block while another thread sends on the socket from memory that
/// must first be fetched.
pub fn shown_by(socket: impl AsFd) -> Result<Option<BoundPort>, Errno> {
    if !could_be(&socket) || namespace::cookie_of(&socket)? != namespace::own_cookie()? {
        return Ok(None);
    }
    let protocol = match sockopt::socket_protocol(&socket)? {
        Some(ipproto::UDP) => Protocol::Udp,
        Some(ipproto::TCP) if sockopt::socket_acceptconn(&socket)? => Protocol::Tcp,
        _ => return Ok(None),
    };
    let local = SocketAddr::try_from(getsockname(&socket)?)?;
    // The kernel sets the option of sockets at a single address, too.
    let is_any = local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let v6_only = is_any && sockopt::ipv6_v6only(&socket)?;
    Ok(Some(BoundPort {
        protocol,
        local,
        v6_only,
    }))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;
    use crate::testing::{as_nobody, last_close};

    const LOW: u16 = 1021;

    fn at(protocol: Protocol, local: &str, port: u16) -> BoundPort {
        BoundPort {
            protocol,
            local: SocketAddr::new(local.parse().unwrap(), port),
            v6_only: false,
        }
    }

    fn alone(wanted: BoundPort) -> Result<OwnedFd, Errno> {
        show(wanted, Reuse::default())
    }

    #[test]
    fn a_socket_shows_protocol_address_and_port() {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            for local in ["127.0.0.1", "0.0.0.0", "::1", "::"] {
                for v6_only in [false, true] {
                    let wanted = at(protocol, local, LOW);
                    let v6_only = v6_only && local == "::";
                    let wanted = BoundPort { v6_only, ..wanted };
                    let shown = shown_by(alone(wanted).unwrap()).unwrap();
                    assert_eq!(shown, Some(wanted));
                }
            }
        }
    }

    #[test]
    fn one_of_the_other_protocol_is_shown_where_the_port_is_taken() {
        let wanted = at(Protocol::Udp, "127.0.0.1", LOW - 1);
        let _taken = UdpSocket::bind(wanted.local).unwrap();
        let protocol = Protocol::Tcp;
        let shown = shown_by(alone(wanted).unwrap()).unwrap();
        assert_eq!(shown, Some(BoundPort { protocol, ..wanted }));
    }

    #[test]
    fn processes_that_share_a_port_may_show_it_at_the_same_time() {
        let wanted = at(Protocol::Tcp, "127.0.0.1", LOW - 4);
        let reuse = Reuse {
            port: true,
            ..Reuse::default()
        };
        let both = [show(wanted, reuse).unwrap(), show(wanted, reuse).unwrap()];
        for socket in both {
            assert_eq!(shown_by(socket).unwrap(), Some(wanted));
        }
    }

    #[test]
    fn who_may_not_cannot() {
        let refused = as_nobody(|| alone(at(Protocol::Tcp, "127.0.0.1", LOW - 2)));
        assert_eq!(refused.map(|_| ()), Err(Errno::ACCESS));
    }

    #[test]
    fn a_connection_at_a_low_port_shows_nothing() {
        let wanted = at(Protocol::Tcp, "127.0.0.1", LOW - 3);
        let listener = TcpListener::bind(wanted.local).unwrap();
        let client = TcpStream::connect(wanted.local).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(shown_by(&listener).unwrap(), Some(wanted));
        assert_eq!(shown_by(&accepted).unwrap(), None);
        last_close(client);
        let shown = shown_by(&accepted).unwrap();
        assert_eq!(shown, None, "nor when its peer has gone");
    }

    #[test]
    fn what_is_no_socket_shows_nothing() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(shown_by(file).unwrap(), None);
    }
}
