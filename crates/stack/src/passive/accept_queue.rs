//! The SYN queue and the accept queue of one listener: where each connection waits that nobody has accepted, and
//! what is to become of a SYN or a completed handshake. The connections themselves lie elsewhere.

use core::hash::Hash;
use std::collections::{HashMap, VecDeque};

use portolan_proto::control;
use portolan_types::Instant;

use super::rules::CookieUse;

/// Linux's default `net.core.somaxconn`.
pub const SOMAXCONN: u32 = 4096;

/// What to do with a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynVerdict {
    /// Keep state for it and answer.
    Open,
    /// Answer with a cookie and keep nothing.
    Cookie,
    /// The accept queue is full; the peer will try again.
    Drop,
}

/// What became of a connection whose handshake is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queueing {
    Queued,
    /// The accept queue has no room for it, and it is counted as a handshake still.
    CrowdedOut,
    /// It waits already, or was opened by a cookie and has no place here.
    Waits,
}

/// Where a connection waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Handshake,
    /// Established, and offered when its first bytes arrive or at that time (`TCP_DEFER_ACCEPT`); counted as a handshake.
    Deferred(Instant),
    /// Established, and still counted as a handshake: the accept queue had no room for it.
    CrowdedOut,
    /// Established, not yet offered.
    Ready,
    /// Offered to whoever accepts next.
    Offered,
}

/// The queues of one listener; `Id` is what its owner knows connections by.
#[derive(Debug)]
pub struct AcceptQueue<Id> {
    limit: u32,
    places: HashMap<Id, Place>,
    crowded_out: VecDeque<Id>,
    ready: VecDeque<Id>,
    /// Of the places, those before the accept queue.
    handshakes: u32,
}

impl<Id: Copy + Eq + Hash> AcceptQueue<Id> {
    /// `backlog` is the argument of `listen`; negative values arrive as large ones, as in Linux.
    pub fn new(backlog: u32) -> AcceptQueue<Id> {
        AcceptQueue {
            limit: backlog.min(SOMAXCONN),
            places: HashMap::new(),
            crowded_out: VecDeque::new(),
            ready: VecDeque::new(),
            handshakes: 0,
        }
    }

    pub fn resize(&mut self, backlog: u32) {
        self.limit = backlog.min(SOMAXCONN);
    }

    /// Connections that may wait to be accepted.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Connections that wait to be accepted.
    pub fn waiting(&self) -> u32 {
        // As many as descriptors and slots, at most.
        self.places.len() as u32 - self.handshakes
    }

    /// `tcp_conn_request`: a full accept queue drops the SYN, a full SYN queue makes it a cookie.
    pub fn on_syn(&self, cookies: CookieUse) -> SynVerdict {
        let is_crowded = self.is_crowded();
        match cookies {
            _ if self.is_full() => SynVerdict::Drop,
            CookieUse::Always => SynVerdict::Cookie,
            CookieUse::WhenFull if is_crowded => SynVerdict::Cookie,
            CookieUse::Never if is_crowded => SynVerdict::Drop,
            CookieUse::WhenFull | CookieUse::Never => SynVerdict::Open,
        }
    }

    /// `inet_csk_reqsk_queue_is_full`: as many handshakes as may be.
    pub fn is_crowded(&self) -> bool {
        self.handshakes >= self.limit.max(1)
    }

    /// `sk_acceptq_is_full`: one more than the backlog may wait.
    pub fn is_full(&self) -> bool {
        self.waiting() > self.limit
    }

    pub fn has_room(&self) -> bool {
        !self.is_full()
    }

    /// As the packet filter is told.
    pub fn state(&self) -> control::AcceptQueue {
        if self.is_full() {
            control::AcceptQueue::Full
        } else {
            control::AcceptQueue::HasRoom
        }
    }

    /// Does the connection wait here at all?
    pub fn has(&self, id: Id) -> bool {
        self.places.contains_key(&id)
    }

    pub fn is_handshake(&self, id: Id) -> bool {
        let place = self.places.get(&id);
        matches!(place, Some(Place::Handshake | Place::Deferred(_)))
    }

    /// A connection whose handshake is done waits for its first bytes until then.
    pub fn defer(&mut self, id: Id, until: Instant) {
        if let Some(place @ Place::Handshake) = self.places.get_mut(&id) {
            *place = Place::Deferred(until);
        }
    }

    /// Returns until when the connection waits for its first bytes, if it does.
    pub fn deferred_until(&self, id: Id) -> Option<Instant> {
        match self.places.get(&id) {
            Some(Place::Deferred(until)) => Some(*until),
            _ => None,
        }
    }

    /// A connection whose handshake is not done.
    pub fn handshake_started(&mut self, id: Id) {
        if self.places.insert(id, Place::Handshake).is_none() {
            self.handshakes += 1;
        }
    }

    /// One that came to nothing.
    pub fn handshake_failed(&mut self, id: Id) {
        match self.places.get(&id) {
            Some(Place::CrowdedOut) => self.crowded_out.retain(|other| *other != id),
            Some(Place::Handshake | Place::Deferred(_)) => {}
            Some(Place::Ready | Place::Offered) | None => return,
        }
        self.places.remove(&id);
        self.handshakes -= 1;
    }

    /// A connection's handshake is done, by its own segments or by a cookie.
    pub fn handshake_done(&mut self, id: Id) -> Queueing {
        match self.places.get(&id) {
            // Bytes were acknowledged that came with it: it can only wait. Others are held before they are done.
            Some(Place::Handshake | Place::Deferred(_)) if self.is_full() => {
                self.places.insert(id, Place::CrowdedOut);
                self.crowded_out.push_back(id);
                return Queueing::CrowdedOut;
            }
            Some(Place::Handshake | Place::Deferred(_)) => self.handshakes -= 1,
            None if self.has_room() => {}
            Some(Place::CrowdedOut | Place::Ready | Place::Offered) | None => {
                return Queueing::Waits;
            }
        }
        self.queue_up(id);
        Queueing::Queued
    }

    fn queue_up(&mut self, id: Id) {
        self.places.insert(id, Place::Ready);
        self.ready.push_back(id);
    }

    /// The next that the accept queue had no room for, if it has by now: it is queued.
    pub fn admit_crowded_out(&mut self) -> Option<Id> {
        if self.is_full() {
            return None;
        }
        let id = self.crowded_out.pop_front()?;
        self.handshakes -= 1;
        self.queue_up(id);
        Some(id)
    }

    /// The next to be offered.
    pub fn next_ready(&self) -> Option<Id> {
        self.ready.front().copied()
    }

    /// The next one is offered.
    pub fn note_offered(&mut self) -> Option<Id> {
        let id = self.ready.pop_front()?;
        self.places.insert(id, Place::Offered);
        Some(id)
    }

    /// What was offered is accepted.
    pub fn accepted(&mut self, id: Id) {
        if self.places.get(&id) == Some(&Place::Offered) {
            self.places.remove(&id);
        }
    }

    /// One that was accepted waits again, as the first.
    pub fn return_first(&mut self, id: Id) {
        self.places.insert(id, Place::Ready);
        self.ready.push_front(id);
    }

    /// All connections that nobody has accepted; those that are ready in their order.
    pub fn unaccepted(&self) -> impl Iterator<Item = Id> + '_ {
        let others = self.places.iter().filter_map(|(id, place)| match place {
            Place::Handshake | Place::Deferred(_) | Place::Offered => Some(id),
            Place::CrowdedOut | Place::Ready => None,
        });
        self.ready
            .iter()
            .chain(&self.crowded_out)
            .chain(others)
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(backlog: u32) -> AcceptQueue<u32> {
        AcceptQueue::new(backlog)
    }

    fn done(queue: &mut AcceptQueue<u32>, id: u32) -> Queueing {
        queue.handshake_started(id);
        queue.handshake_done(id)
    }

    #[test]
    fn a_full_syn_queue_answers_with_cookies() {
        let mut queue = queue(2);
        queue.handshake_started(1);
        assert_eq!(queue.on_syn(CookieUse::WhenFull), SynVerdict::Open);
        queue.handshake_started(2);
        assert_eq!(queue.on_syn(CookieUse::WhenFull), SynVerdict::Cookie);
        queue.handshake_failed(1);
        assert_eq!(queue.on_syn(CookieUse::WhenFull), SynVerdict::Open);
    }

    #[test]
    fn cookies_may_be_for_always_or_for_never() {
        let mut queue = queue(1);
        assert_eq!(queue.on_syn(CookieUse::Always), SynVerdict::Cookie);
        assert_eq!(queue.on_syn(CookieUse::Never), SynVerdict::Open);
        queue.handshake_started(1);
        assert_eq!(queue.on_syn(CookieUse::Never), SynVerdict::Drop);
    }

    #[test]
    fn one_more_than_the_backlog_may_wait_and_then_syns_are_dropped() {
        let mut queue = queue(1);
        done(&mut queue, 1);
        assert!(queue.has_room());
        done(&mut queue, 2);
        assert!(queue.is_full());
        assert_eq!(queue.on_syn(CookieUse::WhenFull), SynVerdict::Drop);
        queue.note_offered();
        assert!(queue.is_full(), "nobody has accepted it");
        queue.accepted(1);
        assert_eq!(queue.on_syn(CookieUse::WhenFull), SynVerdict::Open);
    }

    #[test]
    fn a_backlog_of_zero_still_opens_one() {
        assert_eq!(queue(0).on_syn(CookieUse::WhenFull), SynVerdict::Open);
    }

    #[test]
    fn the_backlog_is_capped() {
        assert_eq!(queue(u32::MAX).limit(), SOMAXCONN);
    }

    #[test]
    fn a_full_accept_queue_leaves_connections_where_they_are_until_somebody_is_accepted() {
        let mut queue = queue(1);
        assert_eq!(done(&mut queue, 1), Queueing::Queued);
        assert_eq!(done(&mut queue, 2), Queueing::Queued);
        assert_eq!(done(&mut queue, 3), Queueing::CrowdedOut);
        assert_eq!(queue.handshake_done(3), Queueing::Waits);
        assert_eq!(queue.admit_crowded_out(), None);
        assert_eq!(queue.next_ready(), Some(1));
        queue.note_offered();
        queue.accepted(1);
        assert_eq!(queue.admit_crowded_out(), Some(3));
        assert!(queue.is_full());
    }

    #[test]
    fn one_that_is_crowded_out_and_fails_leaves_its_place() {
        let mut queue = queue(0);
        done(&mut queue, 1);
        done(&mut queue, 2);
        assert!(queue.is_crowded());
        queue.handshake_failed(2);
        assert!(!queue.is_crowded());
        assert_eq!(queue.unaccepted().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_deferred_connection_is_a_handshake_until_its_time() {
        let (at, later) = (Instant::from_millis(1), Instant::from_millis(2));
        let mut queue = queue(1);
        queue.handshake_started(1);
        queue.defer(1, at);
        queue.defer(1, later);
        assert_eq!(queue.deferred_until(1), Some(at), "once");
        assert!(queue.is_handshake(1) && queue.is_crowded());
        assert_eq!(queue.unaccepted().collect::<Vec<_>>(), [1]);
        assert_eq!(queue.handshake_done(1), Queueing::Queued);
        assert!(queue.deferred_until(1).is_none() && !queue.is_crowded());
    }

    #[test]
    fn a_connection_is_unaccepted_wherever_it_waits() {
        let mut queue = queue(0);
        done(&mut queue, 1);
        queue.note_offered();
        done(&mut queue, 2);
        queue.handshake_started(3);
        let mut unaccepted: Vec<u32> = queue.unaccepted().collect();
        unaccepted.sort_unstable();
        assert_eq!(unaccepted, [1, 2, 3]);
    }
}
