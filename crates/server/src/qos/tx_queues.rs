//! Transmit queues: a process with sessions that have a flow's or port's reservation gets another tap for them (ADR
//! 11). The thread that makes channels makes the taps; the process is notified by its recall event, fetches the list,
//! and reports when it no longer uses one.
//!
//! Frames of a slow class on the process's own tap would hold up all others. So new sessions wait in their process for
//! a transmit queue that is being made, of which the process learns before it has them. Sessions that existed when
//! their reservation was made enter their class only when the process reports that they use the transmit queue. Neither
//! wait lasts longer than [`TIMEOUT`].

mod serve;

use std::os::fd::OwnedFd;

use portolan_proto::control::{TxQueueState, TxQueues};
use portolan_proto::qos::Scope;
use portolan_sys::tap::Tap;
use portolan_types::Instant;

use super::transmit::Class;

/// The transmit queues of one process.
#[derive(Debug, Default)]
pub(crate) struct TxQueueSet {
    tx_queues: Vec<TxQueueEntry>,
    main_burst: Option<u32>,
    has_news: bool,
}

#[derive(Debug)]
struct TxQueueEntry {
    number: u8,
    scope: Scope,
    class: Class,
    stage: Stage,
    transition: Transition,
    /// End of the transition; none if it is over.
    deadline: Option<Instant>,
}

/// What sessions do until they use a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transition {
    /// They are in their class, and wait in their process until it has the transmit queue.
    Wait,
    /// They existed before it, and are in no class until they use it.
    GoOn,
}

#[derive(Debug)]
enum Stage {
    Ordered,
    /// The process has not fetched it yet.
    Made(Tap),
    Handed(Tap),
    /// The process is to release it.
    Leaving(Tap),
}

impl TxQueueSet {
    pub(crate) fn has_news(&self) -> bool {
        self.has_news
    }

    /// Returns a free number.
    fn free_number(&self) -> Option<u8> {
        let is_free = |number: &u8| self.tx_queues.iter().all(|entry| entry.number != *number);
        (1..=TxQueues::MAX).find(is_free)
    }

    fn find_ordered(&mut self, number: u8) -> Option<&mut TxQueueEntry> {
        let is_it = |entry: &&mut TxQueueEntry| {
            entry.number == number && matches!(entry.stage, Stage::Ordered)
        };
        self.tx_queues.iter_mut().find(is_it)
    }

    fn of_scope(&mut self, scope: &Scope) -> Option<&mut TxQueueEntry> {
        let mut entries = self.tx_queues.iter_mut();
        entries.find(|entry| entry.is_for(scope))
    }

    /// Ends expired transitions; returns their number, and when the next one expires.
    fn lose_patience(&mut self, now: Instant) -> (u64, Option<Instant>) {
        let mut lost = 0;
        for entry in &mut self.tx_queues {
            if entry.deadline.is_some_and(|until| until <= now) {
                entry.deadline = None;
                lost += 1;
            }
        }
        (
            lost,
            self.tx_queues
                .iter()
                .filter_map(|entry| entry.deadline)
                .min(),
        )
    }

    /// Returns the taps that the process still has, to be destroyed with it.
    pub(crate) fn into_taps(self) -> impl Iterator<Item = Tap> {
        self.tx_queues
            .into_iter()
            .filter_map(|entry| match entry.stage {
                Stage::Ordered => None,
                Stage::Made(tap) | Stage::Handed(tap) | Stage::Leaving(tap) => Some(tap),
            })
    }
}

impl TxQueueEntry {
    fn is_for(&self, scope: &Scope) -> bool {
        self.scope == *scope && !matches!(self.stage, Stage::Leaving(_))
    }

    /// Returns the state that the process is told; a late transmit queue is not mentioned before it is made.
    fn state(&self) -> Option<TxQueueState> {
        match self.stage {
            Stage::Ordered => self.deadline.map(|_| TxQueueState::Awaited),
            Stage::Made(_) => Some(TxQueueState::New),
            Stage::Handed(_) => Some(TxQueueState::Open),
            Stage::Leaving(_) => None,
        }
    }

    /// Shares the tap with the process.
    fn hand_over(&mut self) -> std::io::Result<Option<OwnedFd>> {
        let Stage::Made(tap) = &self.stage else {
            return Ok(None);
        };
        let fd = tap.fd.try_clone()?;
        if let Stage::Made(tap) = std::mem::replace(&mut self.stage, Stage::Ordered) {
            self.stage = Stage::Handed(tap);
        }
        if self.transition == Transition::Wait {
            self.deadline = None;
        }
        Ok(Some(fd))
    }
}
