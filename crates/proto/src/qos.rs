//! Guarantees (`portolan qos`, `<portolan/qos.h>`): requests to the server, and its answers. Nothing here is trusted:
//! the server checks every number, and the permissions of the requester.

use core::net::SocketAddr;

use portolan_types::{FlowKey, Protocol};
use serde::{Deserialize, Serialize};

pub mod text;

/// What a guarantee applies to. A session covered by several scopes has the guarantee of the narrowest: flow, port,
/// process, cgroup, user, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// One connection.
    Flow(FlowKey),
    /// Packets sent from, or received at, a local port.
    Port { protocol: Protocol, port: u16 },
    /// All sessions of a process. Ends with the process.
    Process { pid: u32 },
    /// A thread, for CPU reservations only. Ends with the thread.
    Thread { tid: u32 },
    /// All processes of a cgroup and those below it: its path under `/sys/fs/cgroup`, with the leading slash.
    Cgroup(String),
    /// All processes of a user.
    User { uid: u32 },
}

impl Scope {
    /// Whether a session belongs to the scope by these endpoints alone.
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

/// The kind of a guarantee of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A rate for what is sent.
    Transmit,
    /// A budget for what is received.
    Receive,
    /// CPU time.
    Cpu,
}

/// Requests.
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
    /// For root: sets a link's rate; without a number, as reported by the device. Reply: `Done` or `Refused`.
    Link { device: String, bits: Option<u64> },
    /// Performs an action on a multiplex group. Reply: `Done`, `Joined` or `Refused`.
    Group { key: u32, action: GroupAction },
}

/// Rate of a transmit reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rate {
    /// Bits per second, Ethernet headers included.
    Bits(u64),
    /// A share of each period of the link's time (NE §4.4), both in microseconds.
    Slice { slice_us: u32, period_us: u32 },
}

/// How far a sender may exceed its rate while the link has spare capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Slack {
    /// Never.
    #[default]
    None,
    /// Up to that many bits per second.
    UpTo(u64),
    /// Up to the link's rate.
    All,
}

/// A transmit reservation (MS §IV-E, NE §4.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transmit {
    /// The link; may be left out if only one has a rate.
    pub device: Option<String>,
    /// What is reserved.
    pub rate: Rate,
    /// Bytes that may be sent at once after a pause; by default a slice's worth.
    pub burst: Option<u32>,
    /// What may be sent beyond it.
    pub slack: Slack,
}

/// A receive budget: the packet filter drops what exceeds it, before any work is done, and charges it to the owner
/// (NE §5.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receive {
    /// Packets per second.
    pub packets: Option<u32>,
    /// Bits per second, Ethernet headers included.
    pub bits: Option<u64>,
    /// How long unused budget accumulates, in milliseconds.
    pub burst_ms: u32,
    /// 0 (dropped first) to 7 (last): while a ring fills, packets of low priority are dropped early. For flows and
    /// ports.
    pub priority: Option<u8>,
}

impl Receive {
    /// The default of `burst_ms`.
    pub const BURST_MS: u32 = 50;
}

/// A CPU reservation (MS §V).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Service class; none for the default one.
    pub class: Option<String>,
    /// Nominal rate in millionths of one CPU.
    pub rate_ppm: u32,
    /// Microseconds in which the thread gets its rate.
    pub period_us: u32,
    /// May exceed its rate while CPUs are idle.
    pub slack: bool,
    /// What to do if the measured use differs.
    pub adapt: Adapt,
}

impl Cpu {
    /// The default period: that of the kernel's own bandwidth control.
    pub const PERIOD_US: u32 = 100_000;
}

/// What to do if a thread's measured use differs from its rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Adapt {
    /// Nothing.
    #[default]
    Off,
    /// Show a better rate.
    Propose,
    /// Change the rate within these limits, in millionths of one CPU.
    Auto { least_ppm: u32, most_ppm: u32 },
}

/// Operations of a multiplex group (MS Table I).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupAction {
    /// Creates the group, with a total rate for all its flows. `mode` is like a file's: who may join (execute), show
    /// (read), change (write).
    Create {
        device: Option<String>,
        bits: u64,
        mode: u16,
        options: GroupOptions,
        algorithm: Algorithm,
    },
    /// Checks whether the caller may join. Changes nothing.
    Open,
    SetOptions(GroupOptions),
    /// Changes the total rate reserved for all its flows.
    SetRate {
        bits: u64,
    },
    /// Adds a flow, or all sessions of a process, with a rate of its own. Reply: `Joined`.
    Join {
        scope: Scope,
        bits: u64,
    },
    /// Removes the member named by `Joined`.
    Leave {
        member: u32,
    },
    /// Deletes the group and its flows' rates.
    Delete,
}

/// How a multiplex group uses spare capacity, and how long it lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupOptions {
    /// Flows may use what other flows of the group leave over.
    pub share: bool,
    /// The group may exceed its rate while the link has spare capacity.
    pub slack: bool,
    /// The group persists when its creator and its flows are gone.
    pub keep: bool,
}

/// How a group's flows share its rate (`alg` of MS Table I). There is only one: each flow has its rate at any time, as
/// with the paper's KT_RC, enforced by the link's qdisc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    #[default]
    RateControlled,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum QosReply {
    /// An encoded [`QosReport`].
    State(crate::control::ListPart),
    Done,
    /// Identifies the flow's membership.
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
    /// Which test failed and what would have passed it, for users.
    pub reason: String,
}

/// All reservations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QosReport {
    pub links: Vec<LinkReport>,
    pub transmit: Vec<TransmitReport>,
    pub groups: Vec<GroupReport>,
    pub receive: Vec<ReceiveReport>,
    pub cpu_classes: Vec<CpuClassReport>,
    /// Reserved by other servers of this machine, in millionths of one CPU.
    pub cpu_elsewhere_ppm: u64,
    pub cpu: Vec<CpuReport>,
}

/// The state of a reservation on a link that has changed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateKept {
    #[default]
    Full,
    /// The link is too slow for all reservations: this one is scaled to that many bits per second.
    Scaled { bits: u64 },
    /// The link is gone, or its qdisc cannot be installed.
    Suspended,
}

/// A managed device. Rates in bits per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    pub device: String,
    /// It has disappeared since the server started.
    pub gone: bool,
    /// None: unknown, so that nothing can be reserved.
    pub rate: Option<u64>,
    /// Limit of all reservations together.
    pub reservable: u64,
    pub reserved: u64,
    /// Traffic without a reservation.
    pub best_effort: ClassTraffic,
    /// The former qdisc.
    pub replaced: Option<String>,
}

/// Counters of a class of the link's qdisc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassTraffic {
    pub bytes: u64,
    pub packets: u64,
    pub drops: u64,
    /// Bytes queued now.
    pub backlog: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransmitReport {
    pub scope: Scope,
    pub device: String,
    /// Minor number of the class, as `tc class show` prints it in hexadecimal.
    pub class: u16,
    /// The user who requested it.
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
    /// The sum of its flows' reservations.
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
    /// Packets within the budget, and beyond it.
    pub passed: u64,
    pub dropped: u64,
    /// Packets dropped early because of their low priority.
    pub early: u64,
}

/// A service class (ARC-H, MS §V). Rates in millionths of one CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuClassReport {
    pub name: String,
    /// `R_k`, as part of all that may be reserved.
    pub rate_ppm: u64,
    /// `b_k` in millionths; none: unlimited.
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
    /// The rate in its class, with the current members.
    pub effective_ppm: u32,
    /// Measured over the last second.
    pub used_ppm: u32,
    /// Periods of the last second in which it needed more time than it had.
    pub overruns: u32,
    /// The rate that `Adapt` proposes.
    pub proposed_ppm: Option<u32>,
    pub form: CpuForm,
}

/// How a CPU reservation is enforced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CpuForm {
    /// `SCHED_DEADLINE`.
    Deadline,
    /// A weaker mechanism, and why.
    Weaker { form: String, reason: String },
}
