//! The server's record of a process's channel.

use std::collections::BTreeSet;

use portolan_control::ClientId;
use portolan_sys::shm::{JournalReader, StatisticsReader};
use portolan_sys::tap::Tap;
use portolan_sys::wait::WakeSender;
use portolan_types::{ChannelId, SessionId};

use crate::captures::ProcessCaptures;
use crate::local_ends::ProcessNotifier;
use crate::qos::tx_queues::TxQueueSet;

/// A process that has exited, with the sessions that it held. Its channel is not reused until all of them have ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub channel: ChannelId,
    pub sessions: Vec<SessionId>,
    /// Sessions whose descriptor it had, from which it is still to be removed.
    pub known: Option<Vec<SessionId>>,
}

/// The server's record of a process's channel.
#[derive(Debug)]
pub(crate) struct Channel {
    pub client: ClientId,
    pub statistics: StatisticsReader,
    pub journal: JournalReader,
    /// Holds a copy of the tap's descriptor: if the process had the only one, its exit would destroy the device,
    /// which is slow, before its connections are closed.
    pub tap: Tap,
    /// Becomes readable when `recalled` or `ended` is not empty, or transmit queues or captures have changed.
    pub recall_event: WakeSender,
    pub notifier: ProcessNotifier,
    /// Sessions that the process is to give back, until it fetches the list.
    pub recalled: Vec<SessionId>,
    /// Local sessions whose peers have ended, until it fetches the list.
    pub ended: BTreeSet<SessionId>,
    pub tx_queues: TxQueueSet,
    pub captures: ProcessCaptures,
    /// Whether programs of its control group decide on its sockets; `None` until the first one.
    pub has_cgroup_policy: Option<bool>,
}

/// What the server shares with a process.
pub(crate) struct Ends {
    pub client: ClientId,
    pub statistics: StatisticsReader,
    pub journal: JournalReader,
    pub recall_event: WakeSender,
    pub notifier: ProcessNotifier,
}

impl Channel {
    pub(crate) fn new(ends: Ends, tap: Tap) -> Channel {
        Channel {
            client: ends.client,
            statistics: ends.statistics,
            journal: ends.journal,
            tap,
            recall_event: ends.recall_event,
            notifier: ends.notifier,
            recalled: Vec::new(),
            ended: BTreeSet::new(),
            tx_queues: TxQueueSet::default(),
            captures: ProcessCaptures::default(),
            has_cgroup_policy: None,
        }
    }
}
