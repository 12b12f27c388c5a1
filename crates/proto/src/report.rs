//! What `portolan ss`, `counters` and `doctor` show, and the page on which a library publishes
//! the figures of the sessions it holds.

use core::net::SocketAddr;

use portolan_types::{Protocol, SessionId};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::control::Delivery;
use crate::extension::layout::ExtensionStatistics;
use crate::raw::Guard;

/// One session as the server knows it; the figures come from its holder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionReport {
    pub session: SessionId,
    pub protocol: Protocol,
    pub local: SocketAddr,
    pub remote: Option<SocketAddr>,
    pub holder: Holder,
    pub uid: u32,
    /// RFC 9293 state name, or `UNCONN`/`ESTAB` for UDP as `ss` prints it.
    pub state: String,
    /// How often it went to a process or came back from one.
    pub migrations: u32,
    pub mapping: Mapping,
    pub delivery: DeliveryReport,
    pub figures: SessionFigures,
    /// Of one that listens.
    pub listener: Option<ListenerReport>,
}

/// What came of SYNs to a listener, and of cookies. Listeners that share a port share what the packet filter counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// A program performs its handshakes.
    pub is_delegated: bool,
    /// Its SYNs are a flood now: the packet filter answers them.
    pub is_flooded: bool,
    pub filter: FloodCounts,
    pub cookies: CookieCounts,
}

/// Floods of SYNs, and what the packet filter made of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FloodCounts {
    pub floods: u64,
    /// SYNs that it answered by cookies.
    pub answered: u64,
    /// Since as many connections as may be wait to be accepted.
    pub dropped: u64,
}

/// What whoever performs a listener's handshakes counts of cookies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CookieCounts {
    /// SYNs that he answered so himself.
    pub sent: u64,
    /// Acknowledgements that brought a good one back, whoever made it.
    pub accepted: u64,
    /// Those without one, while cookies are about.
    pub refused: u64,
}

impl CookieCounts {
    pub fn add(&mut self, other: CookieCounts) {
        self.sent = self.sent.wrapping_add(other.sent);
        self.accepted = self.accepted.wrapping_add(other.accepted);
        self.refused = self.refused.wrapping_add(other.refused);
    }

    /// For the row of a listener, which has no other events. They wrap.
    pub fn figures(self) -> SessionFigures {
        let mut figures = SessionFigures::default();
        let counts = [self.sent, self.accepted, self.refused];
        for (event, count) in figures.events.iter_mut().zip(counts) {
            *event = count as u32;
        }
        figures
    }

    pub fn of(figures: &SessionFigures) -> CookieCounts {
        let [sent, accepted, refused, ..] = figures.events.map(u64::from);
        CookieCounts {
            sent,
            accepted,
            refused,
        }
    }
}

/// By which ring a session's frames reach the process that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mapping {
    /// That of all sessions of the process.
    #[default]
    Shared,
    /// One of its own.
    Direct,
    /// It wanted one of its own.
    Refused(SharedReason),
}

/// Why a session has no ring of its own that wanted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedReason {
    /// Its process has as many as it may.
    ProcessLimit,
    /// All processes together have.
    HostLimit,
    /// Each of its packets is a message.
    Delivery,
    /// The kernel did not make it, or the process could not map it.
    NotMade,
}

impl Mapping {
    /// As `portolan ss` shows it; nothing for what is usual.
    pub const fn name(self) -> &'static str {
        match self {
            Mapping::Shared => "",
            Mapping::Direct => "direct",
            Mapping::Refused(SharedReason::ProcessLimit) => "shared(process-limit)",
            Mapping::Refused(SharedReason::HostLimit) => "shared(host-limit)",
            Mapping::Refused(SharedReason::Delivery) => "shared(delivery)",
            Mapping::Refused(SharedReason::NotMade) => "shared(not-made)",
        }
    }
}

/// How a session's packets reach the process that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeliveryReport {
    As(Delivery),
    /// By the ring: it was to be by a filter in the driver, which no managed device has.
    NotInDriver,
}

impl DeliveryReport {
    /// As `portolan ss` shows it; nothing for what is usual.
    pub const fn name(self) -> &'static str {
        match self {
            DeliveryReport::As(Delivery::Shm) => "",
            DeliveryReport::As(form) => form.name(),
            DeliveryReport::NotInDriver => "shm(no-driver-hook)",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Holder {
    Server,
    /// Held by the server and moved through its descriptor.
    Relayed,
    Process {
        pid: u32,
        program: String,
    },
}

/// Live figures of one session. Times in microseconds, sizes in bytes, `cwnd` in bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[repr(C)]
pub struct SessionFigures {
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub segments_in: u64,
    pub segments_out: u64,
    pub retransmits: u64,
    /// CPU time of the protocol's work, estimated by samples.
    pub cpu_us: u64,
    pub receive_queue: u32,
    pub send_queue: u32,
    pub cwnd: u32,
    pub ssthresh: u32,
    pub srtt_us: u32,
    pub rttvar_us: u32,
    pub rto_us: u32,
    pub mss: u32,
    pub receive_window: u32,
    pub send_window: u32,
    /// Which timer runs: [`TIMER_NAMES`].
    pub timer: u32,
    /// Retransmissions or probes in a row.
    pub retries: u32,
    /// When that timer is due, in nanoseconds of CLOCK_MONOTONIC.
    pub timer_at: u64,
    /// Counts in the order of `portolan_tcp::EVENTS`; they wrap.
    pub events: [u32; 32],
}

/// Names of timers as `ss -o` prints them.
pub const TIMER_NAMES: [&str; 5] = ["off", "on", "keepalive", "timewait", "persist"];

/// A protocol that a program runs itself; the figures come from its library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawReport {
    pub guard: Guard,
    pub holder: Holder,
    pub uid: u32,
    pub channel: u32,
    pub figures: RawFigures,
}

/// Live figures of one raw flow. Bytes are those of whole frames.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[repr(C)]
pub struct RawFigures {
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub frames_in: u64,
    pub frames_out: u64,
    /// Frames for which there was no room, as too many were unread.
    pub dropped: u64,
    /// Bytes that nobody has read yet.
    pub receive_queue: u64,
}

/// Sessions that fit on a library's statistics page; later ones show no figures.
pub const STATISTICS_SLOTS: usize = 4096;

/// One row of the statistics memfd, indexed by slot. The server treats every number as a claim.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StatisticsRow {
    pub session: u64,
    /// Index into [`STATE_NAMES`].
    pub state: u32,
    pub reserved: u32,
    pub figures: SessionFigures,
}

/// Counters of a library that fit behind the rows of its sessions.
pub const COUNTER_SLOTS: usize = 64;

/// Where the counters lie in the statistics memfd.
pub const COUNTERS_AT: usize = STATISTICS_SLOTS * size_of::<StatisticsRow>();

/// Raw flows that one process may have, each with a row.
pub const RAW_ROWS: usize = 64;

/// Where their rows lie in the statistics memfd.
pub const RAW_AT: usize = COUNTERS_AT + COUNTER_SLOTS * size_of::<u64>();

/// What a library says of one of its raw flows.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawRow {
    /// Its slot and one; 0: of none.
    pub flow: u64,
    pub figures: RawFigures,
}

/// Handlers in threads that one process may have, each with a row.
pub const THREADED_ROWS: usize = 64;

/// Where their rows lie in the statistics memfd.
pub const THREADED_AT: usize = RAW_AT + RAW_ROWS * size_of::<RawRow>();

/// What a library says of a handler in one of its threads.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ThreadedRow {
    /// The handler's, as the server gave it.
    pub number: u64,
    pub statistics: ExtensionStatistics,
}

/// Bytes of the statistics memfd.
pub const STATISTICS_SIZE: usize = THREADED_AT + THREADED_ROWS * size_of::<ThreadedRow>();

/// State names as `ss` prints them.
pub const STATE_NAMES: [&str; 12] = [
    "UNCONN",
    "SYN-SENT",
    "SYN-RECV",
    "ESTAB",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "CLOSE-WAIT",
    "CLOSING",
    "LAST-ACK",
    "TIME-WAIT",
    "CLOSED",
    "LISTEN",
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterReport {
    /// `receive`, `transmit` (the filters), `server`, `stack` or `tcp`.
    pub group: String,
    pub name: String,
    pub value: u64,
    /// Whose it is; none: of all together.
    pub holder: Option<Holder>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReport {
    pub version: String,
    /// What libraries must have, too: [`PROTOCOL`](crate::PROTOCOL).
    pub protocol: u32,
    pub pid: u32,
    /// The configuration file.
    pub config: Option<String>,
    pub interfaces: Vec<String>,
    pub processes: u32,
    pub sessions: u32,
    /// Sessions with a ring of their own.
    pub direct: u32,
    pub uptime_s: u64,
    pub filter: FilterReport,
    /// What is wrong at this moment, a sentence each.
    pub faults: Vec<String>,
}

/// How the packet filter works, and what it took while the kernel counted (`kernel.bpf_stats_enabled`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterReport {
    pub algorithm: String,
    pub runs: u64,
    pub nanoseconds: u64,
    /// Of the devices that are to have one; empty where nothing is requested.
    pub driver_hooks: Vec<DriverHookReport>,
}

/// The packet filter in a device's driver: `native`, `generic`, or `none` and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverHookReport {
    pub interface: String,
    pub state: String,
}
