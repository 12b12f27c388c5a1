//! Input: the fast path for expected headers, and the slow path for everything else.

use core::net::SocketAddr;
use core::ops::Range;

use portolan_proto::filter::RecordHeader;
use portolan_tcp::{Events, opens_connection};
use portolan_types::{FlowKey, Generation, Instant, SeqNum, Slot};

use super::datagrams::{deliver_datagrams, hears, report_to_udp};
use super::{Input, NextHeaders, SessionEntry, SlotState, Stack, Step, entry_of, generation, tell};
use crate::counters::Fate;
use crate::expected::{Expected, ExpectedDatagram, Segment};
use crate::packet::{Drop, IcmpMessage, Packet, Transport};
use crate::pmtu::PathMtus;
use crate::session::{Session, TcpSession};

/// Offset of the EtherType in a frame, and lengths of headers.
const ETHER_TYPE: usize = 12;
const ETHERNET: usize = 14;
const IPV6: usize = 40;

impl Stack {
    /// Delivers a received frame to its session.
    pub fn input<'a>(&mut self, now: Instant, record: &RecordHeader, frame: &'a [u8]) -> Input<'a> {
        let input = self.give(now, record, frame);
        self.counters.count(match &input {
            Input::Delivered(_) => Fate::Delivered,
            Input::Held(_) => Fate::Held,
            Input::Unclaimed(_) => Fate::Unclaimed,
            Input::Dropped(reason) => Fate::Dropped(*reason),
        });
        input
    }

    /// Like [`Stack::input`], but the payload may stay in the frame if it is in order for its session while `behind`
    /// bytes are unread; then also returns its range in the frame.
    pub fn input_lending<'a>(
        &mut self,
        now: Instant,
        record: &RecordHeader,
        frame: &'a [u8],
        behind: usize,
    ) -> (Input<'a>, Option<Range<usize>>) {
        let slot = Slot(record.slot);
        if !ends_with_packet(frame) {
            return (self.input(now, record, frame), None);
        }
        if let Some(session) = self.tcp(slot)
            && session.generation == Generation(record.generation)
        {
            session.connection.let_stay(behind);
        }
        let input = self.input(now, record, frame);
        let staying = self
            .tcp(slot)
            .map_or(0, |session| session.connection.stay());
        let place = frame.len().checked_sub(staying).filter(|_| staying > 0);
        (input, place.map(|start| start..frame.len()))
    }

    fn give<'a>(&mut self, now: Instant, record: &RecordHeader, frame: &'a [u8]) -> Input<'a> {
        if let Some(input) = self.give_expected(now, record, frame) {
            return input;
        }
        self.slow_path(now, record, frame)
    }

    /// The fast path: one compare shows that the frame is the one expected.
    fn give_expected<'a>(
        &mut self,
        now: Instant,
        record: &RecordHeader,
        frame: &'a [u8],
    ) -> Option<Input<'a>> {
        let slot = Slot(record.slot);
        let observer = self.observer;
        let entry = entry_of(&mut self.places, slot.0)?;
        let expected = entry.expected.as_deref_mut()?;
        if record.flags != 0 || generation(&entry.session) != Generation(record.generation) {
            return None;
        }
        match (&mut entry.session, expected) {
            (Session::Tcp(session), NextHeaders::OfSegment(expected)) => {
                if session.ip.min_ttl != 0 {
                    return None;
                }
                let segment = expected.meet(frame)?;
                tell(observer, Step::Session);
                let next = take_segment(session, &segment, now);
                let events = session.connection.events();
                match next {
                    Some(next) => expected.expect(next),
                    None => entry.expected = None,
                }
                self.counters.count(Fate::Expected);
                self.note(slot.0, events);
                self.follow_up(now, slot);
            }
            (Session::Udp(session), NextHeaders::OfDatagram(expected)) => {
                let met = expected.meet(frame, session.remote)?;
                tell(observer, Step::Session);
                let ends = (met.source, met.destination);
                let is_taken = deliver_datagrams(session, ends, met.ip, met.payload, record);
                self.counters.count(Fate::DatagramExpected);
                if !is_taken {
                    return Some(Input::Dropped(Drop::ReceiveBufferFull));
                }
                self.note(slot.0, Events::READABLE);
            }
            _ => return None,
        }
        Some(Input::Delivered(slot))
    }

    /// After a frame on the slow path, prepares the fast path for the next one.
    fn expect_after(&mut self, slot: Slot, frame: &[u8], packet: &Packet<'_>) {
        let fast_path_disabled = self.fast_path_disabled;
        let Some(entry) = self.entry(slot.0) else {
            return;
        };
        let fate = match &entry.session {
            Session::Tcp(session) => {
                match (
                    session.connection.next_expected(),
                    entry.expected.as_deref_mut(),
                ) {
                    (Some(next), Some(NextHeaders::OfSegment(expected))) => expected.expect(next),
                    (Some(next), _) if !fast_path_disabled => {
                        let expected = Expected::after(frame, packet, next);
                        entry.expected = expected.map(|it| Box::new(NextHeaders::OfSegment(it)));
                    }
                    _ => entry.expected = None,
                }
                Fate::TakenApart
            }
            Session::Udp(session) if session.remote == Some(packet.source) => {
                let is_known = matches!(
                    entry.expected.as_deref(),
                    Some(NextHeaders::OfDatagram(expected)) if expected.is_between(packet)
                );
                if !is_known && !fast_path_disabled {
                    let expected = ExpectedDatagram::after(frame, packet);
                    entry.expected = expected.map(|it| Box::new(NextHeaders::OfDatagram(it)));
                }
                Fate::DatagramTakenApart
            }
            Session::Udp(_) => return,
        };
        self.counters.count(fate);
    }

    fn slow_path<'a>(&mut self, now: Instant, record: &RecordHeader, frame: &'a [u8]) -> Input<'a> {
        let packet = match Packet::parse(frame, record) {
            Ok(packet) => packet,
            Err(reason) => return Input::Dropped(reason),
        };
        tell(self.observer, Step::Session);
        let slot = Slot(record.slot);
        match self.places.get_mut(slot.0 as usize) {
            Some(SlotState::Taken(entry))
                if generation(&entry.session) == Generation(record.generation) =>
            {
                let delivered = deliver(&mut self.mtus, now, &mut entry.session, &packet, record);
                match delivered {
                    Ok(Some(events)) => self.note(slot.0, events),
                    Ok(None) => return Input::Unclaimed(packet),
                    Err(reason) => return Input::Dropped(reason),
                }
                self.expect_after(slot, frame, &packet);
                self.follow_up(now, slot);
                Input::Delivered(slot)
            }
            Some(SlotState::Reserved(early)) if early.expects(record) => {
                if early.hold(&mut self.early, record, frame) {
                    Input::Held(slot)
                } else {
                    Input::Dropped(Drop::TooEarly)
                }
            }
            _ => Input::Unclaimed(packet),
        }
    }

    /// Called after a session has processed a packet.
    fn follow_up(&mut self, now: Instant, slot: Slot) {
        let Stack { places, owing, .. } = self;
        let Some(entry) = entry_of(places, slot.0) else {
            return;
        };
        let Session::Tcp(session) = &entry.session else {
            return;
        };
        if session.connection.has_output() && !defers(owing, slot, entry) {
            return self.touch(slot);
        }
        let Session::Tcp(session) = &mut entry.session else {
            return;
        };
        session.connection.rest(now);
        let events = session.connection.events();
        self.note(slot.0, events);
        self.reschedule(now, slot.0);
    }

    /// Called after the application has read: lets [`Stack::output`] send, unless the output may be deferred.
    pub fn touch_after_read(&mut self, slot: Slot) {
        let Stack { places, owing, .. } = self;
        let defers = entry_of(places, slot.0).is_some_and(|entry| defers(owing, slot, entry));
        if !defers {
            self.touch(slot);
        }
    }
}

/// Is all that the session has to send an acknowledgement that waits for data to go with?
fn defers(owing: &mut Option<Vec<u32>>, slot: Slot, entry: &mut SessionEntry) -> bool {
    let (Some(owing), Session::Tcp(session)) = (owing, &entry.session) else {
        return false;
    };
    let defers = !entry.is_pending && session.connection.owes_acknowledgement();
    if defers && !entry.is_owing {
        entry.is_owing = true;
        owing.push(slot.0);
    }
    defers
}

/// Passes an expected segment to the connection. Returns the next sequence number it expects, if any.
fn take_segment(session: &mut TcpSession, segment: &Segment<'_>, now: Instant) -> Option<SeqNum> {
    let connection = &mut session.connection;
    let (header, payload) = (&segment.header, segment.payload);
    connection.on_marked_segment(now, segment.codepoint, header, payload);
    connection.next_expected()
}

/// Delivers a packet to its session and returns the events for the application; none if the protocol does
/// not match, or if it is a SYN and the connection has ended: the next one is the listener's.
fn deliver(
    mtus: &mut PathMtus,
    now: Instant,
    session: &mut Session,
    packet: &Packet<'_>,
    record: &RecordHeader,
) -> Result<Option<Events>, Drop> {
    if let Session::Tcp(session) = &*session
        && packet.ttl < session.ip.min_ttl
    {
        return Err(Drop::TooFar);
    }
    let events = match (session, &packet.transport) {
        (
            Session::Tcp(session),
            Transport::Tcp {
                header,
                payload,
                codepoint,
            },
        ) => {
            // The filter checks the peer only when it looks up the flow, which a handle saves it.
            if !is_of(&session.flow, packet) {
                return Err(Drop::ForeignPeer);
            }
            let connection = &mut session.connection;
            if connection.is_closed() && opens_connection(header) {
                return Ok(None);
            }
            connection.on_marked_segment(now, *codepoint, header, payload);
            connection.events()
        }
        (Session::Tcp(session), Transport::IcmpError(message)) => {
            report_to_tcp(mtus, now, session, packet, message)
        }
        (
            Session::Udp(session),
            Transport::Udp {
                ip,
                payload,
                has_checksum,
            },
        ) => {
            // RFC 8200 §8.1: IPv6 requires a checksum, unless the application permits its absence (RFC 6936).
            let may_lack = packet.source.is_ipv4() || session.checksums.v6_unwanted;
            if !has_checksum && !may_lack {
                return Err(Drop::BadChecksum);
            }
            if session.remote.is_some_and(|remote| remote != packet.source) {
                return Err(Drop::ForeignPeer);
            }
            if !hears(session, packet, record) {
                return Err(Drop::NotMember);
            }
            let ends = (packet.source, packet.destination);
            if !deliver_datagrams(session, ends, *ip, payload, record) {
                return Err(Drop::ReceiveBufferFull);
            }
            Events::READABLE
        }
        (Session::Udp(session), Transport::IcmpError(message)) => {
            if let Some(mtu) = message.path_mtu()
                && session.ip.discovery.heeds_routers()
            {
                mtus.learn(now, packet.source.ip(), mtu);
            }
            report_to_udp(now, session, packet, message)
        }
        _ => return Ok(None),
    };
    Ok(Some(events))
}

/// Whether the IP packet, by the length in its header, ends where the frame does; then its payload does, too.
fn ends_with_packet(frame: &[u8]) -> bool {
    let number = |at: usize| {
        let bytes = frame.get(at..at + 2)?.try_into().ok()?;
        Some(usize::from(u16::from_be_bytes(bytes)))
    };
    let end = match number(ETHER_TYPE) {
        Some(0x0800) => number(ETHERNET + 2).map(|total| ETHERNET + total),
        Some(0x86dd) => number(ETHERNET + 4).map(|payload| ETHERNET + IPV6 + payload),
        _ => None,
    };
    end == Some(frame.len())
}

fn is_of(flow: &FlowKey, packet: &Packet<'_>) -> bool {
    let plain = |address: SocketAddr| (address.ip(), address.port());
    plain(flow.remote) == plain(packet.source) && plain(flow.local) == plain(packet.destination)
}

fn report_to_tcp(
    mtus: &mut PathMtus,
    now: Instant,
    session: &mut TcpSession,
    packet: &Packet<'_>,
    message: &IcmpMessage,
) -> Events {
    let connection = &mut session.connection;
    let is_in_flight = |seq| connection.is_in_flight(seq);
    let mtu = message.path_mtu();
    if mtu.is_some() && !session.ip.discovery.heeds_routers() {
        return connection.events();
    }
    if let Some(mtu) = mtu
        && message.quoted.seq.is_some_and(is_in_flight)
    {
        mtus.learn(now, packet.source.ip(), mtu);
    }
    if let Some(error) = message.for_tcp() {
        connection.on_icmp(error);
    }
    connection.events()
}
