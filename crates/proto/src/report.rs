//! Data shown by `portolan ss`, `counters` and `doctor`, and the memory in which a library publishes the
//! figures of the sessions it holds.

mod histogram;

use core::net::SocketAddr;

use portolan_types::{Protocol, SessionId};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::control::Delivery;
use crate::extension::layout::ExtensionStatistics;
use crate::raw::Guard;

pub use self::histogram::{
    BOUNDS_US, BUCKETS, HISTOGRAM_WORDS, Histogram, MigrationTimes, TimesReport,
};

/// A session as known by the server; the figures come from its holder.
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
    /// Number of transfers to and from processes.
    pub migrations: u32,
    pub mapping: Mapping,
    pub delivery: DeliveryReport,
    pub figures: SessionFigures,
    /// For a listener.
    pub listener: Option<ListenerReport>,
}

/// Counters of SYNs to a listener, and of cookies. Listeners that share a port share the packet filter's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// A program performs its handshakes.
    pub is_delegated: bool,
    /// There is a flood of SYNs now: the packet filter answers them.
    pub is_flooded: bool,
    pub filter: FloodCounts,
    pub cookies: CookieCounts,
}

/// Floods of SYNs, and what the packet filter did about them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FloodCounts {
    pub floods: u64,
    /// SYNs answered by cookies.
    pub answered: u64,
    /// SYNs dropped because the accept queue was full.
    pub dropped: u64,
}

/// Cookie counters of the performer of a listener's handshakes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CookieCounts {
    /// SYNs it answered by cookies itself.
    pub sent: u64,
    /// Acknowledgements with a valid cookie, whoever made it.
    pub accepted: u64,
    /// Acknowledgements without one, while cookies are in use.
    pub refused: u64,
}

impl CookieCounts {
    pub fn add(&mut self, other: CookieCounts) {
        self.sent = self.sent.wrapping_add(other.sent);
        self.accepted = self.accepted.wrapping_add(other.accepted);
        self.refused = self.refused.wrapping_add(other.refused);
    }

    /// In the form of figures, for the row of a listener, which has no other events. They wrap.
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

/// The ring by which a session's frames reach the process that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mapping {
    /// The ring of all sessions of the process.
    #[default]
    Shared,
    /// A ring of its own.
    Direct,
    /// A ring of its own was requested and refused.
    Refused(SharedReason),
}

/// Why a request for a ring was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedReason {
    /// The process has as many as it may.
    ProcessLimit,
    /// All processes together have reached the limit.
    HostLimit,
    /// The delivery form does not use rings.
    Delivery,
    /// The kernel did not create it, or the process could not map it.
    NotMade,
}

impl Mapping {
    /// As shown by `portolan ss`; empty for the default.
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
    /// By the ring: a filter in the driver was requested, but no managed device has one.
    NotInDriver,
}

impl DeliveryReport {
    /// As shown by `portolan ss`; empty for the default.
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
    /// Held by the server and relayed through its descriptor.
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
    /// CPU time of protocol processing, estimated by sampling.
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
    /// The running timer, an index into [`TIMER_NAMES`].
    pub timer: u32,
    /// Consecutive retransmissions or probes.
    pub retries: u32,
    /// When that timer expires, in nanoseconds of CLOCK_MONOTONIC.
    pub timer_at: u64,
    /// Event counters in the order of `portolan_tcp::EVENTS`; they wrap.
    pub events: [u32; 32],
}

/// Names of timers as `ss -o` prints them.
pub const TIMER_NAMES: [&str; 5] = ["off", "on", "keepalive", "timewait", "persist"];

/// A raw flow; the figures come from its library.
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
    /// Frames dropped because too many were unread.
    pub dropped: u64,
    /// Unread bytes.
    pub receive_queue: u64,
}

/// Number of sessions with a row in a library's statistics memfd; others show no figures.
pub const STATISTICS_SLOTS: usize = 4096;

/// A row of the statistics memfd, indexed by slot. The server treats every number as a claim.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StatisticsRow {
    pub session: u64,
    /// Index into [`STATE_NAMES`].
    pub state: u32,
    pub reserved: u32,
    pub figures: SessionFigures,
}

/// Number of a library's counters, with those of its histogram, which follow the rows of its sessions.
pub const COUNTER_SLOTS: usize = 96;

/// Offset of the counters in the statistics memfd.
pub const COUNTERS_AT: usize = STATISTICS_SLOTS * size_of::<StatisticsRow>();

/// Maximum number of raw flows of a process, each with a row.
pub const RAW_ROWS: usize = 64;

/// Offset of their rows in the statistics memfd.
pub const RAW_AT: usize = COUNTERS_AT + COUNTER_SLOTS * size_of::<u64>();

/// A library's report about one of its raw flows.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawRow {
    /// Its slot plus one; 0 if unused.
    pub flow: u64,
    pub figures: RawFigures,
}

/// Maximum number of handlers in threads of a process, each with a row.
pub const THREADED_ROWS: usize = 64;

/// Offset of their rows in the statistics memfd.
pub const THREADED_AT: usize = RAW_AT + RAW_ROWS * size_of::<RawRow>();

/// A library's report about a handler in one of its threads.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ThreadedRow {
    /// The handler's number, assigned by the server.
    pub number: u64,
    pub statistics: ExtensionStatistics,
}

/// Size of the statistics memfd.
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
    /// The holder that counted; none for the sum of all.
    pub holder: Option<Holder>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReport {
    pub version: String,
    /// The newest that the server speaks: [`PROTOCOL`](crate::PROTOCOL).
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
    /// New sockets are the kernel's, because the host has a policy of its own.
    pub obeys_policy: bool,
    /// Current faults, one sentence each.
    pub faults: Vec<String>,
    pub times: Box<TimesReport>,
}

/// How the packet filter works, and its run time while the kernel measured it (`kernel.bpf_stats_enabled`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterReport {
    pub algorithm: String,
    pub runs: u64,
    pub nanoseconds: u64,
    /// The devices that should have one; empty if none is requested.
    pub driver_hooks: Vec<DriverHookReport>,
}

/// The packet filter in a device's driver: `native`, `generic`, or `none` with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverHookReport {
    pub interface: String,
    pub state: String,
}
