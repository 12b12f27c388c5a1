//! Frames that reach the server: to its own sessions, SYNs to listeners, frames for sessions that
//! have moved, and the rest, which is reset.

use portolan_control::{self as control, Errno, Holder, Progress, SessionEntry, SessionPhase};
use portolan_proto::filter::RecordHeader;
use portolan_proto::report::CookieCounts;
use portolan_stack::passive::{
    ListenerSegment, answer_by_cookie, clamp_for_cookie, open_by_cookie, refusal,
};
use portolan_stack::{Input, IpOptions, Packet, Reassembled, Transport, send_segment};
use portolan_tcp::cookie::Decoded;
use portolan_tcp::{Config as TcpConfig, Events, StateName};
use portolan_types::{ChannelId, FlowKey, SessionId, Slot};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use crate::server::Server;

/// Frames taken from the ring before other events get their turn.
const FRAMES_PER_TURN: usize = 1024;

/// Header of a frame that is whole: nothing to check or to cut.
const PLAIN: [u8; portolan_sys::tap::VNET_HEADER] = [0; portolan_sys::tap::VNET_HEADER];

/// Where the source address lies in an Ethernet frame.
pub const SOURCE_MAC: usize = 6;

impl Server {
    /// Takes what has come, in its order.
    pub fn drain(&mut self) {
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
        if self.reopens(record, frame) {
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

    /// One of a session's own, or a copy of an early one that nobody may own.
    fn on_fragment(&mut self, record: &RecordHeader, frame: &[u8]) {
        if record.flags & RecordHeader::HELD != 0 {
            for frame in self.early.take_in(self.now, frame) {
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

    /// A new SYN for a connection in TIME_WAIT ends it (RFC 9293 §3.10.7.4, RFC 6191).
    fn reopens(&mut self, record: &RecordHeader, frame: &[u8]) -> bool {
        if !self.is_in_time_wait(Slot(record.slot)) {
            return false;
        }
        let Ok(packet) = Packet::parse(frame, record) else {
            return false;
        };
        let Transport::Tcp {
            header, payload, ..
        } = &packet.transport
        else {
            return false;
        };
        let now = self.now;
        let reopened = self
            .stack
            .tcp(Slot(record.slot))
            .filter(|session| packet.flow() == Some(session.flow))
            .and_then(|session| {
                let isn = session.connection.time_wait()?.reopens(now, header)?;
                Some((session.id, session.flow, isn))
            });
        let Some((id, flow, isn)) = reopened else {
            return false;
        };
        let listener = self.listener_for(&flow);
        self.forget(id);
        // Without a listener of ours the port may be the kernel's by now: the peer repeats its SYN,
        // and with the row gone the kernel answers.
        if let Some(listener) = listener {
            self.on_syn(listener, flow, (header, payload), isn);
        }
        true
    }

    /// An acknowledgement that was on its way through a process while the peer's FIN came straight here. To answer it, as
    /// one from the network, would have the peer reset what it has closed.
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

    /// Before a segment: while the accept queue is full no handshake completes.
    fn hold_handshake(&mut self, slot: Slot) {
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        if session.connection.state() != StateName::SynReceived {
            return;
        }
        let listener = self
            .control
            .registry
            .session(session.id)
            .and_then(|known| self.control.registry.listener(known.listener?));
        let has_room = listener.is_none_or(|listener| listener.has_room());
        session.connection.hold_handshake(!has_room);
    }

    /// After it: the next segment has to know how full the queue is.
    fn look_at_handshake(&mut self, id: SessionId, slot: Slot) {
        let known = self.control.registry.session(id);
        let is_deferred = known.is_some_and(SessionEntry::is_deferred);
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        let connection = &session.connection;
        match connection.state() {
            StateName::SynReceived | StateName::Closed => {}
            _ if connection.readable() > 0 || connection.is_receive_shut() => {
                self.input(control::Input::ReadableHandshake(id));
            }
            _ if is_deferred => {}
            _ => self.input(control::Input::Handshake(id)),
        }
    }

    fn on_unclaimed(&mut self, packet: &Packet<'_>, record: &RecordHeader, frame: &[u8]) {
        let Some(flow) = packet.flow() else {
            self.control.counters.dropped += 1;
            return;
        };
        if let Some(id) = self.control.registry.by_flow(&flow) {
            self.on_moved(id, packet, record, frame);
        } else if let Transport::Tcp {
            header, payload, ..
        } = &packet.transport
        {
            self.on_stranger(flow, packet, header, payload);
        } else {
            self.control.counters.dropped += 1;
        }
    }

    /// The session has moved since the filter saw the frame: it is filtered again, or is here.
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
            return self.on_probe_answer(id, packet);
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
                if self.reopens(&record, frame) || self.is_overtaken(slot, packet) {
                    return;
                }
                self.hold_handshake(slot);
                if let Input::Delivered(slot) = self.stack.input(self.now, &record, frame) {
                    self.on_delivered(slot);
                }
            }
            Holder::Server(_) | Holder::None => self.control.counters.dropped += 1,
        }
    }

    /// Lets the filter see a frame that came by a device: in place of an address that nobody looks
    /// at, it reads which one.
    pub fn inject_from(&mut self, interface: u32, frame: &[u8]) {
        self.inject_for([0; SOURCE_MAC], interface, frame);
    }

    /// The same of a datagram to many; in place of the other address the filter reads whom it is for.
    pub fn inject_for(&mut self, recipient: [u8; SOURCE_MAC], interface: u32, frame: &[u8]) {
        let mut frame = frame.to_vec();
        if let Some(place) = frame.get_mut(..SOURCE_MAC + 4) {
            place[..SOURCE_MAC].copy_from_slice(&recipient);
            place[SOURCE_MAC..].copy_from_slice(&interface.to_ne_bytes());
            self.inject.resend(PLAIN, &frame);
        }
    }

    /// A frame that reached a process after its session had left. Only one for a session that the
    /// process had is believed: everything else could be a forgery.
    pub fn stray(&mut self, channel: ChannelId, frame: &[u8]) {
        let record = RecordHeader {
            // The frame's length fits: messages are bounded.
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
        let is_user = id
            .and_then(|id| self.control.registry.session(id))
            .is_some_and(|session| session.is_user(channel));
        match id {
            Some(id) if is_user => self.on_moved(id, &packet, &record, frame),
            _ => self.control.counters.dropped += 1,
        }
    }

    /// A segment without a session.
    fn on_stranger(
        &mut self,
        flow: FlowKey,
        packet: &Packet<'_>,
        header: &TcpHeader,
        payload: &[u8],
    ) {
        let Some(listener) = self.listener_for(&flow) else {
            self.reset(packet, header, payload);
            return;
        };
        if packet.ttl < self.handshake_options(listener).ip.min_ttl {
            self.control.counters.too_far += 1;
            return;
        }
        let secrets = self.lent_secret(listener).into_iter().chain([&self.secret]);
        match self.cookie_clock.judge(self.now, &flow, header, secrets) {
            ListenerSegment::Noise => self.control.counters.dropped += 1,
            ListenerSegment::Syn => {
                let isn = self.isn(&flow);
                self.on_syn(listener, flow, (header, payload), isn);
            }
            ListenerSegment::Cookie(decoded) => {
                self.open_by_cookie(listener, flow, &decoded, (header, payload));
            }
            ListenerSegment::Stray { is_forgery } => {
                self.control.counters.cookies_bad += u64::from(is_forgery);
                self.count_cookies(listener, |cookies| cookies.refused += u64::from(is_forgery));
                self.reset(packet, header, payload);
            }
        }
    }

    /// RFC 9293 §3.10.7.1, as often as the limit allows.
    pub fn reset(&mut self, packet: &Packet<'_>, header: &TcpHeader, payload: &[u8]) {
        let (Some(flow), Some(reset)) = (packet.flow(), refusal(header, payload)) else {
            return;
        };
        if !self.reset_limit.allows(self.now) {
            self.control.counters.resets_withheld += 1;
            // So many are a flood, too.
            return self.rx_throttle.note(self.now);
        }
        let ip = IpOptions::default();
        if send_segment(&flow, ip, &reset, &self.routes, &mut self.wire) {
            self.control.counters.resets += 1;
        }
    }

    /// Answers a SYN without keeping anything.
    pub fn send_cookie(&mut self, listener: SessionId, flow: &FlowKey, header: &TcpHeader) {
        let Some(config) = self.cookie_config(listener, flow) else {
            return;
        };
        let answer = answer_by_cookie(&self.secret, flow, header, &config, self.now);
        let ip = self.handshake_options(listener).ip;
        // It may be acknowledged before the call returns.
        self.note_cookies();
        if send_segment(flow, ip, &answer, &self.routes, &mut self.wire) {
            self.control.counters.cookies_sent += 1;
            self.count_cookies(listener, |cookies| cookies.sent += 1);
            self.note_unkept(listener, flow);
            self.rx_throttle.give_way(self.now);
        }
    }

    fn count_cookies(&mut self, listener: SessionId, count: impl FnOnce(&mut CookieCounts)) {
        if let Some(listener) = self.control.registry.listener_mut(listener) {
            count(&mut listener.cookies);
        }
    }

    fn cookie_config(&self, listener: SessionId, flow: &FlowKey) -> Option<TcpConfig> {
        let config = self.passive_config(listener, flow)?;
        Some(clamp_for_cookie(config, &self.handshake_options(listener)))
    }

    fn open_by_cookie(
        &mut self,
        listener: SessionId,
        flow: FlowKey,
        decoded: &Decoded,
        segment: (&TcpHeader, &[u8]),
    ) {
        let Some(config) = self.cookie_config(listener, &flow) else {
            return;
        };
        if self
            .control
            .registry
            .listener(listener)
            .is_none_or(|l| !l.has_room())
        {
            // The peer may try again: Linux drops it, too.
            self.control.counters.accept_overflow += 1;
            return;
        }
        let connection = open_by_cookie(&config, decoded, segment, self.now);
        if let Some(id) = self.enter_passive(listener, flow, connection) {
            self.control.counters.cookies_taken += 1;
            self.count_cookies(listener, |cookies| cookies.accepted += 1);
            self.input(control::Input::ReadableHandshake(id));
        }
    }

    /// Something changed for a session that the server holds.
    pub fn on_changed(&mut self, slot: Slot, events: Events) {
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
