//! TxQueues: where something is reserved for a flow or a port, the process that has such sessions gets a tap
//! for them beside its own (ADR 11). The thread that makes channels makes them; the process is told by its
//! alert, fetches the list, and says when nothing goes through one any more.
//!
//! What goes into a slow class by the process's own tap would hold up all others. So the sessions of a transmit queue that is
//! being made wait for it in the process, which hears of it before it has them; and those that were there when
//! something was reserved for them come into their class when the process says that they go through the transmit queue.
//! Neither lasts longer than [`PATIENCE`].

mod serve;

use std::os::fd::OwnedFd;

use portolan_proto::control::{TxQueueState, TxQueues};
use portolan_proto::qos::Scope;
use portolan_sys::tap::Tap;
use portolan_types::Instant;

use super::transmit::Class;

/// Those of one process.
#[derive(Debug, Default)]
pub struct TxQueueSet {
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
    /// Until then; none if that is over.
    deadline: Option<Instant>,
}

/// What sessions do that are to go through a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transition {
    /// They are in their class, and wait in their process until it has the transmit queue.
    Wait,
    /// They are in no class until they go through it: they were there before it.
    GoOn,
}

#[derive(Debug)]
enum Stage {
    Ordered,
    /// The process has not fetched it yet.
    Made(Tap),
    Handed(Tap),
    /// The process is to let it go.
    Leaving(Tap),
}

impl TxQueueSet {
    pub fn has_news(&self) -> bool {
        self.has_news
    }

    /// A number for one more.
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

    /// Ends patience where it is due; returns for how many, and when the next is.
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

    /// The taps that are still the process's, to be destroyed with it.
    pub fn into_taps(self) -> impl Iterator<Item = Tap> {
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

    /// What the process is told. Of one that is late it hears when it is there.
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
