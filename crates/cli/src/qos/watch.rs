//! `portolan qos watch`: traffic and CPU time since the previous report, beside the guarantees.

mod events;

use std::time::{Duration, Instant};

use portolan_proto::qos::text::{show_rate, show_share};
use portolan_proto::qos::{ClassTraffic, QosReport};
use schemars::JsonSchema;
use serde::Serialize;

use self::events::Event;
use super::Arguments;
use super::show::{class, nothing, print_tables, scope};
use crate::exit::{Failure, print};
use crate::json::print_json_line;
use crate::table::{lines, printable};

/// What happened in one interval, per second.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Rates {
    events: Vec<Event>,
    transmit: Vec<Sent>,
    receive: Vec<Received>,
    cpu: Vec<Computed>,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct Sent {
    whom: String,
    device: String,
    class: Option<u16>,
    /// The guaranteed rate.
    rate: Option<u64>,
    bits: u64,
    packets: u64,
    drops: u64,
    backlog: u32,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct Received {
    whom: String,
    passed: u64,
    dropped: u64,
    early: u64,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct Computed {
    whom: String,
    effective_ppm: u32,
    used_ppm: u32,
    overruns: u32,
}

pub(super) fn run(arguments: &Arguments, seconds: u32) -> Result<(), Failure> {
    let mut before = (Instant::now(), arguments.server.guarantees()?);
    loop {
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let now = (Instant::now(), arguments.server.guarantees()?);
        let rates = rates(&before.1, &now.1, now.0 - before.0);
        if arguments.json {
            print_json_line(&rates)?;
        } else {
            for event in &rates.events {
                print(event.to_string())?;
            }
            print_tables(tables(&rates))?;
            print("")?;
        }
        before = now;
    }
}

/// Computes rates. An entry that is new counts from zero; one that has gone is left out.
fn rates(before: &QosReport, now: &QosReport, time: Duration) -> Rates {
    let per_second = |count: u64, earlier: u64| {
        let difference = count.saturating_sub(earlier);
        (difference as f64 / time.as_secs_f64()).round() as u64
    };
    let receive = now.receive.iter().map(|entry| {
        let earlier = before.receive.iter().find(|e| e.scope == entry.scope);
        let of = |count: fn(&_) -> u64| per_second(count(entry), earlier.map_or(0, count));
        Received {
            whom: scope(&entry.scope),
            passed: of(|entry| entry.passed),
            dropped: of(|entry| entry.dropped),
            early: of(|entry| entry.early),
        }
    });
    let cpu = now.cpu.iter().map(|entry| Computed {
        whom: scope(&entry.scope),
        effective_ppm: entry.effective_ppm,
        used_ppm: entry.used_ppm,
        overruns: entry.overruns,
    });
    let earlier = senders(before);
    let sent = |sender: &Sender| {
        let same = |other: &&Sender| (&other.whom, &other.device) == (&sender.whom, &sender.device);
        let earlier = earlier.iter().find(same).map(|other| other.traffic);
        let earlier = earlier.unwrap_or_default();
        let traffic = sender.traffic;
        Sent {
            whom: sender.whom.clone(),
            device: sender.device.clone(),
            class: sender.class,
            rate: sender.rate,
            bits: per_second(traffic.bytes, earlier.bytes).saturating_mul(8),
            packets: per_second(traffic.packets, earlier.packets),
            drops: per_second(traffic.drops, earlier.drops),
            backlog: traffic.backlog,
        }
    };
    Rates {
        events: events::between(before, now),
        transmit: senders(now).iter().map(sent).collect(),
        receive: receive.collect(),
        cpu: cpu.collect(),
    }
}

/// A holder of a class of a link.
struct Sender {
    whom: String,
    device: String,
    class: Option<u16>,
    rate: Option<u64>,
    traffic: ClassTraffic,
}

fn senders(report: &QosReport) -> Vec<Sender> {
    let best_effort = report.links.iter().map(|link| Sender {
        whom: "best effort".to_owned(),
        device: printable(&link.device),
        class: None,
        rate: None,
        traffic: link.best_effort,
    });
    let groups = report.groups.iter().map(|group| Sender {
        whom: format!("group {}", group.key),
        device: printable(&group.device),
        class: Some(group.class),
        rate: Some(group.rate),
        traffic: group.traffic,
    });
    let reserved = report.transmit.iter().map(|entry| Sender {
        whom: scope(&entry.scope),
        device: printable(&entry.device),
        class: Some(entry.class),
        rate: Some(entry.rate),
        traffic: entry.traffic,
    });
    best_effort.chain(groups).chain(reserved).collect()
}

fn tables(rates: &Rates) -> Vec<Vec<String>> {
    let sent: Vec<_> = rates
        .transmit
        .iter()
        .map(|sent| {
            vec![
                sent.whom.clone(),
                sent.device.clone(),
                sent.class.map_or_else(nothing, class),
                sent.rate.map_or_else(nothing, show_rate),
                show_rate(sent.bits),
                sent.packets.to_string(),
                sent.drops.to_string(),
                sent.backlog.to_string(),
            ]
        })
        .collect();
    let received: Vec<_> = rates
        .receive
        .iter()
        .map(|received| {
            let counts = [received.passed, received.dropped, received.early];
            let counts = counts.map(|count| count.to_string());
            [received.whom.clone()].into_iter().chain(counts).collect()
        })
        .collect();
    let computed: Vec<_> = rates
        .cpu
        .iter()
        .map(|computed| {
            vec![
                computed.whom.clone(),
                show_share(computed.effective_ppm.into()),
                show_share(computed.used_ppm.into()),
                computed.overruns.to_string(),
            ]
        })
        .collect();
    let head = [
        "Transmit",
        "Dev",
        "Class",
        "Rate",
        "Actual",
        "Packets/s",
        "Drops/s",
        "Backlog",
    ];
    vec![
        lines(&head, &sent),
        lines(&["Receive", "Passed/s", "Dropped/s", "Early/s"], &received),
        lines(&["CPU", "Effective", "Used", "Overruns"], &computed),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::show::tests::report;
    use super::*;

    #[test]
    fn an_interval_shows_what_happened_in_it() {
        let before = report();
        let mut now = report();
        now.transmit[0].traffic.bytes += 5_000_000;
        now.transmit[0].traffic.packets += 4_000;
        now.receive[0].dropped += 20;
        let rates = rates(&before, &now, Duration::from_secs(2));
        let sent = &rates.transmit[2];
        assert_eq!(
            (sent.whom.as_str(), sent.bits, sent.packets),
            ("pid 123", 20_000_000, 2_000)
        );
        assert_eq!((rates.receive[0].dropped, rates.receive[0].passed), (10, 0));
        assert_eq!(rates.cpu[0].used_ppm, 123_456);
    }

    #[test]
    fn who_has_come_counts_from_zero_and_who_started_anew_does_not_go_back() {
        let rates = rates(&QosReport::default(), &report(), Duration::from_secs(1));
        assert_eq!(rates.transmit[2].bits, 8_000);
        let mut fewer = report();
        fewer.transmit[0].traffic = ClassTraffic::default();
        let rates = super::rates(&report(), &fewer, Duration::from_secs(1));
        assert_eq!(rates.transmit[2].bits, 0);
    }

    #[test]
    fn rates_stand_beside_what_is_guaranteed() {
        let rates = rates(&report(), &report(), Duration::from_secs(1));
        assert_eq!(
            tables(&rates)[0],
            [
                "Transmit    Dev  Class Rate    Actual Packets/s Drops/s Backlog",
                "best effort eth0 -     -       0bit   0         0       1500",
                "group 7     eth0 11    2.5mbit 0bit   0         0       1500",
                "pid 123     eth0 10    20mbit  0bit   0         0       1500",
            ]
        );
    }
}
