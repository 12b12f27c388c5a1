//! Guarantees (`portolan qos`, `<portolan/qos.h>`): what is asked of the server, and what it answers. Nothing here is
//! believed: the server checks every number, and who may ask for whom.

use core::net::SocketAddr;

use portolan_types::{FlowKey, Protocol};
use serde::{Deserialize, Serialize};

pub mod text;

/// For whom a guarantee holds. A session that several scopes cover has the guarantee of the narrowest:
/// flow, port, process, cgroup, user, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// One connection.
    Flow(FlowKey),
    /// What is sent from, or arrives at, a local port.
    Port { protocol: Protocol, port: u16 },
    /// All that a process has. Ends with it.
    Process { pid: u32 },
    /// A thread, for CPU reservations only. Ends with it.
    Thread { tid: u32 },
    /// All processes of a cgroup and those below it: its path under `/sys/fs/cgroup`, with the leading slash.
    Cgroup(String),
    /// All processes of a user.
    User { uid: u32 },
}

impl Scope {
    /// Is a session with these endpoints the scope's by them alone?
    pub fn has_session(
        &self,
        protocol: Protocol,
        local: SocketAddr,
        remote: Option<SocketAddr>,
    ) -> bool {
        match self {
            Scope::Flow(flow) => remote.is_some_and(|remote| {
                let own = FlowKey {
                    protocol,
                    local,
                    remote,
                };
                own.canonical() == flow.canonical()
            }),
            Scope::Port { protocol: of, port } => *of == protocol && *port == local.port(),
            _ => false,
        }
    }
}

/// Which guarantee of a scope is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    Transmit,
    Receive,
    Cpu,
}

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QosRequest {
    /// Reply: `State`.
    Show,
    /// Makes or changes a transmit reservation. Reply: `Done` or `Refused`.
    Transmit { scope: Scope, spec: Transmit },
    /// Makes or changes a receive budget. Reply: `Done` or `Refused`.
    Receive { scope: Scope, spec: Receive },
    /// Makes or changes a CPU reservation. Reply: `Done` or `Refused`.
    Cpu { scope: Scope, spec: Cpu },
    /// Ends a guarantee. Reply: `Done` or `Refused`.
    Delete { scope: Scope, kind: Kind },
    /// Root's: how fast a link is; without a number, as the device says. Reply: `Done` or `Refused`.
    Link { device: String, bits: Option<u64> },
    /// Does something with a multiplex group. Reply: `Done`, `Joined` or `Refused`.
    Group { key: u32, action: GroupAction },
}

/// Rate of a transmit reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rate {
    /// Bits per second, Ethernet headers included.
    Bits(u64),
    /// A slice of each period of the link's time (NE §4.4).
    Slice { slice_us: u32, period_us: u32 },
}

/// How far a sender may go beyond its rate while the link has slack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Slack {
    /// Never beyond its rate.
    #[default]
    None,
    /// Up to so many bits per second.
    UpTo(u64),
    /// Up to the link's rate.
    All,
}

/// A transmit reservation (MS §IV-E, NE §4.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transmit {
    /// The link; may be left out if only one has a rate.
    pub device: Option<String>,
    pub rate: Rate,
    /// Bytes that may go at once after a pause; by default a slice's worth.
    pub burst: Option<u32>,
    pub slack: Slack,
}

/// A receive budget: what exceeds it is dropped by the packet filter, before any work is done, and counted for its
/// owner (NE §5.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receive {
    /// Packets per second.
    pub packets: Option<u32>,
    /// Bits per second, Ethernet headers included.
    pub bits: Option<u64>,
    /// How long the budget may be saved up, milliseconds.
    pub burst_ms: u32,
    /// 0 (first to go) to 7 (last): while a ring fills, packets of low priority are dropped early. For flows and ports.
    pub priority: Option<u8>,
}

impl Receive {
    /// How long a budget is saved up if nothing is said.
    pub const BURST_MS: u32 = 50;
}

/// A CPU reservation (MS §V).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Service class; the default one if none is named.
    pub class: Option<String>,
    /// Nominal rate in millionths of one CPU.
    pub rate_ppm: u32,
    pub period_us: u32,
    /// May run beyond its rate while CPUs are idle.
    pub slack: bool,
    pub adapt: Adapt,
}

impl Cpu {
    /// The period if none is said: that of the kernel's own bandwidth control.
    pub const PERIOD_US: u32 = 100_000;
}

/// What follows when a thread's measured use differs from its rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Adapt {
    #[default]
    Off,
    /// A better rate is shown.
    Propose,
    /// The rate is changed within these limits, in millionths of one CPU.
    Auto { least_ppm: u32, most_ppm: u32 },
}

/// Calls of a multiplex group (MS Table I).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupAction {
    /// Makes the group, with a rate reserved for all its flows together. `mode` is as a file's: who may join (execute),
    /// look (read), change (write).
    Create {
        device: Option<String>,
        bits: u64,
        mode: u16,
        options: GroupOptions,
        algorithm: Algorithm,
    },
    /// May the caller join? Nothing changes.
    Open,
    SetOptions(GroupOptions),
    /// Changes the rate that is reserved for all its flows together.
    SetRate {
        bits: u64,
    },
    /// Adds a flow, or all of a process, with a rate of its own. Reply: `Joined`.
    Join {
        scope: Scope,
        bits: u64,
    },
    /// Takes out what `Joined` named.
    Leave {
        member: u32,
    },
    /// Ends the group and its flows' rates.
    Delete,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupOptions {
    /// Flows may use what others of the group leave.
    pub share: bool,
    /// The group goes beyond its rate while the link has slack.
    pub slack: bool,
    /// The group stays when its maker and its flows have gone.
    pub keep: bool,
}

/// How a group's flows share its rate (`alg` of MS Table I). There is one: each flow has its rate at any time, as by the
/// paper's KT_RC, kept by the link's scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    #[default]
    RateControlled,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum QosReply {
    /// An encoded [`QosReport`].
    State(crate::control::Blob),
    Done,
    /// Names the flow's membership.
    Joined {
        member: u32,
    },
    Refused(Refusal),
}

/// Why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The closest errno, for programs.
    pub errno: i32,
    /// Which test failed and what would have passed it, for people.
    pub reason: String,
}

/// Everything that is reserved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QosReport {
    pub links: Vec<LinkReport>,
    pub transmit: Vec<TransmitReport>,
    pub groups: Vec<GroupReport>,
    pub receive: Vec<ReceiveReport>,
    pub cpu_classes: Vec<CpuClassReport>,
    /// Promised by other servers of this machine, in millionths of one CPU.
    pub cpu_elsewhere_ppm: u64,
    pub cpu: Vec<CpuReport>,
}

/// What becomes of a promise on a link that has changed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateKept {
    #[default]
    Full,
    /// The link is too slow for all promises: so many bits per second of this one, in proportion.
    Scaled { bits: u64 },
    /// The link has gone, or cannot have its scheduler.
    Suspended,
}

/// A managed device. Rates in bits per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    pub device: String,
    /// It has gone since the server started, and has not come back.
    pub gone: bool,
    /// None: not known, nothing can be reserved.
    pub rate: Option<u64>,
    /// What reservations may have of it together.
    pub reservable: u64,
    pub reserved: u64,
    /// What all others have sent.
    pub best_effort: ClassTraffic,
    /// The queueing discipline that was there before.
    pub replaced: Option<String>,
}

/// Counts of a class of the link's scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassTraffic {
    pub bytes: u64,
    pub packets: u64,
    pub drops: u64,
    /// Bytes that wait now.
    pub backlog: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransmitReport {
    pub scope: Scope,
    pub device: String,
    /// Minor number of the class, as `tc class show` prints it in hexadecimal.
    pub class: u16,
    /// Who asked for it.
    pub uid: u32,
    pub rate: u64,
    pub ceiling: u64,
    pub burst: u32,
    pub group: Option<u32>,
    pub kept: RateKept,
    pub traffic: ClassTraffic,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    pub key: u32,
    pub device: String,
    pub class: u16,
    pub uid: u32,
    pub mode: u16,
    pub rate: u64,
    /// What its flows have reserved together.
    pub reserved: u64,
    pub options: GroupOptions,
    pub kept: RateKept,
    pub traffic: ClassTraffic,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiveReport {
    pub scope: Scope,
    pub uid: u32,
    pub spec: Receive,
    /// Packets that were within the budget, and beyond it.
    pub passed: u64,
    pub dropped: u64,
    /// Packets dropped early for their low priority.
    pub early: u64,
}

/// A service class (ARC-H, MS §V). Rates in millionths of one CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuClassReport {
    pub name: String,
    /// `R_k`, of all that may be reserved.
    pub rate_ppm: u64,
    /// `b_k` in millionths; none: without bound.
    pub overbooking_ppm: Option<u64>,
    /// Sum of the members' nominal rates.
    pub nominal_ppm: u64,
    pub members: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuReport {
    pub scope: Scope,
    pub uid: u32,
    pub spec: Cpu,
    /// In its class, with those that are there now.
    pub effective_ppm: u32,
    /// Measured over the last second.
    pub used_ppm: u32,
    /// Periods of the last second in which it wanted more than it had.
    pub overruns: u32,
    /// What `Adapt` would make of it.
    pub proposed_ppm: Option<u32>,
    pub form: CpuForm,
}

/// How a CPU reservation is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CpuForm {
    /// `SCHED_DEADLINE`.
    Deadline,
    /// Something weaker, and why.
    Weaker { form: String, reason: String },
}
