//! The ends of local sessions (ADR 9), and which notifier wakes which end.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use portolan_control::ClaimId;
use portolan_local::Local;
use portolan_proto::local::{Side, holder};
use portolan_sys::shm::Rings;
use portolan_sys::wait::{WakeAddress, WakeReceiver, WakeSender, wake_receiver};
use portolan_types::{ChannelId, Instant, SessionId};

use crate::adoption::unpaired::{MemoryKey, Unpaired};
use crate::handles::HandleTable;
use crate::random::random_u64;

/// Wake-up words of watched ends read in one turn.
const WORDS: usize = 256;

/// One end, whoever holds it.
#[derive(Debug)]
pub(crate) struct LocalEnd {
    pub(crate) side: Side,
    pub(crate) peer: SessionId,
    pub(crate) memory: Arc<Memory>,
    /// Set while the server relays the end, or waits for its bytes.
    pub(crate) watched: Option<Local>,
    /// Whether it is in [`Locals::round`].
    pub(crate) is_listed: bool,
    /// Whether it is in [`Locals::due`].
    pub(crate) is_due: bool,
    /// The port of the other end, which was closed and waits for this end's FIN.
    pub(crate) awaited_by: Option<ClaimId>,
    /// Set once the server has closed or reset it. The flags in the memory are unreliable: its holder writes them.
    pub(crate) has_ended: bool,
    /// Set once the server has closed or reset the other one.
    pub(crate) peer_has_ended: bool,
    /// Whether it is in [`Locals::untold`].
    pub(crate) is_untold: bool,
    /// The process with it in [`Channel::ended`](crate::channels::channel::Channel::ended).
    pub(crate) told: Option<ChannelId>,
    /// Set while the end waits for its peer after a restart, whose number is not known until then.
    pub(crate) unpaired: Option<MemoryKey>,
}

/// The memory shared by both ends.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) fd: OwnedFd,
    pub(crate) rings: Arc<Rings>,
    /// Distinguishes local sessions.
    pub(crate) number: u64,
}

impl Memory {
    /// How many bytes an end has taken, as it says.
    pub(crate) fn taken_by(&self, side: Side) -> u64 {
        self.rings.ends().of(side).taken.0.bytes.load(Acquire)
    }
}

impl LocalEnd {
    pub(crate) fn new(side: Side, peer: SessionId, memory: Arc<Memory>) -> LocalEnd {
        LocalEnd {
            side,
            peer,
            memory,
            watched: None,
            is_listed: false,
            is_due: false,
            awaited_by: None,
            has_ended: false,
            peer_has_ended: false,
            is_untold: false,
            told: None,
            unpaired: None,
        }
    }

    /// Sets the notifier of this end's holder.
    pub(crate) fn give_to(&self, number: u64) {
        let end = self.memory.rings.ends().of(self.side);
        end.notifier.0.number.store(number, Release);
    }

    /// Opens the end as its last holder left it.
    pub(crate) fn open(&self) -> Local {
        Local::new(Arc::clone(&self.memory.rings), self.side)
    }
}

/// A process's notifier.
#[derive(Debug)]
pub(crate) struct ProcessNotifier {
    pub number: u64,
    pub(crate) wake_sender: WakeSender,
    /// The address that its peers' sockets connect to: each has its own socket.
    pub(crate) address: WakeAddress,
}

impl ProcessNotifier {
    pub(crate) fn new(address: WakeAddress) -> Result<ProcessNotifier, rustix::io::Errno> {
        Ok(ProcessNotifier {
            number: random_u64().max(holder::FIRST),
            wake_sender: address.wake_sender()?,
            address,
        })
    }
}

/// All local sessions.
#[derive(Debug)]
pub(crate) struct Locals {
    pub wake_receiver: WakeReceiver,
    pub(crate) wake_sender: WakeSender,
    /// The watched ends, in the order in which their words are read.
    pub(crate) round: VecDeque<SessionId>,
    /// How many words are still to be read since the last notification.
    pub(crate) unread: usize,
    /// Ends to process, in this order.
    pub(crate) due: VecDeque<SessionId>,
    /// Ends whose peers have ended, and when their holders are told so.
    pub(crate) untold: VecDeque<(Instant, SessionId)>,
    pub(crate) address: WakeAddress,
    /// How many local sessions were made.
    pub(crate) made: u64,
    pub(crate) unpaired: Unpaired,
}

impl Locals {
    /// Names of wake-up sockets exist in `directory` for a moment.
    pub(crate) fn new(directory: &std::path::Path) -> Result<Locals, rustix::io::Errno> {
        let (wake_receiver, address) = wake_receiver(directory)?;
        Ok(Locals {
            wake_receiver,
            wake_sender: address.wake_sender()?,
            address,
            round: VecDeque::new(),
            unread: 0,
            due: VecDeque::new(),
            untold: VecDeque::new(),
            made: 0,
            unpaired: Unpaired::default(),
        })
    }

    pub(crate) fn note_memory(&mut self, fd: OwnedFd, rings: Rings) -> Arc<Memory> {
        self.made += 1;
        let number = self.made;
        let rings = Arc::new(rings);
        Arc::new(Memory { fd, rings, number })
    }

    /// Schedules the end for one of the next turns.
    pub(crate) fn make_due(&mut self, id: SessionId, handles: &mut HandleTable) {
        if let Some(end) = handles.local_mut(id)
            && !std::mem::replace(&mut end.is_due, true)
        {
            self.due.push_back(id);
        }
    }

    /// Reads the words of some watched ends, and schedules those whose peers have made changes.
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
