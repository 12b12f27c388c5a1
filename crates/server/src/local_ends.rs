//! The ends of local sessions (ADR 9), and whose notifier wakes whom.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use portolan_control::ClaimId;
use portolan_local::Local;
use portolan_proto::local::{Side, holder};
use portolan_sys::shm::Rings;
use portolan_sys::wait::{WakeAddress, WakeReceiver, WakeSender, wake_receiver};
use portolan_types::SessionId;

use crate::handles::HandleTable;
use crate::random::random_u64;

/// Words of watched ends that are read in one turn.
const WORDS: usize = 256;

/// One end, whoever holds it.
#[derive(Debug)]
pub struct LocalEnd {
    pub(crate) side: Side,
    pub(crate) peer: SessionId,
    pub(crate) memory: Arc<Memory>,
    /// While the server moves its bytes, or waits for them.
    pub(crate) watched: Option<Local>,
    /// It stands in [`Locals::round`].
    pub(crate) is_listed: bool,
    /// It stands in [`Locals::due`].
    pub(crate) is_due: bool,
    /// The port of the other end, which was closed and waits for the FIN of this one.
    pub(crate) awaited_by: Option<ClaimId>,
    /// The server has closed or reset it. The flags in the memory do not tell: its holder writes them.
    pub(crate) has_ended: bool,
}

/// What both ends share.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) fd: OwnedFd,
    pub(crate) rings: Arc<Rings>,
}

impl LocalEnd {
    /// Says whose notifier is this end's.
    pub(crate) fn give_to(&self, number: u64) {
        let end = self.memory.rings.ends().of(self.side);
        end.notifier.0.number.store(number, Release);
    }

    /// The end as its last holder left it.
    pub fn open(&self) -> Local {
        Local::new(Arc::clone(&self.memory.rings), self.side)
    }
}

/// A process's notifier.
#[derive(Debug)]
pub struct ProcessNotifier {
    pub number: u64,
    pub(crate) wake_sender: WakeSender,
    /// Where its peers' sockets are connected to: each has its own.
    pub(crate) address: WakeAddress,
}

impl ProcessNotifier {
    pub fn new(address: WakeAddress) -> Result<ProcessNotifier, rustix::io::Errno> {
        Ok(ProcessNotifier {
            number: random_u64().max(holder::FIRST),
            wake_sender: address.wake_sender()?,
            address,
        })
    }
}

/// All local sessions.
#[derive(Debug)]
pub struct Locals {
    pub wake_receiver: WakeReceiver,
    pub(crate) wake_sender: WakeSender,
    /// The watched ends, in the order in which their words are read.
    pub(crate) round: VecDeque<SessionId>,
    /// How many words are still to be read since the notifier was set.
    pub(crate) unread: usize,
    /// Ends to attend to, in this order.
    pub(crate) due: VecDeque<SessionId>,
    pub(crate) address: WakeAddress,
}

impl Locals {
    /// Names of wake-up sockets stand in `directory` for a moment.
    pub fn new(directory: &std::path::Path) -> Result<Locals, rustix::io::Errno> {
        let (wake_receiver, address) = wake_receiver(directory)?;
        Ok(Locals {
            wake_receiver,
            wake_sender: address.wake_sender()?,
            address,
            round: VecDeque::new(),
            unread: 0,
            due: VecDeque::new(),
        })
    }

    /// Has the end attended to in one of the next turns.
    pub(crate) fn make_due(&mut self, id: SessionId, handles: &mut HandleTable) {
        if let Some(end) = handles.local_mut(id)
            && !std::mem::replace(&mut end.is_due, true)
        {
            self.due.push_back(id);
        }
    }

    /// Reads the words of some watched ends, and finds those whose peers have news.
    pub(crate) fn read_words(&mut self, handles: &mut HandleTable) {
        for _ in 0..self.unread.min(WORDS) {
            self.unread -= 1;
            let Some(id) = self.round.pop_front() else {
                self.unread = 0;
                return;
            };
            let Some(end) = handles.local_mut(id) else {
                continue;
            };
            let Some(watched) = &end.watched else {
                end.is_listed = false;
                continue;
            };
            self.round.push_back(id);
            if watched.was_rung() {
                self.make_due(id, handles);
            }
        }
    }
}
