//! The server's report on guarantees, as JSON. Rates are in bits per second, shares in millionths of one CPU.

use portolan_proto::qos::{
    Adapt, ClassTraffic, CpuClassReport, CpuForm, CpuReport, GroupReport, LinkReport, QosReport,
    RateKept, ReceiveReport, TransmitReport,
};
use schemars::JsonSchema;
use serde::Serialize;

/// Everything that is reserved.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct QosView {
    pub links: Vec<LinkView>,
    pub transmit: Vec<TransmitView>,
    pub groups: Vec<GroupView>,
    pub receive: Vec<ReceiveView>,
    pub cpu_classes: Vec<CpuClassView>,
    /// The share reserved through other servers of this machine.
    pub cpu_elsewhere_ppm: u64,
    pub cpu: Vec<CpuView>,
}

/// A managed device.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LinkView {
    pub device: String,
    /// It was removed after the server started, and has not come back.
    pub gone: bool,
    /// Null: not known, and nothing can be reserved.
    pub rate: Option<u64>,
    /// The part of the rate that can be reserved.
    pub reservable: u64,
    pub reserved: u64,
    /// Traffic without a reservation.
    pub best_effort: TrafficView,
    /// The queueing discipline that the server replaced.
    pub replaced: Option<String>,
}

/// Counts of a class of the link's scheduler.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TrafficView {
    pub bytes: u64,
    pub packets: u64,
    pub drops: u64,
    /// Bytes in the queue.
    pub backlog: u32,
}

/// How much of a guarantee is kept on the link in its present state.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KeptView {
    Full,
    /// Reduced to `kept_rate`.
    Scaled,
    Suspended,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TransmitView {
    /// In the syntax of the command line.
    pub scope: String,
    pub device: String,
    /// Minor number of the class, which `tc class show` prints in hexadecimal.
    pub class: u16,
    pub uid: u32,
    pub rate: u64,
    pub ceiling: u64,
    /// In bytes.
    pub burst: u32,
    pub group: Option<u32>,
    pub kept: KeptView,
    pub kept_rate: u64,
    pub traffic: TrafficView,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupView {
    pub key: u32,
    pub device: String,
    pub class: u16,
    pub uid: u32,
    /// Permissions to join, read and change it, as those of a file.
    pub mode: u16,
    pub rate: u64,
    /// The sum of its members' reservations.
    pub reserved: u64,
    pub share: bool,
    pub slack: bool,
    pub keep: bool,
    pub kept: KeptView,
    pub kept_rate: u64,
    pub traffic: TrafficView,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ReceiveView {
    pub scope: String,
    pub uid: u32,
    /// Packets per second; null: unlimited.
    pub packets: Option<u32>,
    /// Null: unlimited.
    pub rate: Option<u64>,
    pub burst_ms: u32,
    pub priority: Option<u8>,
    /// Packets within the budget.
    pub passed: u64,
    /// Packets beyond it.
    pub dropped: u64,
    /// Packets dropped early because of their low priority.
    pub early: u64,
}

/// A service class.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CpuClassView {
    pub name: String,
    pub rate_ppm: u64,
    /// Null: unlimited.
    pub overbooking_ppm: Option<u64>,
    pub nominal_ppm: u64,
    pub members: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CpuView {
    pub scope: String,
    pub uid: u32,
    /// Null: the default class.
    pub class: Option<String>,
    pub rate_ppm: u32,
    pub period_us: u32,
    pub slack: bool,
    /// `off`, `propose` or `auto`.
    pub adapt: &'static str,
    pub adapt_least_ppm: Option<u32>,
    pub adapt_most_ppm: Option<u32>,
    /// The share it has in its class with the present members.
    pub effective_ppm: u32,
    /// Measured over the last second.
    pub used_ppm: u32,
    /// Periods of the last second in which it needed more than its share.
    pub overruns: u32,
    pub proposed_ppm: Option<u32>,
    pub form: FormView,
}

/// How a CPU reservation is enforced.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum FormView {
    /// `SCHED_DEADLINE`.
    Deadline,
    /// A weaker form, and the reason.
    Weaker { form: String, reason: String },
}

impl From<&QosReport> for QosView {
    fn from(report: &QosReport) -> QosView {
        QosView {
            links: report.links.iter().map(Into::into).collect(),
            transmit: report.transmit.iter().map(Into::into).collect(),
            groups: report.groups.iter().map(Into::into).collect(),
            receive: report.receive.iter().map(Into::into).collect(),
            cpu_classes: report.cpu_classes.iter().map(Into::into).collect(),
            cpu_elsewhere_ppm: report.cpu_elsewhere_ppm,
            cpu: report.cpu.iter().map(Into::into).collect(),
        }
    }
}

impl From<&LinkReport> for LinkView {
    fn from(link: &LinkReport) -> LinkView {
        LinkView {
            device: link.device.clone(),
            gone: link.gone,
            rate: link.rate,
            reservable: link.reservable,
            reserved: link.reserved,
            best_effort: link.best_effort.into(),
            replaced: link.replaced.clone(),
        }
    }
}

impl From<ClassTraffic> for TrafficView {
    fn from(traffic: ClassTraffic) -> TrafficView {
        TrafficView {
            bytes: traffic.bytes,
            packets: traffic.packets,
            drops: traffic.drops,
            backlog: traffic.backlog,
        }
    }
}

fn kept(kept: RateKept, rate: u64) -> (KeptView, u64) {
    match kept {
        RateKept::Full => (KeptView::Full, rate),
        RateKept::Scaled { bits } => (KeptView::Scaled, bits),
        RateKept::Suspended => (KeptView::Suspended, 0),
    }
}

impl From<&TransmitReport> for TransmitView {
    fn from(entry: &TransmitReport) -> TransmitView {
        let (kept, kept_rate) = kept(entry.kept, entry.rate);
        TransmitView {
            scope: entry.scope.to_string(),
            device: entry.device.clone(),
            class: entry.class,
            uid: entry.uid,
            rate: entry.rate,
            ceiling: entry.ceiling,
            burst: entry.burst,
            group: entry.group,
            kept,
            kept_rate,
            traffic: entry.traffic.into(),
        }
    }
}

impl From<&GroupReport> for GroupView {
    fn from(group: &GroupReport) -> GroupView {
        let (kept, kept_rate) = kept(group.kept, group.rate);
        GroupView {
            key: group.key,
            device: group.device.clone(),
            class: group.class,
            uid: group.uid,
            mode: group.mode,
            rate: group.rate,
            reserved: group.reserved,
            share: group.options.share,
            slack: group.options.slack,
            keep: group.options.keep,
            kept,
            kept_rate,
            traffic: group.traffic.into(),
        }
    }
}

impl From<&ReceiveReport> for ReceiveView {
    fn from(entry: &ReceiveReport) -> ReceiveView {
        ReceiveView {
            scope: entry.scope.to_string(),
            uid: entry.uid,
            packets: entry.spec.packets,
            rate: entry.spec.bits,
            burst_ms: entry.spec.burst_ms,
            priority: entry.spec.priority,
            passed: entry.passed,
            dropped: entry.dropped,
            early: entry.early,
        }
    }
}

impl From<&CpuClassReport> for CpuClassView {
    fn from(class: &CpuClassReport) -> CpuClassView {
        CpuClassView {
            name: class.name.clone(),
            rate_ppm: class.rate_ppm,
            overbooking_ppm: class.overbooking_ppm,
            nominal_ppm: class.nominal_ppm,
            members: class.members,
        }
    }
}

impl From<&CpuReport> for CpuView {
    fn from(entry: &CpuReport) -> CpuView {
        let (adapt, least, most) = match entry.spec.adapt {
            Adapt::Off => ("off", None, None),
            Adapt::Propose => ("propose", None, None),
            Adapt::Auto {
                least_ppm,
                most_ppm,
            } => ("auto", Some(least_ppm), Some(most_ppm)),
        };
        let form = match &entry.form {
            CpuForm::Deadline => FormView::Deadline,
            CpuForm::Weaker { form, reason } => FormView::Weaker {
                form: form.clone(),
                reason: reason.clone(),
            },
        };
        CpuView {
            scope: entry.scope.to_string(),
            uid: entry.uid,
            class: entry.spec.class.clone(),
            rate_ppm: entry.spec.rate_ppm,
            period_us: entry.spec.period_us,
            slack: entry.spec.slack,
            adapt,
            adapt_least_ppm: least,
            adapt_most_ppm: most,
            effective_ppm: entry.effective_ppm,
            used_ppm: entry.used_ppm,
            overruns: entry.overruns,
            proposed_ppm: entry.proposed_ppm,
            form,
        }
    }
}
