//! Everything that becomes due without an event. One queue holds all deadlines.

use portolan_stack::NextHop;
use portolan_types::{ChannelId, SessionId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    Session(SessionId, Deadline),
    /// Ports that are held back, or linger.
    Ports,
    /// Sessions of processes that have exited.
    EndedProcesses,
    /// Connections and channels of an earlier server that no process has named.
    Inheritance,
    /// Lists being put together.
    Listings,
    /// Tasks that wait for descriptors.
    Descriptors,
    /// Connections whose user has used up its share of the time.
    Shares,
    /// Relays that wait for room in their user's budget.
    RelayMemory,
    Neighbour(NextHop),
    /// Neighbours that have not answered.
    Unanswered,
    ChannelPool,
    Floods,
    /// Peers of connections that were lost with their process.
    LostConnections,
    /// Local sessions whose bytes the server relays.
    LocalSessions,
    /// Processes to be told of local peers that have ended.
    EndedPeers,
    /// Ends of local sessions whose peers have not come back after a restart.
    LocalPeers,
    LeavingClasses,
    Cpu,
    Extensions,
    Cgroups,
    /// Guarantees to be recorded, or granted again.
    Guarantees,
    /// Rows to be moved to another receive budget.
    Budgets,
    TxQueues(ChannelId),
    Links,
    /// Relays whose descriptors others have, too, at the end that is the server's.
    ForeignEnds,
    /// Requests that wait for what is being closed.
    PendingCloses,
    /// Memory of programs that have gone goes back to the kernel.
    FreeMemory,
    Watchdog,
}

/// What becomes due for one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deadline {
    /// Its listener offers it, although no data has arrived.
    Defer,
    /// A local open found no room in its listener's queue.
    LocalConnect,
    /// Its holder has not given it back.
    Recall,
    /// Bytes held back for its last holder go to the descriptor.
    Relay,
    /// Its peer has not answered the probe.
    Probe,
    /// Check whether its peer has acknowledged anything.
    Orphan,
    /// A process has not ended the delegation of a listener.
    Delegation,
    /// The kernel accepts connections to the listener on managed devices, too.
    PortTransition,
}

impl Deadline {
    pub(crate) const ALL: [Deadline; 8] = [
        Deadline::Defer,
        Deadline::LocalConnect,
        Deadline::Recall,
        Deadline::Relay,
        Deadline::Probe,
        Deadline::Orphan,
        Deadline::Delegation,
        Deadline::PortTransition,
    ];

    pub(crate) fn bit(self) -> u8 {
        1 << self as u8
    }
}
