//! Converts reports to metric families. Label sets are bounded: programs beyond the [`PROGRAMS`] with the most sessions
//! are summed up as `other`, and the number of guarantees is bounded by what the server admits.

use std::collections::BTreeMap;

use portolan_proto::qos::{CpuReport, LinkReport, QosReport, RateKept, Scope};
use portolan_proto::report::{
    CounterReport, Histogram, Holder, MigrationTimes, SessionReport, StatusReport, TimesReport,
};
use portolan_types::Protocol;

use super::Snapshot;
use super::text::{Family, Labels, Samples};
use crate::qos::show::scope;
use crate::table::printable;

/// Programs that have metrics of their own.
const PROGRAMS: usize = 50;

/// Counters whose names have these prefixes form one family each; the rest of the name becomes the label.
const REASONS: [(&str, &str, &str); 3] = [
    ("drop", "drops", "Packets dropped, by reason"),
    ("pass", "passed", "Packets left to the kernel, by reason"),
    (
        "use_kernel",
        "kernel_sockets",
        "Sockets that became the kernel's, by reason",
    ),
];

/// Returns all families. Without a snapshot, which means that no server answers, only `portolan_up`.
pub(super) fn of(snapshot: Option<&Snapshot>) -> Vec<Family> {
    let mut families = vec![gauge(
        "portolan_up",
        "Whether a server answers",
        f64::from(u8::from(snapshot.is_some())),
    )];
    if let Some(snapshot) = snapshot {
        families.extend(of_status(&snapshot.status));
        families.extend(of_times(&snapshot.status.times));
        families.extend(of_counters(&snapshot.counters));
        families.extend(of_sessions(&snapshot.sessions));
        families.extend(of_programs(&snapshot.sessions));
        families.extend(of_guarantees(&snapshot.guarantees));
    }
    families
}

fn of_status(status: &StatusReport) -> Vec<Family> {
    let build = vec![("version", status.version.clone())];
    let mut families = vec![
        gauges("portolan_build", "The server's version", vec![(build, 1.0)]),
        gauge(
            "portolan_uptime_seconds",
            "Time since the server started",
            status.uptime_s as f64,
        ),
        gauge(
            "portolan_processes",
            "Processes with a channel",
            f64::from(status.processes),
        ),
        gauge(
            "portolan_direct_sessions",
            "Sessions with a ring of their own",
            f64::from(status.direct),
        ),
    ];
    // Zero unless the sysctl kernel.bpf_stats_enabled is 1.
    let filter = &status.filter;
    families.push(counters(
        "portolan_filter_runs",
        "Packets that the packet filter has seen while the kernel counted them",
        vec![(Vec::new(), filter.runs as f64)],
    ));
    families.push(counters(
        "portolan_filter_seconds",
        "Time that the packet filter took for them",
        vec![(Vec::new(), filter.nanoseconds as f64 / 1e9)],
    ));
    families
}

fn of_times(times: &TimesReport) -> Vec<Family> {
    let MigrationTimes {
        cached,
        flushed,
        recalled,
    } = times.migrations;
    let kinds = [("cache", cached), ("flush", flushed), ("recall", recalled)];
    let kind = |(name, histogram): (&str, Histogram)| (vec![("kind", name.to_owned())], histogram);
    vec![
        histograms(
            "portolan_tcp_round_trip_seconds",
            "Smoothed round-trip times of connections, as they change",
            vec![(Vec::new(), times.round_trips)],
        ),
        histograms(
            "portolan_migration_seconds",
            "Durations of migrations of sessions to, from and between processes",
            kinds.map(kind).to_vec(),
        ),
    ]
}

/// Sums over all holders. A single holder's counts vanish when it ends, so they are not exported as counters.
fn of_counters(reports: &[CounterReport]) -> Vec<Family> {
    let mut by_reason: BTreeMap<(String, usize), Vec<(Labels, f64)>> = BTreeMap::new();
    let mut families = Vec::new();
    // The number of processes is a gauge, which of_status() exports.
    let all = reports
        .iter()
        .filter(|report| report.holder.is_none() && report.name != "processes");
    for report in all {
        let (group, name) = (metric_name(&report.group), metric_name(&report.name));
        let reason = REASONS
            .iter()
            .enumerate()
            .find_map(|(index, (prefix, ..))| {
                let rest = name.strip_prefix(prefix)?.strip_prefix('_')?;
                Some((index, rest.to_owned()))
            });
        match reason {
            Some((index, reason)) => by_reason
                .entry((group, index))
                .or_default()
                .push((vec![("reason", reason)], report.value as f64)),
            None => families.push(counters(
                format!("portolan_{group}_{name}"),
                "See the reference of counters",
                vec![(Vec::new(), report.value as f64)],
            )),
        }
    }
    families.extend(by_reason.into_iter().map(|((group, index), samples)| {
        let (_, name, help) = REASONS[index];
        counters(format!("portolan_{group}_{name}"), help, samples)
    }));
    families
}

/// Replaces characters that metric names may not contain, such as dashes.
fn metric_name(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect()
}

fn of_sessions(sessions: &[SessionReport]) -> Vec<Family> {
    let mut states: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for session in sessions {
        *states
            .entry((protocol(session), session.state.as_str()))
            .or_default() += 1;
    }
    let by_state = states.into_iter().map(|((protocol, state), count)| {
        let labels = vec![
            ("protocol", protocol.to_owned()),
            ("state", state.to_owned()),
        ];
        (labels, f64::from(count))
    });
    vec![gauges(
        "portolan_sessions",
        "Sessions by protocol and state",
        by_state.collect(),
    )]
}

fn protocol(session: &SessionReport) -> &'static str {
    match session.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    }
}

#[derive(Clone, Copy, Default)]
struct ProgramTotals {
    sessions: u32,
    receive_queue: u64,
    send_queue: u64,
}

impl ProgramTotals {
    fn add(&mut self, other: ProgramTotals) {
        self.sessions += other.sessions;
        self.receive_queue += other.receive_queue;
        self.send_queue += other.send_queue;
    }
}

fn of_programs(sessions: &[SessionReport]) -> Vec<Family> {
    let mut totals: BTreeMap<String, ProgramTotals> = BTreeMap::new();
    for session in sessions {
        if let Holder::Process { program, .. } = &session.holder {
            totals
                .entry(printable(program))
                .or_default()
                .add(ProgramTotals {
                    sessions: 1,
                    receive_queue: session.figures.receive_queue.into(),
                    send_queue: session.figures.send_queue.into(),
                });
        }
    }
    let totals = bounded(totals);
    let family = |name, help, value: fn(&ProgramTotals) -> f64| {
        let sample = |(program, totals): &(String, ProgramTotals)| {
            (vec![("program", program.clone())], value(totals))
        };
        gauges(name, help, totals.iter().map(sample).collect())
    };
    vec![
        family(
            "portolan_program_sessions",
            "Sessions that processes of a program hold",
            |totals| f64::from(totals.sessions),
        ),
        family(
            "portolan_program_receive_queue_bytes",
            "Bytes that a program has not read",
            |totals| totals.receive_queue as f64,
        ),
        family(
            "portolan_program_send_queue_bytes",
            "Bytes of a program that are not acknowledged",
            |totals| totals.send_queue as f64,
        ),
    ]
}

/// Returns the programs with the most sessions, and one entry for all others together.
fn bounded(totals: BTreeMap<String, ProgramTotals>) -> Vec<(String, ProgramTotals)> {
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by_key(|(_, totals)| std::cmp::Reverse(totals.sessions));
    let rest = totals.split_off(totals.len().min(PROGRAMS));
    if !rest.is_empty() {
        let mut other = ProgramTotals::default();
        rest.into_iter().for_each(|(_, totals)| other.add(totals));
        totals.push(("other".to_owned(), other));
    }
    totals
}

fn of_guarantees(report: &QosReport) -> Vec<Family> {
    let mut families = of_links(&report.links);
    families.extend(of_transmit(report));
    families.extend(of_receive(report));
    families.extend(of_cpu(report));
    families
}

fn of_links(links: &[LinkReport]) -> Vec<Family> {
    let device = |link: &LinkReport| vec![("device", link.device.clone())];
    let bytes = |value: fn(&LinkReport) -> Option<u64>| {
        let known = links
            .iter()
            .filter_map(|link| Some((device(link), value(link)? as f64 / 8.0)));
        known.collect()
    };
    vec![
        gauges(
            "portolan_link_rate_bytes_per_second",
            "The rate of a link",
            bytes(|link| link.rate),
        ),
        gauges(
            "portolan_link_reservable_bytes_per_second",
            "The rate that reservations may have together",
            bytes(|link| link.rate.map(|_| link.reservable)),
        ),
        gauges(
            "portolan_link_reserved_bytes_per_second",
            "The rate that reservations have together",
            bytes(|link| link.rate.map(|_| link.reserved)),
        ),
        gauges(
            "portolan_link_up",
            "Whether the device exists",
            links
                .iter()
                .map(|link| (device(link), f64::from(u8::from(!link.gone))))
                .collect(),
        ),
    ]
}

fn of_transmit(report: &QosReport) -> Vec<Family> {
    let rows = &report.transmit;
    let labels = |index: usize| {
        let row = &rows[index];
        vec![("scope", scope(&row.scope)), ("device", row.device.clone())]
    };
    let rate = |index: usize| rows[index].rate as f64 / 8.0;
    let kept = |index: usize| match rows[index].kept {
        RateKept::Full => rate(index),
        RateKept::Scaled { bits } => bits as f64 / 8.0,
        RateKept::Suspended => 0.0,
    };
    let all = 0..rows.len();
    vec![
        gauges(
            "portolan_transmit_reserved_bytes_per_second",
            "The rate of a transmit reservation",
            all.clone()
                .map(|index| (labels(index), rate(index)))
                .collect(),
        ),
        gauges(
            "portolan_transmit_kept_bytes_per_second",
            "What is kept of it on the link as it is now",
            all.clone()
                .map(|index| (labels(index), kept(index)))
                .collect(),
        ),
        counters(
            "portolan_transmit_reserved_bytes",
            "Bytes sent in the class of a reservation",
            all.clone()
                .map(|index| (labels(index), rows[index].traffic.bytes as f64))
                .collect(),
        ),
        counters(
            "portolan_transmit_reserved_drops",
            "Packets dropped in the class of a reservation",
            all.map(|index| (labels(index), rows[index].traffic.drops as f64))
                .collect(),
        ),
    ]
}

fn of_receive(report: &QosReport) -> Vec<Family> {
    let labels =
        |outcome: &str, of: &Scope| vec![("scope", scope(of)), ("outcome", outcome.to_owned())];
    let samples = report.receive.iter().flat_map(|row| {
        [
            (labels("passed", &row.scope), row.passed as f64),
            (labels("over_budget", &row.scope), row.dropped as f64),
            (labels("early", &row.scope), row.early as f64),
        ]
    });
    vec![counters(
        "portolan_receive_budget_packets",
        "Packets of a receive budget, by outcome",
        samples.collect(),
    )]
}

fn of_cpu(report: &QosReport) -> Vec<Family> {
    let rows = &report.cpu;
    let family = |name, help, ppm: fn(&CpuReport) -> u32| {
        let sample = |row: &CpuReport| {
            (
                vec![("scope", scope(&row.scope))],
                f64::from(ppm(row)) / 1e6,
            )
        };
        gauges(name, help, rows.iter().map(sample).collect())
    };
    vec![
        family(
            "portolan_cpu_reserved_ratio",
            "The reserved share of one CPU",
            |row| row.effective_ppm,
        ),
        family(
            "portolan_cpu_used_ratio",
            "The share of one CPU used in the last second",
            |row| row.used_ppm,
        ),
    ]
}

fn gauge(name: &str, help: &'static str, value: f64) -> Family {
    gauges(name, help, vec![(Vec::new(), value)])
}

fn gauges(name: &str, help: &'static str, samples: Vec<(Labels, f64)>) -> Family {
    Family {
        name: name.to_owned(),
        help,
        samples: Samples::Gauges(samples),
    }
}

fn histograms(name: &str, help: &'static str, samples: Vec<(Labels, Histogram)>) -> Family {
    Family {
        name: name.to_owned(),
        help,
        samples: Samples::Histograms(samples),
    }
}

fn counters(name: impl Into<String>, help: &'static str, samples: Vec<(Labels, f64)>) -> Family {
    Family {
        name: name.into(),
        help,
        samples: Samples::Counters(samples),
    }
}

#[cfg(test)]
mod tests;
