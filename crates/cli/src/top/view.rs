//! Derives a view from two snapshots: rates, shares and totals, the busiest first.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter::Sum;
use std::net::SocketAddr;
use std::ops::AddAssign;
use std::time::Duration;

use portolan_proto::qos::{LinkReport, QosReport, Scope};
use portolan_proto::report::{CounterReport, Holder, SessionReport};
use portolan_sys::accounts;
use portolan_types::Protocol;
use schemars::JsonSchema;
use serde::Serialize;

use super::{DeviceBytes, Look};
use crate::json::{self, HolderView, measure, measure_schema};
use crate::table::printable;

// Bits per second. A doc comment would describe each row that has it in the schema.
#[derive(Clone, Copy, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Traffic {
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub in_bits: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub out_bits: f64,
}

impl Traffic {
    fn both(self) -> f64 {
        self.in_bits + self.out_bits
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.in_bits += other.in_bits;
        self.out_bits += other.out_bits;
    }
}

impl Sum for Traffic {
    fn sum<I: Iterator<Item = Traffic>>(all: I) -> Traffic {
        all.fold(Traffic::default(), |mut sum, traffic| {
            sum += traffic;
            sum
        })
    }
}

/// The contents of one screen. Rates are per second, shares are of one CPU.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct View {
    /// Time since the previous snapshot.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub seconds: f64,
    #[serde(flatten)]
    pub traffic: Traffic,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub drops: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub server_cpu: f64,
    pub sessions: Vec<SessionRow>,
    pub processes: Vec<ProcessRow>,
    pub users: Vec<UserRow>,
    pub links: Vec<LinkRow>,
    pub guarantees: Vec<GuaranteeRow>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SessionRow {
    pub protocol: &'static str,
    #[schemars(with = "String")]
    pub local: SocketAddr,
    #[schemars(with = "Option<String>")]
    pub remote: Option<SocketAddr>,
    pub holder: HolderView,
    #[serde(flatten)]
    pub traffic: Traffic,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub in_packets: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub out_packets: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub retransmits: f64,
    /// CPU time of protocol processing alone, as the library estimates it.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub cpu: f64,
    pub receive_queue: u32,
    pub send_queue: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProcessRow {
    pub pid: u32,
    pub program: String,
    pub sessions: usize,
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Frames that the packet filter dropped because a ring was full, a budget exceeded or a priority low.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub drops: f64,
    /// CPU time of the whole program, not of its network traffic alone.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub cpu: f64,
}

/// The sessions of one user, whoever holds them.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct UserRow {
    pub uid: u32,
    /// Null if there is no account of this number.
    pub user: Option<String>,
    /// Processes that hold a session.
    pub processes: usize,
    pub sessions: usize,
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Those of the processes.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub drops: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub cpu: f64,
}

/// A managed device with all its traffic, the kernel's included. Traffic is read from /proc/net/dev: if the server is in
/// another network namespace, it is zero.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LinkRow {
    pub device: String,
    /// The device exists.
    pub is_present: bool,
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Null: not known.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub rate: f64,
    /// The sum of all reservations.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub reserved: f64,
    /// Packets per second that queues of the link dropped.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub drops: f64,
}

/// A guarantee and its use, both in the unit of its kind.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GuaranteeRow {
    pub kind: &'static str,
    pub scope: String,
    pub unit: &'static str,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub granted: f64,
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub used: f64,
    /// Packets per second.
    #[serde(serialize_with = "measure")]
    #[schemars(schema_with = "measure_schema")]
    pub drops: f64,
}

pub(super) fn pid_of(session: &SessionReport) -> Option<u32> {
    match session.holder {
        Holder::Process { pid, .. } => Some(pid),
        Holder::Server | Holder::Relayed => None,
    }
}

impl View {
    pub(super) fn between(before: &Look, now: &Look) -> View {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
        let sessions = sessions(&before.sessions, &now.sessions, seconds);
        let shares = cpu_shares(&before.cpu, &now.cpu, seconds);
        let drops = drops(&before.counters, &now.counters, seconds);
        View {
            seconds,
            traffic: sessions.iter().map(|session| session.traffic).sum(),
            drops: drops.values().sum(),
            server_cpu: shares.get(&now.server).copied().unwrap_or(0.0),
            processes: processes(&sessions, &now.sessions, &drops, &shares),
            users: users(&sessions, &now.sessions, &drops, &shares),
            links: links(before, now, seconds),
            guarantees: guarantees(&before.guarantees, &now.guarantees, seconds),
            sessions: by_rate(sessions, |session| session.traffic.both()),
        }
    }
}

fn by_rate<T>(mut rows: Vec<T>, rate: impl Fn(&T) -> f64) -> Vec<T> {
    rows.sort_by(|one, other| rate(other).total_cmp(&rate(one)));
    rows
}

/// Identifies a session for callers that may not know its number.
fn key(session: &SessionReport) -> (Protocol, SocketAddr, Option<SocketAddr>, Option<u32>) {
    let pid = pid_of(session);
    (session.protocol, session.local, session.remote, pid)
}

/// Returns the rate of a count. A count that decreased has started again from zero.
fn rate(before: Option<u64>, now: u64, seconds: f64) -> f64 {
    let since = now.checked_sub(before.unwrap_or(0)).unwrap_or(now);
    since as f64 / seconds
}

/// Returns rows in the order of the list.
fn sessions(before: &[SessionReport], now: &[SessionReport], seconds: f64) -> Vec<SessionRow> {
    let known: HashMap<_, _> = before.iter().map(|s| (key(s), s.figures)).collect();
    let row = |session: &SessionReport| {
        let before = known.get(&key(session));
        let (figures, zero) = (session.figures, Default::default());
        let earlier = before.unwrap_or(&zero);
        let rate = |before: u64, now: u64| rate(Some(before), now, seconds);
        SessionRow {
            protocol: json::protocol(session.protocol),
            local: session.local,
            remote: session.remote,
            holder: (&session.holder).into(),
            traffic: Traffic {
                in_bits: 8.0 * rate(earlier.bytes_in, figures.bytes_in),
                out_bits: 8.0 * rate(earlier.bytes_out, figures.bytes_out),
            },
            in_packets: rate(earlier.segments_in, figures.segments_in),
            out_packets: rate(earlier.segments_out, figures.segments_out),
            retransmits: rate(earlier.retransmits, figures.retransmits),
            cpu: rate(earlier.cpu_us, figures.cpu_us) / 1e6,
            receive_queue: figures.receive_queue,
            send_queue: figures.send_queue,
        }
    };
    now.iter().map(row).collect()
}

fn cpu_shares(
    before: &[(u32, Duration)],
    now: &[(u32, Duration)],
    seconds: f64,
) -> HashMap<u32, f64> {
    let known: HashMap<u32, Duration> = before.iter().copied().collect();
    // A process that is not in the previous snapshot would be charged with its whole lifetime.
    let share = |&(pid, time): &(u32, Duration)| {
        let used = time.saturating_sub(*known.get(&pid)?);
        Some((pid, used.as_secs_f64() / seconds))
    };
    now.iter().filter_map(share).collect()
}

/// Returns the rate of frames that the packet filter dropped, by process.
fn drops(before: &[CounterReport], now: &[CounterReport], seconds: f64) -> HashMap<u32, f64> {
    let lost = |counters: &[CounterReport]| {
        let mut lost: HashMap<u32, u64> = HashMap::new();
        for counter in counters.iter().filter(|counter| counter.group == "receive") {
            if let Some(Holder::Process { pid, .. }) = &counter.holder {
                *lost.entry(*pid).or_default() += counter.value;
            }
        }
        lost
    };
    let known = lost(before);
    let since = |(pid, now)| (pid, rate(known.get(&pid).copied(), now, seconds));
    lost(now).into_iter().map(since).collect()
}

fn processes(
    rows: &[SessionRow],
    sessions: &[SessionReport],
    drops: &HashMap<u32, f64>,
    shares: &HashMap<u32, f64>,
) -> Vec<ProcessRow> {
    let mut totals: HashMap<u32, ProcessRow> = HashMap::new();
    for (row, session) in rows.iter().zip(sessions) {
        let Holder::Process { pid, program } = &session.holder else {
            continue;
        };
        let total = totals.entry(*pid).or_insert_with(|| ProcessRow {
            pid: *pid,
            program: printable(program),
            sessions: 0,
            traffic: Traffic::default(),
            drops: drops.get(pid).copied().unwrap_or(0.0),
            cpu: shares.get(pid).copied().unwrap_or(0.0),
        });
        total.sessions += 1;
        total.traffic += row.traffic;
    }
    by_rate(totals.into_values().collect(), |total| {
        total.traffic.both() + total.drops
    })
}

fn users(
    rows: &[SessionRow],
    sessions: &[SessionReport],
    drops: &HashMap<u32, f64>,
    shares: &HashMap<u32, f64>,
) -> Vec<UserRow> {
    let mut totals: BTreeMap<u32, (UserRow, BTreeSet<u32>)> = BTreeMap::new();
    for (row, session) in rows.iter().zip(sessions) {
        let (total, pids) = totals
            .entry(session.uid)
            .or_insert_with(|| (no_use_of(session.uid), BTreeSet::new()));
        total.sessions += 1;
        total.traffic += row.traffic;
        pids.extend(pid_of(session));
    }
    let rows = totals.into_values().map(|(total, pids)| UserRow {
        processes: pids.len(),
        drops: pids.iter().filter_map(|pid| drops.get(pid)).sum(),
        cpu: pids.iter().filter_map(|pid| shares.get(pid)).sum(),
        ..total
    });
    by_rate(rows.collect(), |total| total.traffic.both())
}

fn no_use_of(uid: u32) -> UserRow {
    UserRow {
        uid,
        user: accounts::name_of(uid).map(|name| printable(&name)),
        processes: 0,
        sessions: 0,
        traffic: Traffic::default(),
        drops: 0.0,
        cpu: 0.0,
    }
}

/// Returns rows in the order of the report.
fn links(before: &Look, now: &Look, seconds: f64) -> Vec<LinkRow> {
    let row = |link: &LinkReport| {
        let traffic = |look: &Look| look.devices.get(&link.device).copied();
        let earlier = traffic(before);
        let since = |of: fn(DeviceBytes) -> u64| {
            let now = traffic(now).map_or(0, of);
            // A device that is not in the previous snapshot would be charged with its whole lifetime.
            8.0 * rate(Some(earlier.map_or(now, of)), now, seconds)
        };
        let lost = |report: &QosReport| queue_drops(report, &link.device);
        LinkRow {
            device: printable(&link.device),
            is_present: !link.gone,
            traffic: Traffic {
                in_bits: since(|bytes| bytes.received),
                out_bits: since(|bytes| bytes.sent),
            },
            rate: link.rate.map_or(f64::INFINITY, |rate| rate as f64),
            reserved: link.reserved as f64,
            drops: rate(
                Some(lost(&before.guarantees)),
                lost(&now.guarantees),
                seconds,
            ),
        }
    };
    now.guarantees.links.iter().map(row).collect()
}

/// Returns the packets that all classes of a device have dropped.
fn queue_drops(report: &QosReport, device: &str) -> u64 {
    let links = report.links.iter().filter(|link| link.device == device);
    let classes = report.transmit.iter().filter(|row| row.device == device);
    let unreserved: u64 = links.map(|link| link.best_effort.drops).sum();
    let reserved: u64 = classes.map(|class| class.traffic.drops).sum();
    unreserved + reserved
}

/// Returns rows in the order of the report.
fn guarantees(before: &QosReport, now: &QosReport, seconds: f64) -> Vec<GuaranteeRow> {
    let transmit = now.transmit.iter().map(|class| {
        let known = before.transmit.iter().find(|b| b.scope == class.scope);
        let known = known.map(|known| known.traffic).unwrap_or_default();
        GuaranteeRow {
            kind: "transmit",
            scope: name(&class.scope),
            unit: "bit/s",
            granted: class.rate as f64,
            used: 8.0 * rate(Some(known.bytes), class.traffic.bytes, seconds),
            drops: rate(Some(known.drops), class.traffic.drops, seconds),
        }
    });
    let receive = now.receive.iter().map(|budget| {
        let known = before.receive.iter().find(|b| b.scope == budget.scope);
        let count = |of: fn(&portolan_proto::qos::ReceiveReport) -> u64| {
            rate(known.map(of), of(budget), seconds)
        };
        GuaranteeRow {
            kind: "receive",
            scope: name(&budget.scope),
            unit: "packets/s",
            // Unlimited packets are infinite here, which JSON shows as null.
            granted: budget.spec.packets.map_or(f64::INFINITY, f64::from),
            used: count(|budget| budget.passed),
            drops: count(|budget| budget.dropped + budget.early),
        }
    });
    let cpu = now.cpu.iter().map(|reservation| GuaranteeRow {
        kind: "cpu",
        scope: name(&reservation.scope),
        unit: "CPU",
        granted: f64::from(reservation.effective_ppm) / 1e6,
        used: f64::from(reservation.used_ppm) / 1e6,
        drops: 0.0,
    });
    transmit.chain(receive).chain(cpu).collect()
}

fn name(scope: &Scope) -> String {
    printable(&scope.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use portolan_proto::qos::ClassTraffic;
    use portolan_proto::report::{DeliveryReport, SessionFigures};
    use portolan_types::SessionId;

    use super::*;

    fn session(port: u16, bytes_in: u64) -> SessionReport {
        SessionReport {
            session: SessionId(0),
            protocol: Protocol::Udp,
            local: ([10, 0, 0, 1], port).into(),
            remote: None,
            holder: Holder::Process {
                pid: 7,
                program: "dns\x1b[2J".into(),
            },
            uid: 4_000_000_000,
            state: "UNCONN".into(),
            migrations: 0,
            mapping: Default::default(),
            delivery: DeliveryReport::As(Default::default()),
            listener: None,
            figures: SessionFigures {
                bytes_in,
                ..Default::default()
            },
        }
    }

    fn lost(value: u64) -> CounterReport {
        CounterReport {
            group: "receive".into(),
            name: "drop_ring_full".into(),
            value,
            holder: session(1, 0).holder.into(),
        }
    }

    fn look(at: Instant, sessions: Vec<SessionReport>, drops: u64, cpu_ms: u64) -> Look {
        Look {
            at,
            sessions,
            counters: vec![lost(drops)],
            guarantees: QosReport::default(),
            server: 1,
            cpu: vec![(7, Duration::from_millis(cpu_ms))],
            devices: HashMap::new(),
        }
    }

    fn link(device: &str, drops: u64) -> LinkReport {
        LinkReport {
            device: device.into(),
            gone: false,
            rate: None,
            reservable: 0,
            reserved: 0,
            best_effort: ClassTraffic {
                drops,
                ..Default::default()
            },
            replaced: None,
        }
    }

    #[test]
    fn rates_are_differences_over_the_time_between_the_looks() {
        let start = Instant::now();
        let before = look(start, vec![session(1, 1000), session(2, 0)], 5, 100);
        let then = start + Duration::from_secs(2);
        let now = look(then, vec![session(1, 2000), session(2, 3000)], 25, 600);
        let view = View::between(&before, &now);
        let ports: Vec<u16> = view.sessions.iter().map(|s| s.local.port()).collect();
        assert_eq!(ports, [2, 1]);
        assert_eq!(view.sessions[0].traffic.in_bits, 12_000.0);
        let process = &view.processes[0];
        assert_eq!((process.sessions, process.traffic.in_bits), (2, 16_000.0));
        assert_eq!((process.drops, process.cpu), (10.0, 0.25));
        assert_eq!(process.program, "dns?[2J");
        let user = &view.users[0];
        assert_eq!((user.uid, &user.user), (4_000_000_000, &None));
        assert_eq!((user.processes, user.sessions), (1, 2));
        assert_eq!(
            (user.traffic.in_bits, user.drops, user.cpu),
            (16_000.0, 10.0, 0.25)
        );
    }

    #[test]
    fn traffic_of_links_counts_from_the_first_snapshot_that_has_the_device() {
        let start = Instant::now();
        let mut before = look(start, Vec::new(), 0, 0);
        let mut now = look(start + Duration::from_secs(2), Vec::new(), 0, 0);
        let bytes = |received, sent| DeviceBytes { received, sent };
        before.guarantees.links = vec![link("eth0", 10)];
        before.devices.insert("eth0".into(), bytes(1000, 500));
        now.guarantees.links = vec![link("eth0", 14), link("eth1", 0)];
        now.devices.insert("eth0".into(), bytes(3000, 1000));
        now.devices.insert("eth1".into(), bytes(u64::MAX, 7));
        let links = View::between(&before, &now).links;
        let of = |link: &LinkRow| (link.traffic.in_bits, link.traffic.out_bits, link.drops);
        assert_eq!(of(&links[0]), (8000.0, 2000.0, 2.0));
        assert_eq!(of(&links[1]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_count_that_went_back_is_of_a_new_session() {
        let start = Instant::now();
        let before = look(start, vec![session(1, 5000)], 0, 0);
        let now = look(start + Duration::from_secs(1), vec![session(1, 10)], 0, 0);
        assert_eq!(
            View::between(&before, &now).sessions[0].traffic.in_bits,
            80.0
        );
    }
}
