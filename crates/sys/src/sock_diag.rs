//! The kernel's own TCP and UDP sockets of this network namespace, as `NETLINK_SOCK_DIAG` reports them to ss(8): with a
//! listener's backlog and the figures of connections, which `/proc/net` does not have.

use std::net::SocketAddr;

pub use netlink_packet_sock_diag::inet::Timer;
use netlink_packet_sock_diag::inet::nlas::Nla;
pub use netlink_packet_sock_diag::inet::nlas::TcpInfo;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use netlink_packet_sock_diag::{AF_INET, AF_INET6, SockDiagMessage};
use portolan_types::Protocol;
use rustix::io::Errno;
use rustix::net::netlink;

use crate::netlink::Requests;

/// A socket of the kernel's.
#[derive(Debug)]
pub struct KernelSocket {
    pub local: SocketAddr,
    /// The peer, or port 0 if there is none.
    pub remote: SocketAddr,
    /// By the numbers of `tcp_states.h`.
    pub state: u8,
    /// Unread bytes; for a TCP listener, the connections that wait to be accepted.
    pub receive_queue: u32,
    /// Bytes in flight and unsent; for a TCP listener, how many connections may wait to be accepted.
    pub send_queue: u32,
    pub uid: u32,
    pub inode: u32,
    pub timer: Option<Timer>,
    /// `None` for UDP, and for connections that have no socket (TIME-WAIT, SYN-RECV).
    pub info: Option<Box<TcpInfo>>,
}

/// Lists the sockets of a protocol, over IPv4 and IPv6. Fails if the kernel has no `sock_diag` for it, or a sandbox
/// refuses netlink.
pub fn sockets(protocol: Protocol) -> Result<Vec<KernelSocket>, Errno> {
    let mut requests = Requests::to(Some(netlink::SOCK_DIAG))?;
    let mut sockets = requests.dump(&request(protocol, AF_INET), parse)?;
    sockets.extend(requests.dump(&request(protocol, AF_INET6), parse)?);
    Ok(sockets)
}

fn request(protocol: Protocol, family: u8) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: protocol.number(),
        extensions: ExtensionFlags::INFO,
        states: StateFlags::all(),
        socket_id: SocketId::new_v6(),
    })
}

fn parse(message: &SockDiagMessage) -> Option<KernelSocket> {
    let SockDiagMessage::InetResponse(response) = message else {
        return None;
    };
    let header = &response.header;
    let id = &header.socket_id;
    Some(KernelSocket {
        local: SocketAddr::new(id.source_address, id.source_port),
        remote: SocketAddr::new(id.destination_address, id.destination_port),
        state: header.state,
        receive_queue: header.recv_queue,
        send_queue: header.send_queue,
        uid: header.uid,
        inode: header.inode,
        timer: header.timer.clone(),
        info: info(response),
    })
}

fn info(response: &InetResponse) -> Option<Box<TcpInfo>> {
    response.nlas.iter().find_map(|attribute| match attribute {
        Nla::TcpInfo(info) => Some(Box::new(info.clone())),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    fn at(protocol: Protocol, local: SocketAddr) -> Vec<KernelSocket> {
        let sockets = sockets(protocol).expect("the kernel has sock_diag");
        let at = sockets.into_iter().filter(|socket| socket.local == local);
        at.collect()
    }

    #[test]
    fn sockets_of_both_families_are_listed() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let udp = UdpSocket::bind(any).unwrap();
            let found = at(Protocol::Udp, udp.local_addr().unwrap());
            assert_eq!(found.len(), 1, "{any}: {found:?}");
            assert!(found[0].info.is_none());
            assert_ne!(found[0].inode, 0);
        }
    }

    #[test]
    fn a_connection_has_figures_and_its_listener_a_queue() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).unwrap();
            let local = listener.local_addr().unwrap();
            let stream = TcpStream::connect(local).unwrap();
            let [own] = &at(Protocol::Tcp, stream.local_addr().unwrap())[..] else {
                panic!("there is one socket");
            };
            let info = own.info.as_ref().expect("a connection has figures");
            assert!(own.remote == local && info.snd_cwnd > 0, "{own:?}");
            let of_port = at(Protocol::Tcp, local);
            let listening = of_port.iter().find(|socket| socket.remote.port() == 0);
            assert_eq!(listening.map(|socket| socket.receive_queue), Some(1));
        }
    }
}
