//! A process's channel, as the server keeps it.

use portolan_control::ClientId;
use portolan_sys::shm::StatisticsReader;
use portolan_sys::tap::Tap;
use portolan_sys::wait::WakeSender;
use portolan_types::{ChannelId, SessionId};

use crate::local_ends::ProcessNotifier;
use crate::qos::tx_queues::TxQueueSet;

/// A process that is gone, with the sessions that it held. Its channel is nobody else's until all of them have ended.
#[derive(Debug)]
pub struct Ending {
    pub channel: ChannelId,
    pub sessions: Vec<SessionId>,
    /// Sessions whose descriptor it had, still to forget it.
    pub known: Option<Vec<SessionId>>,
}

/// What the server keeps of a process's channel.
#[derive(Debug)]
pub struct Channel {
    pub client: ClientId,
    pub statistics: StatisticsReader,
    /// With a copy of its descriptor: a process that had the only one would destroy the device when it
    /// ends, which is slow, and only then close its connections.
    pub tap: Tap,
    /// Becomes readable when `recalled` is not empty, or transmit queues have changed.
    pub recall_event: WakeSender,
    pub notifier: ProcessNotifier,
    /// What the process is to give back, until it asks.
    pub recalled: Vec<SessionId>,
    pub tx_queues: TxQueueSet,
}

/// Of what the server shares with a process.
pub struct Ends {
    pub client: ClientId,
    pub statistics: StatisticsReader,
    pub recall_event: WakeSender,
    pub notifier: ProcessNotifier,
}

impl Channel {
    pub fn new(ends: Ends, tap: Tap) -> Channel {
        Channel {
            client: ends.client,
            statistics: ends.statistics,
            tap,
            recall_event: ends.recall_event,
            notifier: ends.notifier,
            recalled: Vec::new(),
            tx_queues: TxQueueSet::default(),
        }
    }
}
