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

use crate::handles::HeldPort;
use crate::server::Server;
use crate::udp::datagrams::datagram_frame;

/// Maximum number of datagrams per socket, more than a receive buffer of the default size holds.
const UNREAD_MAX: usize = 1024;

/// Upper bound of what the kernel counts for a datagram besides its payload.
const OVERHEAD: usize = 1024;

/// Reads the list that came with a request.
pub fn open_unread(unread: Blob, memory: Option<OwnedFd>) -> Result<Vec<UnreadDatagram>, Errno> {
    let bytes = shm::unpack(unread, memory).map_err(|_| Errno::INVAL)?;
    decode(&bytes).map_err(|_| Errno::INVAL)
}

impl Server {
    /// `Unread`: datagrams that reached a library after its session was left to the kernel.
    pub fn take_unread(
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

    /// Puts datagrams into the kernel socket of a session that was left to the kernel.
    pub fn hand_over_unread(&mut self, id: SessionId, mut unread: Vec<UnreadDatagram>) {
        if unread.is_empty() {
            return;
        }
        let total = unread.len();
        unread.truncate(UNREAD_MAX);
        let handed_over = match self.try_to_hand_over(id, &unread) {
            Ok(count) => count,
            Err(errno) => {
                debug!(session = id.0, %errno, "what a socket had not read is lost");
                0
            }
        };
        self.control.counters.unread_handed_over += handed_over as u64;
        self.control.counters.unread_lost += (total - handed_over) as u64;
    }

    /// Returns how many were delivered.
    fn try_to_hand_over(
        &self,
        id: SessionId,
        unread: &[UnreadDatagram],
    ) -> Result<usize, rustix::io::Errno> {
        let (Some(HeldPort { socket, .. }), Some(session)) =
            (self.handles.port(id), self.control.registry.session(id))
        else {
            return Ok(0);
        };
        let delivery = LocalDelivery::open()?;
        let cookie = unix::cookie(socket)?;
        let room = sockopt::socket_recv_buffer_size(socket)?;
        let needed: usize = unread.iter().map(|d| d.payload.len() + OVERHEAD).sum();
        sockopt::set_socket_recv_buffer_size_force(socket, room.saturating_add(needed))?;
        // With a peer it would refuse datagrams from others.
        self.tell_kernel_of_peer(id, None);
        let (local, shares) = (session.local, session.reuse.port);
        let handed_over = unread
            .iter()
            .filter(|datagram| {
                self.deliver_unread(&delivery, (id, cookie), local, shares, datagram)
            })
            .count();
        if session.remote.is_some() {
            self.tell_kernel_of_peer(id, session.remote);
        }
        // The kernel doubles the value.
        sockopt::set_socket_recv_buffer_size_force(socket, room / 2)?;
        Ok(handed_over)
    }

    /// Returns true if the datagram is in the kernel socket now. It must not reach another: a program
    /// could have any datagram delivered to another user's socket that shares the port.
    fn deliver_unread(
        &self,
        delivery: &LocalDelivery,
        (id, cookie): (SessionId, u64),
        local: SocketAddr,
        shares: bool,
        datagram: &UnreadDatagram,
    ) -> bool {
        let Some(to) = self.address_for(local.ip(), datagram) else {
            return false;
        };
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
        let Some(frame) = datagram_frame(local.port(), &arrival, &datagram.payload) else {
            return false;
        };
        let ends = (datagram.from, SocketAddr::new(to, local.port()));
        let reaches = || delivery.reaches(cookie, ends, interface) == Ok(true);
        let send = || {
            delivery
                .send(&frame[ethernet::HEADER_LEN..], to, interface)
                .is_ok()
        };
        if reaches() {
            return send();
        }
        if !shares {
            return false;
        }
        // Among several that share the port, the one with that peer gets it.
        self.tell_kernel_of_peer(id, Some(datagram.from));
        let is_sent = reaches() && send();
        self.tell_kernel_of_peer(id, None);
        is_sent
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
