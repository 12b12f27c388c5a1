//! Unread datagrams of a UDP socket that falls back to the kernel: they are put into the kernel
//! socket, with their source addresses, so that holders of the descriptor read them there.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use portolan_control::{Errno, SessionPhase};
use portolan_proto::control::Blob;
use portolan_proto::datagram::UnreadDatagram;
use portolan_proto::decode;
use portolan_sys::datagram::ReceivedDatagram;
use portolan_sys::local_delivery::LocalDelivery;
use portolan_sys::{shm, unix};
use portolan_types::{ChannelId, Protocol, SessionId};
use portolan_wire::ethernet;
use rustix::net::sockopt;
use tracing::debug;

use crate::requests::Answer;
use crate::reservation::PortReservation;
use crate::server::Server;
use crate::udp::datagrams::datagram_frame;
use crate::udp::set_peer;

/// Maximum number of datagrams per socket, more than a receive buffer of the default size holds.
const UNREAD_MAX: usize = 1024;

/// Upper bound of what the kernel counts for a datagram besides its payload.
const OVERHEAD: usize = 1024;

/// Reads the list that came with a request.
pub(crate) fn open_unread(
    unread: Blob,
    memory: Option<OwnedFd>,
) -> Result<Vec<UnreadDatagram>, Errno> {
    let bytes = shm::unpack(unread, memory).map_err(|_| Errno::INVAL)?;
    decode(&bytes).map_err(|_| Errno::INVAL)
}

impl Server {
    /// `Unread`: datagrams that reached a library after its session was left to the kernel.
    pub(crate) fn take_unread(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        unread: Blob,
        memory: Option<OwnedFd>,
    ) {
        let is_left = self.control.registry.session(id).is_some_and(|session| {
            session.protocol == Protocol::Udp
                && session.phase() == SessionPhase::Relayed
                && session.is_user(channel)
        });
        match open_unread(unread, memory) {
            Ok(unread) if is_left => self.hand_over_unread(id, unread),
            _ => self.control.counters.dropped += 1,
        }
    }

    fn hand_over_unread(&mut self, id: SessionId, unread: Vec<UnreadDatagram>) {
        let deliveries = self.deliveries(id, unread);
        let handed_over = self.call_on_port(id, move |port| {
            let handed_over = deliveries.hand_over(port);
            Box::new(move |server| {
                server.count_handed_over(handed_over);
                Ok(Answer::Silence)
            })
        });
        if let Ok(Answer::Call(call)) = handed_over {
            self.calls.begin(None, call);
        }
    }

    pub(crate) fn count_handed_over(&mut self, HandedOver { count, lost }: HandedOver) {
        self.control.counters.unread_handed_over += count;
        self.control.counters.unread_lost += lost;
    }

    /// What it takes to put datagrams into the kernel socket of a session that has been left to the kernel.
    pub(crate) fn deliveries(&self, id: SessionId, mut unread: Vec<UnreadDatagram>) -> Deliveries {
        let total = unread.len();
        unread.truncate(UNREAD_MAX);
        let session = self.control.registry.session(id);
        let local = session.map(|session| session.local);
        let deliveries = local.map_or(Vec::new(), |local| {
            let of_one = |datagram: &UnreadDatagram| self.delivery(local, datagram);
            unread.iter().filter_map(of_one).collect()
        });
        Deliveries {
            deliveries,
            total,
            remote: session.and_then(|session| session.remote),
            shares: session.is_some_and(|session| session.reuse.port),
        }
    }

    fn delivery(&self, local: SocketAddr, datagram: &UnreadDatagram) -> Option<Delivery> {
        let to = self.address_for(local.ip(), datagram)?;
        let interface = match self.routes.interface_with(to) {
            Some(interface) if interface == datagram.interface => interface,
            _ => 0,
        };
        let arrival = ReceivedDatagram {
            length: datagram.payload.len(),
            from: datagram.from,
            to,
            interface,
            hops: datagram.hops,
            service: datagram.traffic_class,
        };
        Some(Delivery {
            frame: datagram_frame(local.port(), &arrival, &datagram.payload)?,
            from: datagram.from,
            to: SocketAddr::new(to, local.port()),
            interface,
        })
    }

    /// Returns the local address to deliver to; a datagram to a group is delivered to one socket only.
    fn address_for(&self, local: IpAddr, datagram: &UnreadDatagram) -> Option<IpAddr> {
        let from = datagram.from.ip();
        if from.is_multicast() || from.is_unspecified() {
            return None;
        }
        if self.routes.is_local(datagram.to) {
            return Some(datagram.to);
        }
        if !local.is_unspecified() {
            return Some(local).filter(|&local| self.routes.is_local(local));
        }
        let path = self.routes.path_on(datagram.interface, from);
        path.and_then(|path| path.source)
            .filter(|&own| self.routes.is_local(own))
    }
}

/// Datagrams for a kernel socket.
pub(crate) struct Deliveries {
    deliveries: Vec<Delivery>,
    /// With those for which there is no way.
    total: usize,
    /// The peer that the socket has otherwise.
    remote: Option<SocketAddr>,
    /// Others may have sockets on the same port.
    shares: bool,
}

/// What has become of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandedOver {
    count: u64,
    lost: u64,
}

/// A datagram as the kernel is to deliver it.
struct Delivery {
    frame: Vec<u8>,
    from: SocketAddr,
    to: SocketAddr,
    interface: u32,
}

impl Deliveries {
    pub(crate) fn hand_over(&self, port: &PortReservation) -> HandedOver {
        let count = match self.try_to_hand_over(port) {
            Ok(count) => count,
            Err(errno) => {
                debug!(%errno, "what a socket had not read is lost");
                0
            }
        };
        HandedOver {
            count: count as u64,
            lost: (self.total - count) as u64,
        }
    }

    /// Answers how many there is room for.
    fn try_to_hand_over(&self, port: &PortReservation) -> Result<usize, rustix::io::Errno> {
        if self.deliveries.is_empty() {
            return Ok(0);
        }
        let delivery = LocalDelivery::open()?;
        let cookie = unix::cookie(port)?;
        let room = sockopt::socket_recv_buffer_size(port)?;
        let bytes = self.deliveries.iter().map(|it| it.frame.len() + OVERHEAD);
        let needed: usize = bytes.sum();
        sockopt::set_socket_recv_buffer_size_force(port, room.saturating_add(needed))?;
        // With a peer it would not take what others had sent before.
        set_peer(port, None);
        let delivered = self
            .deliveries
            .iter()
            .filter(|it| it.deliver(&delivery, port, cookie, self.shares));
        let count = delivered.count();
        if self.remote.is_some() {
            set_peer(port, self.remote);
        }
        // The kernel doubles what it is told.
        sockopt::set_socket_recv_buffer_size_force(port, room / 2)?;
        Ok(count)
    }
}

impl Delivery {
    /// True if it is in the kernel socket now. It goes nowhere else: a program could have any
    /// datagram delivered to a socket of somebody else who shares the port.
    fn deliver(
        &self,
        delivery: &LocalDelivery,
        port: &PortReservation,
        cookie: u64,
        shares: bool,
    ) -> bool {
        let reaches = || delivery.reaches(cookie, (self.from, self.to), self.interface) == Ok(true);
        let send = || {
            let packet = &self.frame[ethernet::HEADER_LEN..];
            delivery.send(packet, self.to.ip(), self.interface).is_ok()
        };
        if reaches() {
            return send();
        }
        if !shares {
            return false;
        }
        // Of several that share the port the one with that peer gets it.
        set_peer(port, Some(self.from));
        let is_sent = reaches() && send();
        set_peer(port, None);
        is_sent
    }
}
