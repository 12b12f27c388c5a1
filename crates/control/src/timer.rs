//! Everything that becomes due without an event. One queue holds the deadlines of all of it.

use portolan_stack::NextHop;
use portolan_types::{ChannelId, SessionId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    Session(SessionId, Deadline),
    /// Ports that are held back, or linger.
    Ports,
    /// Sessions of processes that are gone.
    EndedProcesses,
    /// Lists that are put together.
    Listings,
    /// Who waits for descriptors.
    Descriptors,
    /// Connections whose user has had its share of the time.
    Shares,
    /// Relays that wait for room in their user's budget.
    RelayMemory,
    Neighbour(NextHop),
    ChannelPool,
    Floods,
    /// Local sessions whose bytes the server moves.
    LocalSessions,
    LeavingClasses,
    Cpu,
    Extensions,
    Cgroups,
    /// Rows that are to name another receive budget.
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
    /// Its listener offers it, although no bytes have come.
    Defer,
    /// A local open finds no room in its listener's queue.
    LocalConnect,
    /// Its holder does not give it back.
    Recall,
    /// Bytes that waited for its last holder go to the descriptor.
    Relay,
    /// Its peer has not said its numbers.
    Probe,
    /// Has its peer taken anything?
    Orphan,
    /// A process does not give the listener's handshakes back.
    Delegation,
    /// The kernel takes connections to the listener by managed devices, too.
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
