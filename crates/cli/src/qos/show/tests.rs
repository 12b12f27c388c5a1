//! Every reservation is a row of a table with a head.

use portolan_proto::qos::{Adapt, Cpu, CpuClassReport, Receive, ReceiveReport};
use portolan_types::Protocol;

use super::*;

/// A report with one entry of each kind.
pub(crate) fn report() -> QosReport {
    let traffic = ClassTraffic {
        bytes: 1_000,
        packets: 10,
        drops: 0,
        backlog: 1_500,
    };
    QosReport {
        links: vec![LinkReport {
            device: "eth0".into(),
            gone: false,
            rate: Some(100_000_000),
            reservable: 90_000_000,
            reserved: 20_000_000,
            best_effort: traffic,
            replaced: Some("pfifo_fast".into()),
        }],
        transmit: vec![TransmitReport {
            scope: Scope::Process { pid: 123 },
            device: "eth0".into(),
            class: 0x10,
            uid: 0,
            rate: 20_000_000,
            ceiling: 50_000_000,
            burst: 65_536,
            group: None,
            kept: RateKept::Scaled { bits: 10_000_000 },
            traffic,
        }],
        groups: vec![GroupReport {
            key: 7,
            device: "eth0".into(),
            class: 0x11,
            uid: 0,
            mode: 0o710,
            rate: 2_500_000,
            reserved: 0,
            options: GroupOptions {
                share: true,
                keep: true,
                ..GroupOptions::default()
            },
            kept: RateKept::Suspended,
            traffic,
        }],
        receive: vec![ReceiveReport {
            scope: Scope::Port {
                protocol: Protocol::Udp,
                port: 53,
            },
            uid: 0,
            spec: Receive {
                packets: Some(10_000),
                bits: None,
                burst_ms: 50,
                priority: Some(3),
            },
            passed: 5,
            dropped: 2,
            early: 1,
        }],
        cpu_elsewhere_ppm: 400_000,
        cpu_classes: vec![CpuClassReport {
            name: "video".into(),
            rate_ppm: 500_000,
            overbooking_ppm: None,
            nominal_ppm: 300_000,
            members: 1,
        }],
        cpu: vec![CpuReport {
            scope: Scope::Thread { tid: 5 },
            uid: 0,
            spec: Cpu {
                class: Some("video".into()),
                rate_ppm: 300_000,
                period_us: 33_000,
                slack: false,
                adapt: Adapt::Propose,
            },
            effective_ppm: 300_000,
            used_ppm: 123_456,
            overruns: 2,
            proposed_ppm: Some(150_000),
            form: CpuForm::Weaker {
                form: "cpu.max".into(),
                reason: "the kernel\u{1b} says no".into(),
            },
        }],
    }
}

#[test]
fn links_and_reservations_stand_under_their_heads() {
    assert_eq!(
        links(&report()),
        [
            "Link Rate    Reservable Reserved Replaced",
            "eth0 100mbit 90mbit     20mbit   pfifo_fast",
        ]
    );
    assert_eq!(
        transmit(&report()),
        [
            "Transmit Dev  Class Rate   Ceil   Burst Kept   Group By",
            "pid 123  eth0 10    20mbit 50mbit 64k   10mbit -     root",
        ]
    );
    assert_eq!(
        group_table(&report()),
        [
            "Group Dev  Class Rate    Reserved Kept Mode Options    By",
            "7     eth0 11    2.5mbit 0bit     no   0710 share,keep root",
        ]
    );
    assert_eq!(
        budgets(&report()),
        [
            "Receive     Packets/s Bits/s Burst Prio Passed Dropped Early By",
            "port udp:53 10000     -      50ms  3    5      2       1     root",
        ]
    );
}

#[test]
fn why_a_form_is_weaker_follows_its_line() {
    assert_eq!(
        processors(&report()),
        [
            "CPU   Class Rate Effective Period Used     Overruns Adapt   Proposed Form    By",
            "tid 5 video 0.3  0.3       33ms   0.123456 2        propose 0.15     cpu.max root",
            "\t the kernel? says no",
        ]
    );
}

#[test]
fn classes_are_shown_with_their_traffic() {
    assert_eq!(
        link_classes(&report()),
        [
            "Dev  Class For         Rate    Ceil   Bytes Packets Drops Backlog",
            "eth0 -     best effort -       -      1000  10      0     1500",
            "eth0 11    group 7     2.5mbit -      1000  10      0     1500",
            "eth0 10    pid 123     20mbit  50mbit 1000  10      0     1500",
        ]
    );
    assert_eq!(
        cpu_classes(&report()),
        [
            "CPU-Class       Rate Overbooking Nominal Members",
            "video           0.5  any         0.3     1",
            "(other servers) -    -           0.4     -",
        ]
    );
}

#[test]
fn json_has_scopes_as_commands_take_them() {
    let value = serde_json::to_value(QosView::from(&report())).unwrap();
    assert_eq!(value["transmit"][0]["scope"], "pid 123");
    assert_eq!(value["receive"][0]["scope"], "port udp:53");
    assert_eq!(value["cpu"][0]["scope"], "tid 5");
    assert_eq!(value["links"][0]["rate"], 100_000_000);
}
