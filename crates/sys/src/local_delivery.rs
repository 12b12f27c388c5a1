//! Delivers datagrams to a UDP socket of this host with their original source addresses: a raw socket
//! writes the headers, and the kernel loops back packets to its own addresses. Nothing is sent before
//! the kernel has confirmed to which socket it would deliver (`sock_diag`).

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use portolan_types::scoped;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, netlink, recv,
    send, socket_with, sockopt,
};

use crate::datagram::{self, Departure};

/// linux/netlink.h, linux/sock_diag.h.
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const SOCK_DIAG_BY_FAMILY: u16 = 20;

const HEADER: usize = 16;

#[derive(Debug)]
pub struct LocalDelivery {
    v4: OwnedFd,
    /// None if the kernel lacks IPv6.
    v6: Option<OwnedFd>,
    lookup: OwnedFd,
}

impl LocalDelivery {
    /// Opens the sockets. Needs `CAP_NET_RAW`.
    pub fn open() -> Result<LocalDelivery, Errno> {
        Ok(LocalDelivery {
            v4: raw(AddressFamily::INET)?,
            v6: raw(AddressFamily::INET6).ok(),
            lookup: open(
                AddressFamily::NETLINK,
                SocketType::DGRAM,
                Some(netlink::SOCK_DIAG),
            )?,
        })
    }

    /// Whether the UDP socket with this cookie receives datagrams that arrive by `interface` with these addresses.
    pub fn reaches(
        &self,
        cookie: u64,
        (from, to): (SocketAddr, SocketAddr),
        interface: u32,
    ) -> Result<bool, Errno> {
        let request = lookup_request(cookie, (from, to), interface);
        send(&self.lookup, &request, SendFlags::empty())?;
        let mut answer = [0; 1024];
        let (_, length) = recv(&self.lookup, &mut answer[..], RecvFlags::empty())?;
        let answer = &answer[..length.min(1024)];
        let kind = answer.get(4..6).and_then(|kind| kind.first_chunk());
        match kind.map(|kind| u16::from_ne_bytes(*kind)) {
            Some(SOCK_DIAG_BY_FAMILY) => Ok(true),
            Some(NLMSG_ERROR) => {
                let code = answer
                    .get(HEADER..HEADER + 4)
                    .and_then(|code| code.first_chunk());
                let code = code.map_or(0, |code| i32::from_ne_bytes(*code));
                match Errno::from_raw_os_error(code.saturating_neg()) {
                    // No socket, or another one.
                    Errno::NOENT | Errno::STALE => Ok(false),
                    errno => Err(errno),
                }
            }
            _ => Err(Errno::PROTO),
        }
    }

    /// Sends an IP packet to a local address as if it had arrived by `interface`; 0 if the device does not
    /// matter.
    pub fn send(&self, packet: &[u8], to: IpAddr, interface: u32) -> Result<(), Errno> {
        let socket = match to {
            IpAddr::V4(_) => Some(&self.v4),
            IpAddr::V6(_) => self.v6.as_ref(),
        };
        let departure = Departure {
            to: Some(scoped(to, 0, interface)),
            interface,
            ..Departure::default()
        };
        let socket = socket.ok_or(Errno::AFNOSUPPORT)?;
        datagram::send(socket, &[IoSlice::new(packet)], &departure).map(drop)
    }
}

fn open(
    family: AddressFamily,
    kind: SocketType,
    protocol: Option<Protocol>,
) -> Result<OwnedFd, Errno> {
    socket_with(family, kind, SocketFlags::CLOEXEC, protocol)
}

/// Opens a raw socket on which the program writes the IP header.
fn raw(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let fd = open(family, SocketType::RAW, Some(ipproto::RAW))?;
    // The socket would also receive packets of that protocol, which nobody reads.
    sockopt::set_socket_recv_buffer_size(&fd, 1)?;
    Ok(fd)
}

/// `struct inet_diag_req_v2` for one UDP socket. For such a look-up the kernel interprets the packet's
/// source as that of the socket (`udp_dump_one`).
fn lookup_request(cookie: u64, (from, to): (SocketAddr, SocketAddr), interface: u32) -> Vec<u8> {
    let family = match to {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let mut body = vec![family as u8, libc::IPPROTO_UDP as u8, 0, 0];
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(from.port().to_be_bytes());
    body.extend(to.port().to_be_bytes());
    for address in [from.ip(), to.ip()] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(v4) => bytes[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => bytes = v6.octets(),
        }
        body.extend(bytes);
    }
    body.extend(interface.to_ne_bytes());
    body.extend((cookie as u32).to_ne_bytes());
    body.extend(((cookie >> 32) as u32).to_ne_bytes());
    let length = (HEADER + body.len()) as u32;
    let mut request = length.to_ne_bytes().to_vec();
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    request
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn cookie(socket: &UdpSocket) -> u64 {
        sockopt::socket_cookie(socket).unwrap()
    }

    #[test]
    fn the_socket_is_named_that_a_datagram_would_reach() {
        let Ok(delivery) = LocalDelivery::open() else {
            eprintln!("not root: nothing is tested");
            return;
        };
        for (address, peer, stranger) in [
            ("127.0.0.1:0", "192.0.2.1:53", "192.0.2.1:54"),
            ("[::1]:0", "[2001:db8::1]:53", "[2001:db8::1]:54"),
        ] {
            let peer: SocketAddr = peer.parse().unwrap();
            let socket = UdpSocket::bind(address).unwrap();
            let other = UdpSocket::bind(address).unwrap();
            let own = socket.local_addr().unwrap();
            let reaches = |cookie| delivery.reaches(cookie, (peer, own), 1);
            assert_eq!(reaches(cookie(&socket)), Ok(true));
            assert_eq!(reaches(cookie(&other)), Ok(false), "it is another's port");
            let sender = socket.try_clone().unwrap();
            sender.connect(other.local_addr().unwrap()).unwrap();
            let stranger = stranger.parse().unwrap();
            let unreached = delivery.reaches(cookie(&socket), (stranger, own), 1);
            assert_eq!(unreached, Ok(false), "it has a peer");
        }
    }

    #[test]
    fn a_datagram_comes_from_where_its_header_says() {
        let Ok(delivery) = LocalDelivery::open() else {
            eprintln!("not root: nothing is tested");
            return;
        };
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let own = socket.local_addr().unwrap();
        // Version and length, time to live 9, UDP; the kernel fills in the checksum of the header.
        let mut packet = vec![0x45, 0, 0, 30, 0, 0, 0x40, 0, 9, 17, 0, 0];
        packet.extend([192, 0, 2, 1, 127, 0, 0, 1]);
        packet.extend(53_u16.to_be_bytes());
        packet.extend(own.port().to_be_bytes());
        // No checksum.
        packet.extend([0, 10, 0, 0, b'h', b'i']);
        delivery.send(&packet, own.ip(), 0).unwrap();
        let mut buffer = [0; 8];
        let (length, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(
            (&buffer[..length], from),
            (&b"hi"[..], "192.0.2.1:53".parse().unwrap())
        );
    }
}
