//! The session table: who gets a received frame, who may send, whose timer is due.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::VecDeque;

use portolan_proto::filter::RecordHeader;
use portolan_proto::ip::IpOptions;
use portolan_tcp::{Codepoint, Events};
use portolan_timers::Wheel;
use portolan_types::{FlowKey, Generation, Instant, Protocol, SeqNum, Slot, scope_of};
use portolan_wire::tcp::TcpHeader;

use crate::counters::{COUNTERS, Counters, Fate};
use crate::expected::{Expected, ExpectedDatagram, Segment};
use crate::fragments::{FragmentCounters, Reassembled, Reassembly};
use crate::frame::{Frame, HEAD_MAX, TxQueueId, Wire};
use crate::packet::{Drop, IcmpMessage, Packet, Transport};
use crate::pmtu::PathMtus;
use crate::resolved_path::{Ends, NextHop, ResolvedPath};
use crate::routes::Routes;
use crate::session::{Session, TcpSession};
use crate::udp::UdpSession;

mod datagrams;
mod early;
mod tx_queues;

pub use datagrams::{SendError, Sending};
use datagrams::{deliver_datagrams, hears, report_to_udp};
use early::EarlyFrames;
use tx_queues::WaitingQueues;

/// A holder whose sessions wait for a route or a neighbour looks again after so long, at first and at
/// last.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_LAST: Duration = Duration::from_secs(1);

/// Sessions of one holder, and what they want to send.
#[derive(Debug)]
pub struct Stack {
    places: Vec<SlotState>,
    free: Vec<u32>,
    /// Sessions that are here.
    count: usize,
    timers: Wheel,
    /// Sessions that may have something to send, each at most once, there or at its transmit queue.
    pending: VecDeque<u32>,
    tx_queues: WaitingQueues,
    /// Sessions whose acknowledgements wait for data to go with, if they may.
    owing: Option<Vec<u32>>,
    /// Sessions that wait for a route or a neighbour.
    stalled: Vec<u32>,
    /// When to look whether there is news for them, and how long after that.
    next_look: Option<(Instant, Duration)>,
    unresolved: Vec<NextHop>,
    changed: Vec<(Slot, Events)>,
    fragments: Reassembly,
    /// Bytes of all frames that wait for sessions on their way.
    early: usize,
    /// Frames that waited for a session which did not come.
    released: Vec<Vec<u8>>,
    mtus: PathMtus,
    /// Generation of the routes that `stalled` were tried with.
    tried_generation: u32,
    pub(crate) counters: Counters,
    fast_path_disabled: bool,
    observer: Option<fn(Step)>,
}

/// What the stack is about to do for a session, told to who observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// To compare, take apart or write the headers of a frame, checksums included.
    Headers,
    /// To have the session take something in, or say what it has to send.
    Session,
}

#[derive(Debug)]
enum SlotState {
    /// With the generation of the session that was here last.
    Free(Option<Generation>),
    Reserved(EarlyFrames),
    Taken(Box<SessionEntry>),
}

#[derive(Debug)]
struct SessionEntry {
    session: Session,
    /// Of the last packet sent.
    resolved: Option<ResolvedPath>,
    /// The session is in `pending`, or waits for its transmit queue.
    is_pending: bool,
    /// The session is in `owing`.
    is_owing: bool,
    tx_queue: TxQueueId,
    /// Its transmit queue from now on, as soon as nothing of it waits in the one it has.
    next_tx_queue: TxQueueId,
    /// It sends nothing.
    is_suspend_tx: bool,
    expected: Option<Box<NextHeaders>>,
    /// When the wheel will look at it; never later than its deadline.
    scheduled: Instant,
}

/// The headers of a session's next frame.
#[derive(Debug)]
enum NextHeaders {
    OfSegment(Expected),
    OfDatagram(ExpectedDatagram),
}

/// What became of a received frame.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives for a moment, and a flood of SYNs must not allocate"
)]
pub enum Input<'a> {
    /// It went to the session at that slot.
    Delivered(Slot),
    /// It waits for the session that is on its way to that slot.
    Held(Slot),
    /// It is sound, but no session here is its owner.
    Unclaimed(Packet<'a>),
    Dropped(Drop),
}

impl Stack {
    pub fn new(now: Instant) -> Stack {
        Stack {
            places: Vec::new(),
            free: Vec::new(),
            count: 0,
            timers: Wheel::new(now),
            pending: VecDeque::new(),
            tx_queues: WaitingQueues::default(),
            owing: None,
            stalled: Vec::new(),
            next_look: None,
            unresolved: Vec::new(),
            changed: Vec::new(),
            fragments: Reassembly::default(),
            early: 0,
            released: Vec::new(),
            mtus: PathMtus::default(),
            tried_generation: 0,
            counters: Counters::default(),
            fast_path_disabled: false,
            observer: None,
        }
    }

    /// Every frame takes the standard path from now on: what the fast one spares can be measured.
    pub fn take_all_apart(&mut self) {
        self.fast_path_disabled = true;
        for place in &mut self.places {
            if let SlotState::Taken(entry) = place {
                entry.expected = None;
            }
        }
    }

    /// `observer` is told of every step from now on.
    pub fn observe(&mut self, observer: fn(Step)) {
        self.observer = Some(observer);
    }

    /// Acknowledgements that are due for one full segment and a little more wait from now on for data to go with, until
    /// [`Stack::settle_acknowledgements`].
    pub fn defer_acknowledgements(&mut self) {
        self.owing.get_or_insert_default();
    }

    pub fn owes_acknowledgements(&self) -> bool {
        self.owing.as_ref().is_some_and(|owing| !owing.is_empty())
    }

    /// No data is about to go: the acknowledgements that wait for some go with the next [`Stack::output`].
    pub fn settle_acknowledgements(&mut self) {
        while let Some(slot) = self.owing.as_mut().and_then(Vec::pop) {
            if let Some(entry) = self.entry(slot) {
                entry.is_owing = false;
            }
            self.touch(Slot(slot));
        }
    }

    /// Promises a slot to a session that will come by [`Stack::insert_at`].
    pub fn reserve(&mut self) -> Slot {
        if let Some(slot) = self.free.pop() {
            let place = &mut self.places[slot as usize];
            if let SlotState::Free(before) = *place {
                *place = SlotState::Reserved(EarlyFrames::after(before));
            }
            return Slot(slot);
        }
        self.places
            .push(SlotState::Reserved(EarlyFrames::default()));
        Slot(u32::try_from(self.places.len() - 1).expect("fewer than 2^32 sessions in memory"))
    }

    /// Puts a session at a slot that [`Stack::reserve`] gave, and gives it what came for it already.
    pub fn insert_at(&mut self, now: Instant, slot: Slot, session: Session) {
        self.counters.came(&session);
        let place = SlotState::Taken(Box::new(SessionEntry {
            session,
            resolved: None,
            is_pending: false,
            is_owing: false,
            tx_queue: TxQueueId::MAIN,
            next_tx_queue: TxQueueId::MAIN,
            is_suspend_tx: false,
            expected: None,
            scheduled: Instant::FAR_FUTURE,
        }));
        let before = core::mem::replace(&mut self.places[slot.0 as usize], place);
        self.count += usize::from(!matches!(before, SlotState::Taken(_)));
        self.reschedule(now, slot.0);
        if self.tcp(slot).is_some() {
            self.touch(slot);
        }
        if let SlotState::Reserved(early) = before {
            for held in early.release(&mut self.early) {
                if let Input::Unclaimed(_) = self.input(now, &held.record, &held.frame) {
                    self.released.push(held.frame);
                }
            }
        }
    }

    pub fn insert(&mut self, now: Instant, session: Session) -> Slot {
        let slot = self.reserve();
        self.insert_at(now, slot, session);
        slot
    }

    /// Takes a session out, or gives a reserved slot back.
    pub fn remove(&mut self, slot: Slot) -> Option<Session> {
        let taken = self.take(slot);
        let place = self.places.get_mut(slot.0 as usize)?;
        if let SlotState::Reserved(early) = place {
            let early = core::mem::take(early);
            *place = SlotState::Free(early.before);
            self.free.push(slot.0);
            let frames = early.release(&mut self.early);
            self.released
                .extend(frames.into_iter().map(|held| held.frame));
        }
        taken
    }

    /// What waits for a session that is on its way to the slot: there is to be none.
    pub fn take_early(&mut self, slot: Slot) -> Vec<(RecordHeader, Vec<u8>)> {
        let Some(SlotState::Reserved(early)) = self.places.get_mut(slot.0 as usize) else {
            return Vec::new();
        };
        let held = core::mem::take(early).release(&mut self.early);
        held.into_iter()
            .map(|held| (held.record, held.frame))
            .collect()
    }

    pub fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Frames that waited for a session which did not come, or was another, since the last call.
    pub fn released(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.released.drain(..)
    }

    /// Takes a session out and keeps its slot promised, so that it can come back by
    /// [`Stack::insert_at`].
    pub fn take(&mut self, slot: Slot) -> Option<Session> {
        let place = self.places.get_mut(slot.0 as usize)?;
        let SlotState::Taken(entry) = place else {
            return None;
        };
        let before = generation(&entry.session);
        let taken =
            core::mem::replace(place, SlotState::Reserved(EarlyFrames::after(Some(before))));
        self.timers.clear(slot.0);
        self.pending.retain(|&pending| pending != slot.0);
        if let Some(owing) = &mut self.owing {
            owing.retain(|&owing| owing != slot.0);
        }
        self.tx_queues.forget(slot.0);
        self.stalled.retain(|&stalled| stalled != slot.0);
        self.changed.retain(|&(changed, _)| changed != slot);
        match taken {
            SlotState::Taken(entry) => {
                self.count -= 1;
                self.counters.went(&entry.session);
                Some(entry.session)
            }
            SlotState::Free(_) | SlotState::Reserved(_) => None,
        }
    }

    pub fn get(&self, slot: Slot) -> Option<&Session> {
        match self.places.get(slot.0 as usize) {
            Some(SlotState::Taken(entry)) => Some(&entry.session),
            _ => None,
        }
    }

    /// After changing the session, call [`Stack::touch`].
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut Session> {
        Some(&mut self.entry(slot.0)?.session)
    }

    pub fn tcp(&mut self, slot: Slot) -> Option<&mut TcpSession> {
        match self.get_mut(slot)? {
            Session::Tcp(session) => Some(session),
            Session::Udp(_) => None,
        }
    }

    pub fn udp(&mut self, slot: Slot) -> Option<&mut UdpSession> {
        match self.get_mut(slot)? {
            Session::Udp(session) => Some(session),
            Session::Tcp(_) => None,
        }
    }

    /// Is no session here?
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All sessions with their slots.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &Session)> {
        self.places
            .iter()
            .zip(0..)
            .filter_map(|(place, slot)| match place {
                SlotState::Taken(entry) => Some((Slot(slot), &entry.session)),
                _ => None,
            })
    }

    fn entries(&self) -> impl Iterator<Item = &SessionEntry> {
        self.places.iter().filter_map(|place| match place {
            SlotState::Taken(entry) => Some(&**entry),
            _ => None,
        })
    }

    fn entry(&mut self, slot: u32) -> Option<&mut SessionEntry> {
        entry_of(&mut self.places, slot)
    }

    /// The session at `slot` may have something to send: [`Stack::output`] will ask it.
    pub fn touch(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0)
            && !entry.is_pending
        {
            entry.is_pending = true;
            self.pending.push_back(slot.0);
        }
    }

    /// The session, which is about to leave, sends nothing more from here.
    pub fn suspend_tx(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.is_suspend_tx = true;
        }
    }

    /// It stays.
    pub fn resume_tx(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.is_suspend_tx = false;
        }
        self.touch(slot);
    }

    /// The application changed an IP option of the session: build its next header anew.
    pub fn forget_path(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.resolved = None;
        }
    }

    /// Keeps a fragment until its datagram is whole, which is then to be given to [`Stack::input`].
    pub fn reassemble(&mut self, now: Instant, record: &RecordHeader, frame: &[u8]) -> Reassembled {
        let reassembled = self.fragments.take_in(now, record, frame);
        if let Reassembled::Dropped(reason) = &reassembled {
            self.counters.count(Fate::Dropped(*reason));
        }
        reassembled
    }

    /// What packets to `destination` may hold; `None` without a route.
    pub fn path_mtu(&self, destination: IpAddr, routes: &Routes) -> Option<u32> {
        let path = routes.path(destination).ok()?;
        Some(self.mtus.limit(destination, path.mtu))
    }

    pub fn fragment_counters(&self) -> FragmentCounters {
        self.fragments.counters
    }

    /// All counters, in the order of [`counter_names`](crate::counter_names).
    pub fn counters(&self) -> [u64; COUNTERS] {
        self.counters.read(self.iter().map(|(_, session)| session))
    }

    /// Gives a received frame to its session.
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

    fn give<'a>(&mut self, now: Instant, record: &RecordHeader, frame: &'a [u8]) -> Input<'a> {
        if let Some(input) = self.give_expected(now, record, frame) {
            return input;
        }
        self.slow_path(now, record, frame)
    }

    /// The fast path: the frame is what its session expects, which one compare tells.
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

    /// A frame has taken the standard path: what comes after it may take the fast one.
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

    /// A session has taken a packet in.
    fn follow_up(&mut self, now: Instant, slot: Slot) {
        let Some(session) = self.tcp(slot) else {
            return;
        };
        if session.connection.has_output() && !self.defers(slot) {
            return self.touch(slot);
        }
        let Some(session) = self.tcp(slot) else {
            return;
        };
        session.connection.rest(now);
        let events = session.connection.events();
        self.note(slot.0, events);
        self.reschedule(now, slot.0);
    }

    /// The application has read: what the session has to send is sent by [`Stack::output`], but for what may wait.
    pub fn touch_after_read(&mut self, slot: Slot) {
        if !self.defers(slot) {
            self.touch(slot);
        }
    }

    /// Is all that the session has to send an acknowledgement that waits for data to go with?
    fn defers(&mut self, slot: Slot) -> bool {
        let Stack { places, owing, .. } = self;
        let (Some(owing), Some(entry)) = (owing, entry_of(places, slot.0)) else {
            return false;
        };
        let Session::Tcp(session) = &entry.session else {
            return false;
        };
        let defers = !entry.is_pending && session.connection.owes_acknowledgement();
        if defers && !entry.is_owing {
            entry.is_owing = true;
            owing.push(slot.0);
        }
        defers
    }

    fn note(&mut self, slot: u32, events: Events) {
        if !events.is_empty() {
            self.changed.push((Slot(slot), events));
        }
    }

    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Sessions whose state changed for their application since the last call.
    pub fn changed(&mut self) -> impl Iterator<Item = (Slot, Events)> + '_ {
        self.changed.drain(..)
    }

    /// Next hops that nobody has an address for since the last call: have them resolved.
    pub fn unresolved(&mut self) -> impl Iterator<Item = NextHop> + '_ {
        self.unresolved.drain(..)
    }

    /// Has [`Stack::output`] anything to do?
    pub fn awaits_output(&self, routes: &Routes) -> bool {
        self.has_output()
            || self.next_look.is_some()
            || !self.stalled.is_empty()
            || self.tried_generation != routes.generation()
    }

    /// Sends what is due until nothing is left, or only of sessions whose transmit queues are full.
    pub fn output(&mut self, now: Instant, routes: &Routes, wire: &mut impl Wire) {
        if self.tried_generation != routes.generation() {
            self.retry_stalled(routes);
        }
        self.admit_waiting(wire);
        while let Some(slot) = self.pending.pop_front() {
            self.output_one(now, slot, routes, wire);
        }
        self.tx_queues.end_turns();
        self.look_again(now);
    }

    /// Nobody says that routes have changed to a holder that sleeps.
    fn look_again(&mut self, now: Instant) {
        self.next_look = match self.next_look {
            _ if self.stalled.is_empty() => None,
            None => Some((now + LOOK_FIRST, LOOK_FIRST)),
            Some((at, wait)) if at <= now => {
                let wait = (wait * 2).min(LOOK_LAST);
                Some((now + wait, wait))
            }
            waiting => waiting,
        };
    }

    /// Is somebody waiting for the wire?
    pub fn has_output(&self) -> bool {
        !self.pending.is_empty() || self.tx_queues.has_waiting()
    }

    fn output_one(&mut self, now: Instant, slot: u32, routes: &Routes, wire: &mut impl Wire) {
        let Some(entry) = entry_of(&mut self.places, slot) else {
            return;
        };
        if entry.is_suspend_tx {
            entry.is_pending = false;
            return;
        }
        if !entry.enter(wire) {
            return self.tx_queues.wait(entry.tx_queue, slot);
        }
        entry.is_pending = false;
        wire.serve(Slot(slot));
        let SessionEntry {
            session: Session::Tcp(session),
            resolved,
            ..
        } = entry
        else {
            // All that a UDP session waits for is room.
            return self.note(slot, Events::WRITABLE);
        };
        let flow = &session.flow;
        let ends = Ends {
            protocol: Protocol::Tcp,
            source: flow.local.ip(),
            destination: flow.remote.ip(),
            scope: scope_of(flow.remote),
        };
        let is_current = resolved
            .as_ref()
            .is_some_and(|resolved| resolved.is_current(&ends, routes, &self.mtus));
        if !is_current {
            *resolved = ResolvedPath::find(ends, session.ip, routes, &self.mtus).ok();
        }
        let next_hop = resolved.as_ref().map(|resolved| resolved.unresolved);
        let (Some(resolved), Some(None)) = (resolved, next_hop) else {
            self.stalled.push(slot);
            self.unresolved.extend(next_hop.flatten());
            return;
        };
        if !is_current {
            let mtu = resolved.mtu_for(session.ip.discovery);
            session.connection.set_path_mtu(tcp_payload(mtu, flow));
        }
        let mut head = [0; HEAD_MAX];
        while let Some(segment) = session.connection.transmit(now) {
            tell(self.observer, Step::Headers);
            let head = resolved.template_for(&segment).tcp_head(
                &mut head,
                &segment.header,
                segment.payload,
                segment.segment_size,
                segment.codepoint,
            );
            wire.transmit(&Frame {
                head,
                payload: segment.payload,
            });
            tell(self.observer, Step::Session);
            if wire.is_full() {
                entry.is_pending = true;
                break;
            }
            if !session.connection.may_transmit() {
                session.connection.rest(now);
                break;
            }
        }
        if entry.is_pending {
            self.tx_queues.wait_for_next_turn(entry.tx_queue, slot);
        }
        let events = session.connection.events();
        self.note(slot, events);
        self.reschedule(now, slot);
    }

    /// The wheel only has to be told when a deadline moves forward: when it moves back, the early
    /// visit costs less than a change for each segment.
    fn reschedule(&mut self, now: Instant, slot: u32) {
        let Some(entry) = self.entry(slot) else {
            return;
        };
        let Session::Tcp(session) = &entry.session else {
            return;
        };
        let Some(deadline) = session.connection.deadline() else {
            return;
        };
        if deadline < entry.scheduled || entry.scheduled <= now {
            entry.scheduled = deadline;
            self.timers.set(slot, deadline);
        }
    }

    /// When to call [`Stack::expire`] next.
    pub fn deadline(&self) -> Option<Instant> {
        let earliest = |known: Option<Instant>, other: Option<Instant>| match (known, other) {
            (Some(known), Some(other)) => Some(known.min(other)),
            (known, other) => known.or(other),
        };
        let timers = earliest(self.timers.next(), self.fragments.deadline());
        let timers = earliest(timers, self.next_look.map(|(at, _)| at));
        earliest(timers, self.mtus.deadline())
    }

    /// Runs the timers that are due; follow with [`Stack::output`].
    pub fn expire(&mut self, now: Instant) {
        self.fragments.expire(now);
        self.mtus.expire(now);
        if self.timers.next().is_none_or(|next| next > now) {
            return;
        }
        let mut due = Vec::new();
        self.timers.expire(now, |slot| due.push(slot));
        for slot in due {
            let Some(entry) = self.entry(slot) else {
                continue;
            };
            entry.scheduled = Instant::FAR_FUTURE;
            let Session::Tcp(session) = &mut entry.session else {
                continue;
            };
            if session
                .connection
                .deadline()
                .is_some_and(|deadline| deadline <= now)
            {
                session.connection.on_timer(now);
                let events = session.connection.events();
                self.note(slot, events);
                self.touch(Slot(slot));
            }
            self.reschedule(now, slot);
        }
    }

    fn retry_stalled(&mut self, routes: &Routes) {
        self.tried_generation = routes.generation();
        for slot in core::mem::take(&mut self.stalled) {
            self.touch(Slot(slot));
        }
    }
}

/// Sends a segment that belongs to no session: a reset, a SYN cookie. False if there is no way to
/// its destination now.
pub fn send_segment(
    flow: &FlowKey,
    ip: IpOptions,
    header: &TcpHeader,
    routes: &Routes,
    wire: &mut impl Wire,
) -> bool {
    let ends = Ends {
        protocol: Protocol::Tcp,
        source: flow.local.ip(),
        destination: flow.remote.ip(),
        scope: scope_of(flow.remote),
    };
    let found = ResolvedPath::find(ends, ip, routes, &PathMtus::default()).ok();
    let Some(resolved) = found.filter(|resolved| resolved.unresolved.is_none()) else {
        return false;
    };
    let mut head = [0; HEAD_MAX];
    let head = resolved
        .template
        .tcp_head(&mut head, header, [&[], &[]], 0, Codepoint::NotEct);
    wire.transmit(&Frame {
        head,
        payload: [&[], &[]],
    });
    true
}

fn tell(observer: Option<fn(Step)>, step: Step) {
    if let Some(observer) = observer {
        observer(step);
    }
}

fn entry_of(places: &mut [SlotState], slot: u32) -> Option<&mut SessionEntry> {
    match places.get_mut(slot as usize) {
        Some(SlotState::Taken(entry)) => Some(entry),
        _ => None,
    }
}

/// The connection takes an expected segment in. Returns what it expects then, if anything.
fn take_segment(session: &mut TcpSession, segment: &Segment<'_>, now: Instant) -> Option<SeqNum> {
    let connection = &mut session.connection;
    let (header, payload) = (&segment.header, segment.payload);
    connection.on_marked_segment(now, segment.codepoint, header, payload);
    connection.next_expected()
}

fn generation(session: &Session) -> Generation {
    match session {
        Session::Tcp(session) => session.generation,
        Session::Udp(session) => session.generation,
    }
}

/// What is left of an IP packet for TCP's options and payload.
fn tcp_payload(mtu: u32, flow: &FlowKey) -> u16 {
    let headers = if flow.remote.is_ipv4() { 40 } else { 60 };
    u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX)
}

/// Gives a packet to its session, and tells what that means to the application; none if it is of
/// another protocol.
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
            // The filter looks at the peer only where it looks the flow up, which a handle spares it.
            if !is_of(&session.flow, packet) {
                return Err(Drop::ForeignPeer);
            }
            let connection = &mut session.connection;
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
            // RFC 8200 §8.1: IPv6 does not allow that, but to who asks for it (RFC 6936).
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

#[cfg(test)]
mod tests;
