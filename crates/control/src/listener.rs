//! The queues of a listener: handshakes, connections that wait to be offered, connections that were
//! offered. And the process that performs its handshakes, if one does (ADR 15).

use std::collections::{HashSet, VecDeque};

use portolan_proto::control::{AcceptQueue, Caching, HandshakeOptions};
use portolan_proto::report::{CookieCounts, FloodCounts};
use portolan_stack::{Backlog, CookieUse, FloodDetector, SynVerdict};
use portolan_tcp::isn::Secret;
use portolan_types::{ChannelId, FlowKey, SessionId, Slot};

/// The process that performs a listener's handshakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delegate {
    pub channel: ChannelId,
    /// Where the port's segments go there.
    pub slot: Slot,
    /// As it said last.
    pub queue: AcceptQueue,
    /// It was asked to end it.
    pub is_wanted_back: bool,
}

/// Flows to a delegated listener of which the filter knows no rows.
#[derive(Debug, Default)]
pub struct ExemptFlows {
    pub flows: Vec<FlowKey>,
    /// There are others, which found no place: the filter must not answer for the listener.
    pub is_incomplete: bool,
}

/// What became of a connection whose handshake is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queueing {
    Queued,
    /// The accept queue has no room for it, and it is counted as a handshake still.
    CrowdedOut,
    /// It was crowded out before, and waits.
    Waits,
}

#[derive(Debug)]
pub struct Listener {
    backlog: Backlog,
    pub options: HandshakeOptions,
    /// Connections whose text was taken before their handshake was done.
    pub fast: Vec<SessionId>,
    handshakes: HashSet<SessionId>,
    /// Established, and still counted as handshakes: the accept queue had no room for them.
    crowded_out: VecDeque<SessionId>,
    /// Established, not yet offered: the descriptor's queue was full.
    ready: VecDeque<SessionId>,
    /// Offered, not yet cached.
    offered: HashSet<SessionId>,
    /// Opens within the host that wait for room.
    pub(crate) local_opens: VecDeque<SessionId>,
    /// The descriptor's queue is full: we wait for room, and leave connections to the kernel.
    pub is_blocked: bool,
    /// Another process than the one that accepted it was the first to use the last connection.
    pub is_for_children: bool,
    /// Performs the handshakes; without one the server does.
    pub delegate: Option<Delegate>,
    /// Of the processes that do, or did.
    pub lent_secret: Option<Secret>,
    /// Of the SYNs that were not kept.
    pub flood_detector: FloodDetector,
    /// Of the handshakes that the server performs, and what those who did before it have claimed.
    pub cookies: CookieCounts,
    pub floods: FloodCounts,
    pub exempt: Option<ExemptFlows>,
}

impl Listener {
    pub fn new(backlog: u32) -> Listener {
        Listener {
            backlog: Backlog::new(backlog),
            options: HandshakeOptions::default(),
            fast: Vec::new(),
            handshakes: HashSet::new(),
            crowded_out: VecDeque::new(),
            ready: VecDeque::new(),
            offered: HashSet::new(),
            local_opens: VecDeque::new(),
            is_blocked: false,
            is_for_children: false,
            delegate: None,
            lent_secret: None,
            flood_detector: FloodDetector::default(),
            cookies: CookieCounts::default(),
            floods: FloodCounts::default(),
            exempt: None,
        }
    }

    /// Connections that may wait to be accepted.
    pub fn backlog(&self) -> u32 {
        self.backlog.limit()
    }

    /// Connections that nobody has accepted.
    pub fn waiting(&self) -> u32 {
        self.backlog.waiting()
    }

    pub fn resize(&mut self, backlog: u32) {
        self.backlog.resize(backlog);
    }

    pub fn on_syn(&self, cookies: CookieUse) -> SynVerdict {
        self.backlog.on_syn(cookies)
    }

    pub fn caching(&self) -> Caching {
        let is_concurrent = self.options.is_concurrent_server;
        if is_concurrent.unwrap_or(self.is_for_children) {
            Caching::WithFirstUse
        } else {
            Caching::WithAccept
        }
    }

    /// A connection whose handshake is not done.
    pub fn handshake_started(&mut self, id: SessionId) {
        self.handshakes.insert(id);
        self.backlog.handshake_started();
    }

    /// One that came to nothing.
    pub fn handshake_failed(&mut self, id: SessionId) {
        let count = self.crowded_out.len();
        self.crowded_out.retain(|other| *other != id);
        if self.handshakes.remove(&id) || self.crowded_out.len() < count {
            self.backlog.handshake_ended();
        }
    }

    /// A connection's handshake is done, by its own segments or by a cookie.
    pub fn handshake_done(&mut self, id: SessionId) -> Queueing {
        let was_handshake = self.handshakes.remove(&id);
        match (self.backlog.is_full(), was_handshake) {
            // Bytes were acknowledged that came with it: it can only wait. Others are held before they are done.
            (true, true) => {
                self.crowded_out.push_back(id);
                Queueing::CrowdedOut
            }
            (true, false) => Queueing::Waits,
            (false, was_handshake) => {
                if was_handshake {
                    self.backlog.handshake_ended();
                }
                self.queue_up(id);
                Queueing::Queued
            }
        }
    }

    fn queue_up(&mut self, id: SessionId) {
        self.backlog.queued();
        self.ready.push_back(id);
    }

    /// The next that the accept queue had no room for, if it has by now: it is queued.
    pub fn admit_crowded_out(&mut self) -> Option<SessionId> {
        if !self.has_room() {
            return None;
        }
        let id = self.crowded_out.pop_front()?;
        self.backlog.handshake_ended();
        self.queue_up(id);
        Some(id)
    }

    /// The next to be offered.
    pub fn next_ready(&self) -> Option<SessionId> {
        self.ready.front().copied()
    }

    /// The next one is offered.
    pub fn note_offered(&mut self) {
        self.offered.extend(self.ready.pop_front());
    }

    /// Are there as many handshakes as may be?
    pub fn is_crowded(&self) -> bool {
        self.backlog.has_crowd()
    }

    /// Has the accept queue room for one more?
    pub fn has_room(&self) -> bool {
        !self.backlog.is_full()
    }

    /// The session is accepted.
    pub fn has_accepted(&mut self, id: SessionId) {
        if self.offered.remove(&id) {
            self.backlog.accepted();
        }
    }

    /// All connections that nobody has accepted.
    pub fn unaccepted(&self) -> impl Iterator<Item = SessionId> + '_ {
        let unfinished = self.handshakes.iter().chain(&self.ready);
        let all = unfinished.chain(&self.crowded_out).chain(&self.offered);
        all.copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(listener: &mut Listener, id: u64) -> Queueing {
        listener.handshake_started(SessionId(id));
        listener.handshake_done(SessionId(id))
    }

    #[test]
    fn a_full_accept_queue_leaves_connections_where_they_are_until_somebody_is_accepted() {
        let mut listener = Listener::new(1);
        // As in Linux, one more than the backlog may wait.
        assert_eq!(done(&mut listener, 1), Queueing::Queued);
        assert_eq!(done(&mut listener, 2), Queueing::Queued);
        assert_eq!(done(&mut listener, 3), Queueing::CrowdedOut);
        assert_eq!(listener.handshake_done(SessionId(3)), Queueing::Waits);
        assert_eq!(listener.admit_crowded_out(), None);
        assert_eq!(listener.next_ready(), Some(SessionId(1)));
        listener.note_offered();
        listener.has_accepted(SessionId(1));
        assert_eq!(listener.admit_crowded_out(), Some(SessionId(3)));
        assert!(!listener.has_room());
    }

    #[test]
    fn a_connection_is_unaccepted_wherever_it_waits() {
        let mut listener = Listener::new(0);
        done(&mut listener, 1);
        listener.note_offered();
        done(&mut listener, 2);
        listener.handshake_started(SessionId(3));
        let mut unaccepted: Vec<SessionId> = listener.unaccepted().collect();
        unaccepted.sort_unstable();
        assert_eq!(unaccepted, [1, 2, 3].map(SessionId));
    }
}
