//! What UDP sessions need from the kernel: datagrams that only its stack has seen (over loopback, by
//! unmanaged devices) are put through the packet filter; group memberships are the kernel's, so that
//! it reports them (RFC 3376, RFC 3810) and the device receives the group.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use portolan_control::{
    ClientId, Command, Errno, Holder, Input, Life, PortClaim, Relay, RequestedState, SessionPhase,
};
use portolan_proto::control::{Blob, GroupAction, GroupChange, ReplyBody};
use portolan_proto::datagram::UnreadDatagram;
use portolan_sys::datagram::{self, ReceivedDatagram};
use portolan_sys::descriptor::set_socket_option;
use portolan_sys::socket_filter;
use portolan_types::{ChannelId, MacAddr, Protocol, SessionId};
use portolan_wire::ethernet::{self, EtherType, EthernetHeader};
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::udp::{self, UdpHeader};
use rustix::event::epoll::EventFlags;
use tracing::warn;

use crate::handles::HeldPort;
use crate::packets::SOURCE_MAC;
use crate::requests::Answer;
use crate::reservation::PortReservation;
use crate::server::{Server, Source};
use crate::udp::set_peer;
use crate::udp::unread::open_unread;
use crate::user_threads::WaitsFor;

/// Datagrams read from one kernel socket before others have their turn.
const DATAGRAMS_PER_TURN: usize = 64;

/// Maximum payload of a datagram.
const PAYLOAD_MAX: usize = 65_507;

/// linux/in.h
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_BLOCK_SOURCE: i32 = 43;
const MCAST_UNBLOCK_SOURCE: i32 = 44;
const MCAST_LEAVE_GROUP: i32 = 45;
const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
const MCAST_LEAVE_SOURCE_GROUP: i32 = 47;
const IP_MULTICAST_ALL: i32 = 49;
const IPV6_MULTICAST_ALL: i32 = 29;

impl Server {
    /// Holds the port of a UDP session, and reads what the kernel delivers there.
    pub(crate) fn watch_port(&mut self, id: SessionId, reservation: PortReservation) {
        if let Err(errno) = self.tune(&reservation) {
            warn!(%errno, "what comes to a UDP port over the kernel's stack is lost");
            self.keep_reservation(id, reservation);
            return;
        }
        // Edge-triggered: its program can make the socket look ready indefinitely.
        let interest = EventFlags::IN | EventFlags::ET;
        let token = self
            .poll
            .add_to_crowd(&reservation, Source::Reservation(id), interest)
            .ok();
        let owner = self.owner_of_port(id);
        self.handles.of(id).port = Some(HeldPort::new(reservation, token, owner));
        if self.has_reservations() {
            self.classify_kernel_socket(id);
        }
    }

    fn tune(&self, reservation: &PortReservation) -> Result<(), rustix::io::Errno> {
        let is_v6 = reservation.is_v6();
        datagram::announce(reservation, is_v6)?;
        // For managed devices the packet filter delivers all multicast and broadcast.
        let managed: Vec<u32> = self.managed.iter().copied().collect();
        socket_filter::only_for_this_host(reservation, &managed)?;
        let off = 0_i32.to_ne_bytes();
        set_socket_option(reservation, libc::IPPROTO_IP, IP_MULTICAST_ALL, &off)?;
        if is_v6 {
            set_socket_option(reservation, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, &off)?;
        }
        Ok(())
    }

    /// Gives up the kernel socket to a program that goes on with it: then it comes with `answer`.
    pub(crate) fn give_up_port(
        &mut self,
        id: SessionId,
        answer: ReplyBody,
    ) -> Result<Answer, Errno> {
        if self.handles.port(id).is_none() {
            return Ok(answer.into());
        }
        let is_udp = self.is_udp(id);
        let given_up = self.call_on_port(id, move |port| {
            let made = if is_udp {
                make_ordinary(port)
            } else {
                socket_filter::lift(port)
            };
            if let Err(errno) = made {
                warn!(%errno, "a program gets a socket with options of ours");
            }
            let socket = port.as_fd().try_clone_to_owned();
            Box::new(move |_| {
                let socket = socket.map_err(|_| Errno::NOBUFS)?;
                Ok(Answer::Reply(answer, vec![socket]))
            })
        });
        self.drop_reservation(id);
        given_up
    }

    /// Reads the kernel's datagrams for a session.
    pub(crate) fn on_datagrams(&mut self, id: SessionId) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(PAYLOAD_MAX.max(buffer.len()), 0);
        for turn in 0..=DATAGRAMS_PER_TURN {
            let (Some(HeldPort { socket, token, .. }), Some(session)) =
                (self.handles.port(id), self.control.registry.session(id))
            else {
                break;
            };
            if turn == DATAGRAMS_PER_TURN {
                if let Some(token) = token {
                    // Armed again, so that the rest causes another edge.
                    let interest = EventFlags::IN | EventFlags::ET;
                    let _ = self.poll.modify(socket, *token, interest);
                }
                break;
            }
            let port = session.local.port();
            match datagram::receive(socket, &mut buffer) {
                Ok(arrival) => {
                    let payload = &buffer[..arrival.length];
                    self.inject_datagram((id, port), &arrival, payload);
                }
                Err(rustix::io::Errno::AGAIN) => break,
                // An error of an earlier send, which the program has no way to query.
                Err(_) => {}
            }
        }
        self.buffer = buffer;
    }

    fn inject_datagram(
        &mut self,
        (id, port): (SessionId, u16),
        arrival: &ReceivedDatagram,
        payload: &[u8],
    ) {
        let is_for_many = arrival.to.is_multicast() || self.routes.is_broadcast(arrival.to);
        match datagram_frame(port, arrival, payload) {
            // The kernel has delivered a copy to every member.
            Some(frame) if is_for_many => {
                self.control.counters.kernel_datagrams += 1;
                self.inject_for(self.recipient(id), arrival.interface, &frame);
            }
            Some(frame) => {
                self.control.counters.kernel_datagrams += 1;
                self.inject_from(arrival.interface, &frame);
            }
            None => self.control.counters.dropped += 1,
        }
    }

    /// Encodes `struct recipient`.
    fn recipient(&self, id: SessionId) -> [u8; SOURCE_MAC] {
        let mut bytes = [0; SOURCE_MAC];
        let session = self.control.registry.session(id);
        if let Some(Holder::Process(channel, slot)) = session.map(|session| session.holder) {
            bytes[..4].copy_from_slice(&slot.0.to_ne_bytes());
            bytes[4..].copy_from_slice(&(channel.0 as u16).wrapping_add(1).to_ne_bytes());
        }
        bytes
    }

    /// `KernelSocket`: hands out the kernel socket that holds the session's port.
    pub(crate) fn hand_out_kernel_socket(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        is_v6: bool,
    ) -> Result<Answer, Errno> {
        self.control
            .registry
            .admit(channel, Command::KernelSocket, id)?;
        self.make_kernel_socket(id, is_v6)?;
        let port = self.handles.port_mut(id).ok_or(Errno::BADF)?;
        port.is_shared = true;
        let copy = port.socket.as_fd().try_clone_to_owned();
        let fd = copy.map_err(|_| Errno::NOBUFS)?;
        Ok(Answer::Reply(ReplyBody::KernelSocket, vec![fd]))
    }

    /// `Share`: several processes have the descriptor.
    pub(crate) fn share(
        &mut self,
        client: ClientId,
        (id, is_v6): (SessionId, bool),
        unread: Blob,
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let mut fds = fds.into_iter();
        self.verify(id, &fds.next().ok_or(Errno::INVAL)?)?;
        let unread = open_unread(unread, fds.next())?;
        let requester = self.clients.get(&client).and_then(|client| client.channel);
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        match (session.protocol, session.holder) {
            (Protocol::Tcp, _) => Err(Errno::INVAL),
            (Protocol::Udp, Holder::Process(holder, _)) if Some(holder) == requester => {
                self.leave_to_kernel(id, is_v6, unread)
            }
            (Protocol::Udp, Holder::Process(..)) => Ok(Answer::Recall(id, RequestedState::Share)),
            (Protocol::Udp, _) => self.shared(id),
        }
    }

    /// Returns the kernel socket of a session that was left to the kernel.
    pub(crate) fn shared(&mut self, id: SessionId) -> Result<Answer, Errno> {
        if self.phase(id) != Some(SessionPhase::Relayed) {
            return Err(Errno::CONNRESET);
        }
        let port = self.handles.port_mut(id).ok_or(Errno::BADF)?;
        port.is_shared = true;
        let copy = port.socket.as_fd().try_clone_to_owned();
        let fd = copy.map_err(|_| Errno::NOBUFS)?;
        Ok(Answer::Reply(ReplyBody::KernelSocket, vec![fd]))
    }

    /// Nothing comes by the filter any more, nor by this server. The port is kept for others that have
    /// the descriptor.
    fn leave_to_kernel(
        &mut self,
        id: SessionId,
        is_v6: bool,
        unread: Vec<UnreadDatagram>,
    ) -> Result<Answer, Errno> {
        self.make_kernel_socket(id, is_v6)?;
        self.control.registry.leave_all_groups(id);
        self.input(Input::Unsteer(id));
        if let Some(port) = self.handles.port_mut(id)
            && let Some(token) = port.token.take()
        {
            self.poll.remove(&port.socket, token);
        }
        self.control.registry.detach(id);
        self.set_life(id, Life::Relayed(Relay::default()));
        let deliveries = self.deliveries(id, unread);
        self.call_on_port(id, move |port| {
            if let Err(errno) = make_ordinary(port) {
                warn!(%errno, "programs get a socket with options of ours");
            }
            let handed_over = deliveries.hand_over(port);
            Box::new(move |server| {
                server.count_handed_over(handed_over);
                server.input(Input::Returned(id));
                server.shared(id)
            })
        })
    }

    /// A session may have a port that the kernel leaves alone anyway, and no socket yet.
    fn make_kernel_socket(&mut self, id: SessionId, is_v6: bool) -> Result<(), Errno> {
        if self.handles.port(id).is_none() {
            let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
            let reservation = PortReservation::take(
                &PortClaim {
                    protocol: Protocol::Udp,
                    local: session.local,
                    reuse: session.reuse,
                    v6_only: session.v6_only,
                    uid: session.uid,
                },
                is_v6,
            )?;
            let peer = session.remote;
            set_peer(&reservation, peer);
            self.watch_port(id, reservation);
        }
        Ok(())
    }

    /// `Group`: the kernel checks the change, and applies it on the network.
    pub(crate) fn change_group(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        change: GroupChange,
    ) -> Result<Answer, Errno> {
        self.control.registry.admit(channel, Command::Group, id)?;
        if !change.group.is_multicast() {
            return Err(Errno::INVAL);
        }
        let change = GroupChange {
            interface: self.interface_of(id, &change)?,
            ..change
        };
        let is_join = matches!(change.action, GroupAction::Join);
        if is_join && !self.has_room_for_group(id, (change.group, change.interface)) {
            return Err(Errno::NOBUFS);
        }
        self.make_kernel_socket(id, change.group.is_ipv6())?;
        let (level, (name, value)) = (level_of(&change), group_request(&change)?);
        let call = self.have_called(id, WaitsFor::Network, move |port| {
            let made = set_socket_option(port, level, name, &value);
            Box::new(move |server| server.group_changed(channel, id, change, made))
        });
        if call.is_ok()
            && let Some(port) = self.handles.port_mut(id)
        {
            port.has_groups = true;
        }
        call
    }

    /// The kernel has judged the change.
    fn group_changed(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        change: GroupChange,
        made: Result<(), rustix::io::Errno>,
    ) -> Result<Answer, Errno> {
        self.control.registry.admit(channel, Command::Group, id)?;
        let (group, interface) = (change.group, change.interface);
        let is_member = || self.memberships(id).any(|m| m == (group, interface));
        match (made, change) {
            (Ok(()), _) => {}
            // The kernel's membership ended with its last source; now ours ends, too.
            (
                Err(rustix::io::Errno::ADDRNOTAVAIL),
                GroupChange {
                    action: GroupAction::Leave,
                    source: None,
                    ..
                },
            ) if is_member() => {}
            (Err(errno), _) => return Err(Errno(errno.raw_os_error())),
        }
        match (change.action, change.source) {
            (GroupAction::Join, _) => {
                let joined = if self.has_room_for_group(id, (group, interface)) {
                    self.join_group(id, group, interface)
                } else {
                    Err(Errno::NOBUFS)
                };
                if joined.is_err() {
                    return self.undo_join(id, change);
                }
            }
            (GroupAction::Leave, None) => self.leave_group(id, group, interface),
            // A membership may end with its last source: the library knows, and reports it.
            _ => {}
        }
        Ok(ReplyBody::Joined { interface }.into())
    }

    /// The kernel's membership ends again.
    fn undo_join(&self, id: SessionId, change: GroupChange) -> Result<Answer, Errno> {
        let leave = GroupChange {
            action: GroupAction::Leave,
            ..change
        };
        let (level, (name, value)) = (level_of(&leave), group_request(&leave)?);
        self.have_called(id, WaitsFor::Network, move |port| {
            // Nothing else would follow from it.
            let _ = set_socket_option(port, level, name, &value);
            Box::new(|_| Err(Errno::NOBUFS))
        })
    }

    /// The device that is meant: as given, where the session is a member already, or by the routes.
    fn interface_of(&self, id: SessionId, change: &GroupChange) -> Result<u32, Errno> {
        if change.interface != 0 {
            return Ok(change.interface);
        }
        let is_leaving = matches!(change.action, GroupAction::Leave) && change.source.is_none();
        let member = self
            .memberships(id)
            .find(|(group, _)| *group == change.group);
        match member {
            Some((_, interface)) if is_leaving => Ok(interface),
            _ => self
                .routes
                .multicast_interface(change.group)
                .ok_or(Errno(libc::ENODEV)),
        }
    }

    pub(crate) fn is_udp(&self, id: SessionId) -> bool {
        self.control
            .registry
            .session(id)
            .is_some_and(|session| session.protocol == Protocol::Udp)
    }
}

fn make_ordinary(reservation: &PortReservation) -> Result<(), rustix::io::Errno> {
    let is_v6 = reservation.is_v6();
    socket_filter::lift(reservation)?;
    datagram::announce_no_more(reservation, is_v6)?;
    let on = 1_i32.to_ne_bytes();
    set_socket_option(reservation, libc::IPPROTO_IP, IP_MULTICAST_ALL, &on)?;
    if is_v6 {
        set_socket_option(reservation, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, &on)?;
    }
    Ok(())
}

fn level_of(change: &GroupChange) -> i32 {
    match change.group {
        IpAddr::V4(_) => libc::IPPROTO_IP,
        IpAddr::V6(_) => libc::IPPROTO_IPV6,
    }
}

/// Option and value: `struct group_req` or `struct group_source_req`.
fn group_request(change: &GroupChange) -> Result<(i32, Vec<u8>), Errno> {
    let name = match (change.action, change.source) {
        (GroupAction::Join, None) => MCAST_JOIN_GROUP,
        (GroupAction::Leave, None) => MCAST_LEAVE_GROUP,
        (GroupAction::Join, Some(_)) => MCAST_JOIN_SOURCE_GROUP,
        (GroupAction::Leave, Some(_)) => MCAST_LEAVE_SOURCE_GROUP,
        (GroupAction::Block, Some(_)) => MCAST_BLOCK_SOURCE,
        (GroupAction::Unblock, Some(_)) => MCAST_UNBLOCK_SOURCE,
        (GroupAction::Block | GroupAction::Unblock, None) => return Err(Errno::INVAL),
    };
    let mut value = change.interface.to_ne_bytes().to_vec();
    value.resize(8, 0);
    value.extend(storage(change.group));
    value.extend(change.source.into_iter().flat_map(storage));
    Ok((name, value))
}

/// `struct sockaddr_storage`.
fn storage(address: IpAddr) -> [u8; 128] {
    let mut bytes = [0; 128];
    let family = match address {
        IpAddr::V4(v4) => {
            bytes[4..8].copy_from_slice(&v4.octets());
            libc::AF_INET
        }
        IpAddr::V6(v6) => {
            bytes[8..24].copy_from_slice(&v6.octets());
            libc::AF_INET6
        }
    };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes
}

/// Returns a frame as if it had come by a managed device; `None` if that is impossible.
pub(crate) fn datagram_frame(
    port: u16,
    arrival: &ReceivedDatagram,
    payload: &[u8],
) -> Option<Vec<u8>> {
    let payload_len = u16::try_from(payload.len()).ok()?;
    let header = UdpHeader {
        source_port: arrival.from.port(),
        destination_port: port,
        payload_len,
        checksum: 0,
    };
    let (source, destination) = (arrival.from.ip(), arrival.to);
    let header = header.with_checksum(source, destination, &[payload]);
    let length = payload_len.checked_add(udp::HEADER_LEN as u16)?;
    let (ether_type, ip) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut bytes = vec![0; ipv4::HEADER_LEN];
            Ipv4Header {
                traffic_class: arrival.service,
                identification: 0,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                ttl: arrival.hops,
                protocol: Protocol::Udp.number(),
                source,
                destination,
                payload_len: length,
            }
            .emit(&mut bytes);
            (EtherType::IPV4, bytes)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut bytes = vec![0; ipv6::HEADER_LEN];
            Ipv6Header {
                traffic_class: arrival.service,
                flow_label: 0,
                hop_limit: arrival.hops,
                protocol: Protocol::Udp.number(),
                source,
                destination,
                payload_len: length,
                fragment: None,
            }
            .emit(&mut bytes);
            (EtherType::IPV6, bytes)
        }
        _ => return None,
    };
    let mut frame = vec![0; ethernet::HEADER_LEN];
    EthernetHeader {
        destination: MacAddr::default(),
        source: MacAddr::default(),
        ether_type,
    }
    .emit(&mut frame);
    frame.extend(ip);
    let at = frame.len();
    frame.resize(at + udp::HEADER_LEN, 0);
    header.emit(&mut frame[at..]);
    frame.extend_from_slice(payload);
    Some(frame)
}
