//! Frames that reach the server: for its own sessions, SYNs to listeners, frames for sessions that have moved, and the
//! rest, which is reset.

use portolan_control::{self as control, Errno, Holder, Progress, SessionPhase};
use portolan_proto::filter::RecordHeader;
use portolan_stack::passive::Segment;
use portolan_stack::{Input, Packet, Reassembled, TcpSession, Transport};
use portolan_tcp::{Events, StateName, opens_connection};
use portolan_types::{ChannelId, SessionId, Slot};
use portolan_wire::tcp::TcpFlags;

use crate::server::Server;

/// Frames read from the ring before other events have their turn.
const FRAMES_PER_TURN: usize = 256;

/// Header of a complete frame: no checksum and no segmentation to do.
const PLAIN: [u8; portolan_sys::tap::VNET_HEADER] = [0; portolan_sys::tap::VNET_HEADER];

/// Offset of the source address in an Ethernet frame.
pub(crate) const SOURCE_MAC: usize = 6;

impl Server {
    /// Processes received frames in order.
    pub(crate) fn drain(&mut self) {
        let mut frame = std::mem::take(&mut self.frame);
        for _ in 0..FRAMES_PER_TURN {
            let Some(record) = self.rx_path.next(self.wire.io(), self.now) else {
                break;
            };
            let header = record.header;
            frame.clear();
            frame.extend_from_slice(record.frame);
            self.on_frame(&header, &frame);
        }
        self.rx_path.release();
        self.frame = frame;
    }

    fn on_frame(&mut self, record: &RecordHeader, frame: &[u8]) {
        if record.is_fragment() {
            return self.on_fragment(record, frame);
        }
        if self.reopens(record, frame) || self.yields_to_cookie(record, frame) {
            return;
        }
        self.hold_handshake(Slot(record.slot));
        match self.stack.input(self.now, record, frame) {
            Input::Delivered(slot) => self.on_delivered(slot),
            // The server's own sessions are at their slots before their rows point there.
            Input::Held(_) => {}
            Input::Unclaimed(packet) => self.on_unclaimed(&packet, record, frame),
            Input::Dropped(_) => self.control.counters.dropped += 1,
        }
    }

    /// Handles a fragment of a session's own, or a copy of an early one, which may belong to nobody.
    fn on_fragment(&mut self, record: &RecordHeader, frame: &[u8]) {
        if record.flags & RecordHeader::HELD != 0 {
            for frame in self.early.add(self.now, frame) {
                self.control.counters.reinjected += 1;
                self.inject_from(record.ifindex, &frame);
            }
            return;
        }
        match self.stack.reassemble(self.now, record, frame) {
            Reassembled::Whole(whole) => self.on_frame(&whole.record, &whole.frame),
            Reassembled::Waiting => {}
            Reassembled::Dropped(_) => self.control.counters.dropped += 1,
        }
    }

    /// Ends a connection in TIME-WAIT when a new SYN for it arrives (RFC 9293 §3.10.7.4, RFC 6191).
    fn reopens(&mut self, record: &RecordHeader, frame: &[u8]) -> bool {
        if !self.is_in_time_wait(Slot(record.slot)) {
            return false;
        }
        let Ok(packet) = Packet::parse(frame, record) else {
            return false;
        };
        let Some(segment) = Segment::of(&packet) else {
            return false;
        };
        let now = self.now;
        let reopened = self
            .stack
            .tcp(Slot(record.slot))
            .filter(|session| segment.flow == session.flow)
            .and_then(|session| {
                let isn = session
                    .connection
                    .time_wait()?
                    .reopens(now, segment.header)?;
                Some((session.id, isn))
            });
        let Some((id, isn)) = reopened else {
            return false;
        };
        let listener = self.listener_for(&segment.flow);
        self.forget(id);
        match listener {
            // With the row removed, it reaches the process that performs the handshakes.
            Some(listener) if self.control.is_delegated(listener) => {
                self.control.counters.reinjected += 1;
                self.inject_from(record.ifindex, frame);
            }
            Some(listener) => self.on_syn(listener, &segment, isn),
            // Without a Portolan listener the port may be the kernel's by now: the peer repeats its SYN, and with the row
            // removed the kernel answers.
            None => {}
        }
        true
    }

    /// Ends a handshake whose peer has done another one, by a cookie: the filter answered the peer's second SYN while the
    /// first one waited here.
    fn yields_to_cookie(&mut self, record: &RecordHeader, frame: &[u8]) -> bool {
        let slot = Slot(record.slot);
        let is_handshake = self
            .stack
            .tcp(slot)
            .is_some_and(|session| session.connection.state() == StateName::SynReceived);
        if !is_handshake {
            return false;
        }
        let Ok(packet) = Packet::parse(frame, record) else {
            return false;
        };
        let Some(segment) = Segment::of(&packet) else {
            return false;
        };
        let refusing = self.stack.tcp(slot).filter(|session| {
            session.flow == segment.flow && session.connection.refuses_handshake(segment.header)
        });
        refusing
            .map(|session| session.id)
            .is_some_and(|id| self.open_by_cookie_instead(id, &segment))
    }

    /// Returns whether this is an acknowledgement that took the way through a process while the peer's FIN came
    /// straight here. An answer to it, as to one from the network, would make the peer reset what it has closed.
    fn is_overtaken(&mut self, slot: Slot, packet: &Packet<'_>) -> bool {
        let Transport::Tcp {
            header, payload, ..
        } = &packet.transport
        else {
            return false;
        };
        let is_bare = payload.is_empty() && header.flags == TcpFlags::ACK;
        is_bare && self.is_in_time_wait(slot)
    }

    fn is_in_time_wait(&mut self, slot: Slot) -> bool {
        self.stack
            .tcp(slot)
            .is_some_and(|session| session.connection.state() == StateName::TimeWait)
    }

    fn on_delivered(&mut self, slot: Slot) {
        let Some(id) = self.stack.tcp(slot).map(|session| session.id) else {
            return;
        };
        match self.phase(id) {
            Some(SessionPhase::Closing) => self.look_at_closing(id),
            Some(SessionPhase::Handshake) => self.look_at_handshake(id, slot),
            _ => {}
        }
    }

    fn on_unclaimed(&mut self, packet: &Packet<'_>, record: &RecordHeader, frame: &[u8]) {
        let Some(flow) = packet.flow() else {
            self.control.counters.dropped += 1;
            return;
        };
        if let Some(id) = self.control.registry.by_flow(&flow) {
            self.on_moved(id, packet, record, frame);
        } else if let Some(segment) = Segment::of(packet) {
            self.on_stranger(&segment);
        } else {
            self.control.counters.dropped += 1;
        }
    }

    /// Handles a frame whose session has moved since the filter saw it: filters it again, or takes it here.
    fn on_moved(
        &mut self,
        id: SessionId,
        packet: &Packet<'_>,
        record: &RecordHeader,
        frame: &[u8],
    ) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        if session.is_probing() {
            return if opens(packet) {
                self.pass_to_listener(id, record.ifindex, frame);
            } else {
                self.on_probe_answer(id, packet);
            };
        }
        match session.holder {
            Holder::Process(..) => {
                self.control.counters.reinjected += 1;
                self.inject_from(record.ifindex, frame);
            }
            Holder::Server(slot) if slot.0 != record.slot => {
                let record = RecordHeader {
                    slot: slot.0,
                    generation: session.generation.0,
                    ..*record
                };
                if self.reopens(&record, frame)
                    || self.yields_to_cookie(&record, frame)
                    || self.is_overtaken(slot, packet)
                {
                    return;
                }
                self.hold_handshake(slot);
                if let Input::Delivered(slot) = self.stack.input(self.now, &record, frame) {
                    self.on_delivered(slot);
                }
            }
            Holder::Server(slot) if opens(packet) && is_closed(self.stack.tcp(slot)) => {
                self.pass_to_listener(id, record.ifindex, frame);
            }
            Holder::Server(_) | Holder::None => self.control.counters.dropped += 1,
        }
    }

    /// The flow of a connection that has ended is opened anew, although the descriptor of the old connection is still
    /// open: the filter passes the SYN to whoever listens now.
    fn pass_to_listener(&mut self, ended: SessionId, interface: u32, syn: &[u8]) {
        self.input(control::Input::FlowReused(ended));
        let session = self.control.registry.session(ended);
        if session.is_some_and(|session| !session.is_flow_reused) {
            // It has no row to give up.
            self.control.counters.dropped += 1;
            return;
        }
        self.control.counters.reinjected += 1;
        self.inject_from(interface, syn);
    }

    /// Passes a frame that came by a device through the filter, which reads the interface from an address field that is
    /// otherwise unused.
    pub(crate) fn inject_from(&mut self, interface: u32, frame: &[u8]) {
        self.inject_for([0; SOURCE_MAC], interface, frame);
    }

    /// Likewise for a multicast or broadcast datagram; the filter reads its recipient from the other address field.
    pub(crate) fn inject_for(&mut self, recipient: [u8; SOURCE_MAC], interface: u32, frame: &[u8]) {
        let mut frame = frame.to_vec();
        if let Some(place) = frame.get_mut(..SOURCE_MAC + 4) {
            place[..SOURCE_MAC].copy_from_slice(&recipient);
            place[SOURCE_MAC..].copy_from_slice(&interface.to_ne_bytes());
            self.inject.resend(PLAIN, &frame);
        }
    }

    /// Handles a frame that reached a process after its session had left. Only frames for a session that the process
    /// had are accepted: everything else could be a forgery.
    pub(crate) fn stray(&mut self, channel: ChannelId, frame: &[u8]) {
        let record = RecordHeader {
            // The length fits: messages are bounded.
            length: frame.len() as u32,
            slot: u32::MAX,
            ..RecordHeader::default()
        };
        let Ok(packet) = Packet::parse(frame, &record) else {
            self.control.counters.dropped += 1;
            return;
        };
        let id = packet
            .flow()
            .and_then(|flow| self.control.registry.by_flow(&flow));
        let is_user = id.is_some_and(|id| self.may_have_had(channel, id));
        match id {
            // A process passes on the SYN of a session that it holds once the connection has ended.
            Some(id) if opens(&packet) && self.is_held_by(id, channel) => {
                self.pass_to_listener(id, record.ifindex, frame);
            }
            Some(id) if is_user => self.on_moved(id, &packet, &record, frame),
            None if opens(&packet) => self.on_syn_of_delegate(channel, &packet),
            _ => self.control.counters.dropped += 1,
        }
    }

    /// Has the process had the session, or performed its handshake, or accepted it before the server knew it?
    fn may_have_had(&self, channel: ChannelId, id: SessionId) -> bool {
        let registry = &self.control.registry;
        let is_user = |id| registry.session(id).is_some_and(|it| it.is_user(channel));
        let is_servers = matches!(
            self.phase(id),
            Some(SessionPhase::Handshake | SessionPhase::Offered | SessionPhase::Closing)
        );
        let listener = registry.session(id).and_then(|session| session.listener);
        is_user(id) || is_servers && listener.is_some_and(is_user)
    }

    /// A process that performs handshakes of a listener no longer, or not for the moment, passes a SYN on.
    fn on_syn_of_delegate(&mut self, channel: ChannelId, packet: &Packet<'_>) {
        let segment = Segment::of(packet).filter(|segment| {
            let listener = self.listener_for(&segment.flow);
            listener.is_some_and(|listener| self.may_have_had(channel, listener))
        });
        match segment {
            Some(segment) if self.may_connect(&segment.flow) => self.on_stranger(&segment),
            _ => self.control.counters.dropped += 1,
        }
    }

    /// Handles a change of a session that the server holds.
    pub(crate) fn on_changed(&mut self, slot: Slot, events: Events) {
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        let (id, error) = (session.id, session.connection.error());
        let ended = events.intersects(Events::CLOSED | Events::ERROR);
        match self.phase(id) {
            Some(SessionPhase::Connecting) if events.contains(Events::CONNECTED) => {
                self.established(id)
            }
            Some(SessionPhase::Connecting) if ended => {
                let errno = error.map_or(Errno::TIMEDOUT, |error| Errno(error.errno()));
                self.open_failed(id, errno);
            }
            Some(SessionPhase::Handshake) if ended => {
                self.input(control::Input::FailedHandshake(id))
            }
            Some(SessionPhase::Handshake) if events.contains(Events::HELD) => {
                self.control.counters.accept_overflow += 1;
            }
            Some(SessionPhase::Relayed) => self.pump(id),
            Some(SessionPhase::Closing) if events.contains(Events::CLOSED) => {
                let progress = Progress::Closed;
                self.input(control::Input::Progress { id, progress });
            }
            _ => {}
        }
    }
}

/// Is the packet a SYN that a listener would take?
fn opens(packet: &Packet<'_>) -> bool {
    Segment::of(packet).is_some_and(|segment| opens_connection(segment.header))
}

fn is_closed(session: Option<&mut TcpSession>) -> bool {
    session.is_some_and(|session| session.connection.is_closed())
}
