//! The session table.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::VecDeque;

use portolan_proto::filter::RecordHeader;
use portolan_tcp::Events;
use portolan_timers::Wheel;
use portolan_types::{Generation, Instant, Slot};

use crate::counters::{COUNTERS, Counters, Fate, smoothed_rtt};
use crate::expected::{Expected, ExpectedDatagram};
use crate::fragments::{FragmentCounters, Reassembled, Reassembly};
use crate::frame::TxQueueId;
use crate::packet::{Drop, Packet};
use crate::pmtu::PathMtus;
use crate::resolved_path::{NextHop, ResolvedPath};
use crate::routes::Routes;
use crate::session::{Session, TcpSession};
use crate::udp::UdpSession;

mod datagrams;
mod early;
mod input;
mod output;
mod tx_queues;

pub use datagrams::{SendError, Sending};
use early::EarlyFrames;
pub(crate) use early::OF_NEXT;
pub use output::send_segment;
use tx_queues::WaitingQueues;

/// First and last interval at which a holder checks the routes for sessions that wait for a route or a
/// neighbour.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_LAST: Duration = Duration::from_secs(1);

/// The sessions of one holder, and their pending output.
#[derive(Debug)]
pub struct Stack {
    places: Vec<SlotState>,
    free: Vec<u32>,
    /// Number of sessions present.
    count: usize,
    timers: Wheel,
    /// Sessions that may have something to send, each at most once, here or at its transmit queue.
    pending: VecDeque<u32>,
    tx_queues: WaitingQueues,
    /// Sessions whose acknowledgements are deferred until data can carry them, if that is enabled.
    owing: Option<Vec<u32>>,
    /// Sessions that wait for a route or a neighbour.
    stalled: Vec<u32>,
    /// When to check for them next, and the interval to the check after that.
    next_look: Option<(Instant, Duration)>,
    unresolved: Vec<NextHop>,
    changed: Vec<(Slot, Events)>,
    fragments: Reassembly,
    /// Bytes of all frames waiting for sessions that have not arrived.
    early: usize,
    /// Frames that waited for a session that did not arrive.
    released: Vec<Vec<u8>>,
    mtus: PathMtus,
    /// Generation of the routes at the last attempt for `stalled`.
    tried_generation: u32,
    pub(crate) counters: Counters,
    fast_path_disabled: bool,
    /// A session that sent in the last round has more data than its windows permit.
    awaits_window: bool,
    observer: Option<fn(Step)>,
}

/// A step of the stack for a session, reported to an observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Comparing, parsing or writing the headers of a frame, including checksums.
    Headers,
    /// Processing input in the session, or collecting its output.
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
    /// Path of the last packet sent.
    resolved: Option<ResolvedPath>,
    /// The session is in `pending`, or waits at its transmit queue.
    is_pending: bool,
    /// The session is in `owing`.
    is_owing: bool,
    tx_queue: TxQueueId,
    /// The transmit queue to use once no frames wait in the current one.
    next_tx_queue: TxQueueId,
    /// Sending is suspended.
    is_suspend_tx: bool,
    expected: Option<Box<NextHeaders>>,
    /// When the wheel will check it; never later than its deadline.
    scheduled: Instant,
    /// The round-trip time that the histogram has counted last.
    counted_rtt: Option<Duration>,
}

/// The expected headers of a session's next frame.
#[derive(Debug)]
enum NextHeaders {
    OfSegment(Expected),
    OfDatagram(ExpectedDatagram),
}

/// The result for a received frame.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives for a moment, and a flood of SYNs must not allocate"
)]
pub enum Input<'a> {
    /// Delivered to the session at that slot.
    Delivered(Slot),
    /// Waits for the session that will arrive at that slot.
    Held(Slot),
    /// The frame is valid, but its session is not here.
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
            awaits_window: false,
            observer: None,
        }
    }

    /// Disables the fast path, so that its savings can be measured.
    pub fn take_all_apart(&mut self) {
        self.fast_path_disabled = true;
        for place in &mut self.places {
            if let SlotState::Taken(entry) = place {
                entry.expected = None;
            }
        }
    }

    /// Calls `observer` on every step from now on.
    pub fn observe(&mut self, observer: fn(Step)) {
        self.observer = Some(observer);
    }

    /// Defers acknowledgements that are due for one full segment and a little more until data can carry them, or
    /// [`Stack::settle_acknowledgements`] is called.
    pub fn defer_acknowledgements(&mut self) {
        self.owing.get_or_insert_default();
    }

    pub fn owes_acknowledgements(&self) -> bool {
        self.owing.as_ref().is_some_and(|owing| !owing.is_empty())
    }

    /// No data is about to be sent: sends deferred acknowledgements with the next [`Stack::output`].
    pub fn settle_acknowledgements(&mut self) {
        while let Some(slot) = self.owing.as_mut().and_then(Vec::pop) {
            if let Some(entry) = self.entry(slot) {
                entry.is_owing = false;
            }
            self.touch(Slot(slot));
        }
    }

    /// Reserves a slot for a session that [`Stack::insert_at`] will insert.
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

    /// Inserts a session at a slot returned by [`Stack::reserve`], and delivers the frames that arrived for it earlier.
    pub fn insert_at(&mut self, now: Instant, slot: Slot, session: Session) {
        self.counters.came(&session);
        let generation = generation(&session);
        let place = SlotState::Taken(Box::new(SessionEntry {
            // Its former holder has counted it.
            counted_rtt: smoothed_rtt(&session),
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
                let input = self.input(now, &held.record_for(generation), &held.frame);
                if matches!(
                    input,
                    Input::Unclaimed(_) | Input::Dropped(Drop::ForeignPeer)
                ) {
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

    /// Removes a session, or frees a reserved slot.
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

    /// Takes the frames that wait at a reserved slot for which no session will be inserted.
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

    /// Returns the frames, since the last call, that waited for a session that did not arrive, or was another one.
    pub fn released(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.released.drain(..)
    }

    /// Removes a session and keeps its slot reserved, so that [`Stack::insert_at`] can put it back.
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
            SlotState::Taken(mut entry) => {
                self.count -= 1;
                self.counters.went(&entry.session);
                self.counters
                    .observe(&entry.session, &mut entry.counted_rtt);
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

    /// Whether there are no sessions.
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

    /// The session at `slot` may have something to send: [`Stack::output`] will check it.
    pub fn touch(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0)
            && !entry.is_pending
        {
            entry.is_pending = true;
            self.pending.push_back(slot.0);
        }
    }

    /// Stops sending for the session, which is about to leave.
    pub fn suspend_tx(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.is_suspend_tx = true;
        }
    }

    /// Resumes sending for the session, which does not leave after all.
    pub fn resume_tx(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.is_suspend_tx = false;
        }
        self.touch(slot);
    }

    /// The application changed an IP option of the session: the next header is built anew.
    pub fn forget_path(&mut self, slot: Slot) {
        if let Some(entry) = self.entry(slot.0) {
            entry.resolved = None;
        }
    }

    /// Keeps a fragment until its datagram is complete; the caller then passes that to [`Stack::input`].
    pub fn reassemble(&mut self, now: Instant, record: &RecordHeader, frame: &[u8]) -> Reassembled {
        let reassembled = self.fragments.add(now, record, frame);
        if let Reassembled::Dropped(reason) = &reassembled {
            self.counters.count(Fate::Dropped(*reason));
        }
        reassembled
    }

    /// MTU of the path to `destination`; `None` without a route.
    pub fn path_mtu(&self, destination: IpAddr, routes: &Routes) -> Option<u32> {
        let path = routes.path(destination).ok()?;
        Some(self.mtus.limit(destination, path.mtu))
    }

    pub fn fragment_counters(&self) -> FragmentCounters {
        self.fragments.counters
    }

    /// Counts the round-trip times of all connections that have changed since the last call. Called now and then by the
    /// holder: no packet's way leads here.
    pub fn observe_round_trips(&mut self) {
        for place in &mut self.places {
            if let SlotState::Taken(entry) = place {
                self.counters
                    .observe(&entry.session, &mut entry.counted_rtt);
            }
        }
    }

    /// All counters, in the order of [`counter_names`](crate::counter_names), then the histogram
    /// ([`round_trip_times`](crate::round_trip_times)).
    pub fn counters(&self) -> [u64; COUNTERS] {
        self.counters.read(self.iter().map(|(_, session)| session))
    }

    fn note(&mut self, slot: u32, events: Events) {
        if !events.is_empty() {
            self.changed.push((Slot(slot), events));
        }
    }

    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Returns the sessions whose state has changed for their application since the last call.
    pub fn changed(&mut self) -> impl Iterator<Item = (Slot, Events)> + '_ {
        self.changed.drain(..)
    }

    /// Returns the next hops, since the last call, whose link-layer addresses the caller must have resolved.
    pub fn unresolved(&mut self) -> impl Iterator<Item = NextHop> + '_ {
        self.unresolved.drain(..)
    }
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

fn generation(session: &Session) -> Generation {
    match session {
        Session::Tcp(session) => session.generation,
        Session::Udp(session) => session.generation,
    }
}

#[cfg(test)]
mod tests;
