//! `tc` shows what is installed on a device, and the former state is restored.

use std::process::Command;

use super::*;
use crate::device;
use crate::testing::{in_fresh_namespace, ip, run};

const CLASS: Class = Class {
    minor: 0x10,
    parent: WHOLE,
    rate: 4_000_000,
    ceiling: 100_000_000,
    burst: 50_000,
    ceiling_burst: 50_000,
    quantum: 1_514,
    priority: 0,
};

fn tc(arguments: &str) -> String {
    let output = run(Command::new("tc").args(arguments.split(' ')));
    assert!(output.status.success(), "tc {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A device with Portolan's qdisc and two classes, in a namespace of its own.
fn with_device(test: fn(&mut Traffic, u32)) {
    in_fresh_namespace(move || {
        ip("link add p0 type veth peer name p1");
        ip("link set p0 up");
        ip("link set p1 up");
        let ifindex = device::index("p0").unwrap();
        test(&mut Traffic::open().unwrap(), ifindex);
    });
}

fn put(traffic: &mut Traffic, ifindex: u32) {
    traffic.put(ifindex).unwrap();
    let whole = Class {
        minor: WHOLE,
        parent: 0,
        rate: 40_000_000_000,
        ceiling: 40_000_000_000,
        ..CLASS
    };
    traffic.set_class(ifindex, &whole).unwrap();
    traffic.set_class(ifindex, &CLASS).unwrap();
    traffic.set_queue(ifindex, CLASS.minor).unwrap();
}

#[test]
fn classes_are_as_tc_shows_them() {
    with_device(|traffic, ifindex| {
        assert!(!traffic.is_ours(ifindex).unwrap());
        put(traffic, ifindex);
        assert!(traffic.is_ours(ifindex).unwrap());
        let shown = tc("class show dev p0");
        // More than 32 bits of bytes per second.
        assert!(
            shown.contains("htb 706f:1 root rate 40Gbit ceil 40Gbit"),
            "{shown}"
        );
        assert!(shown.contains("706f:10 parent 706f:1"), "{shown}");
        assert!(
            shown.contains("rate 4Mbit ceil 100Mbit burst 50000b"),
            "{shown}"
        );
        let changed = Class {
            rate: 8_000_000,
            ..CLASS
        };
        traffic.set_class(ifindex, &changed).unwrap();
        let shown = tc("class show dev p0");
        assert!(shown.contains("rate 8Mbit ceil 100Mbit"), "{shown}");
        let minors = |traffic: &mut Traffic| {
            let counts = traffic.counts(ifindex).unwrap();
            let mut minors: Vec<u16> = counts.iter().map(|(minor, _)| *minor).collect();
            minors.sort_unstable();
            minors
        };
        assert_eq!(minors(traffic), [WHOLE, CLASS.minor]);
        traffic.delete_class(ifindex, CLASS.minor).unwrap();
        traffic.delete_class(ifindex, CLASS.minor).unwrap();
        assert_eq!(minors(traffic), [WHOLE]);
        traffic.restore(ifindex, &Before::default()).unwrap();
        let shown = tc("qdisc show dev p0");
        assert!(shown.contains("noqueue 0:"), "{shown}");
    });
}

#[test]
fn a_users_discipline_stays_unless_told_otherwise() {
    with_device(|traffic, ifindex| {
        tc("qdisc add dev p0 root handle 7: pfifo limit 77");
        let error = traffic.look(ifindex, Foreign::Keep).unwrap_err();
        assert!(error.to_string().contains("pfifo 7:"), "{error}");
        let before = traffic.look(ifindex, Foreign::Replace).unwrap();
        assert_eq!(before.name().as_deref(), Some("pfifo 7:"));
        put(traffic, ifindex);
        let read = Before::parse(&before.record());
        assert_eq!(read, before);
        traffic.restore(ifindex, &read).unwrap();
        let shown = tc("qdisc show dev p0");
        assert!(
            shown.contains("pfifo 7: root") && shown.contains("limit 77p"),
            "{shown}"
        );
    });
}

#[test]
fn a_users_classes_come_back_whole() {
    with_device(|traffic, ifindex| {
        tc("qdisc add dev p0 root handle 9: htb default 20");
        tc("class add dev p0 parent 9: classid 9:1 htb rate 50mbit");
        tc("class add dev p0 parent 9:1 classid 9:20 htb rate 5mbit ceil 50mbit prio 3");
        tc("qdisc add dev p0 parent 9:20 handle 20: pfifo limit 55");
        // The kernel's own packets are counted meanwhile.
        let shown = || {
            let shown = tc("qdisc show dev p0") + &tc("class show dev p0");
            let words = shown.split_ascii_whitespace().collect::<Vec<_>>();
            let counted = |at: usize| at > 0 && words[at - 1] == "direct_packets_stat";
            let kept = (0..words.len()).filter(|at| !counted(*at));
            kept.map(|at| words[at]).collect::<Vec<_>>().join(" ")
        };
        let as_it_was = shown();
        let before = traffic.look(ifindex, Foreign::Replace).unwrap();
        put(traffic, ifindex);
        traffic.restore(ifindex, &before).unwrap();
        assert_eq!(shown(), as_it_was);
    });
}

#[test]
fn what_would_not_come_back_is_not_replaced() {
    with_device(|traffic, ifindex| {
        tc("qdisc add dev p0 root handle 9: htb default 20");
        tc("class add dev p0 parent 9: classid 9:20 htb rate 5mbit");
        let filter = "filter add dev p0 parent 9: bpf bytecode";
        let everything = ["1,6 0 0 1", "classid", "9:20"];
        let words = filter.split(' ').chain(everything);
        assert!(run(Command::new("tc").args(words)).status.success());
        let error = traffic.look(ifindex, Foreign::Replace).unwrap_err();
        assert!(error.to_string().contains("filters"), "{error}");
        tc("qdisc del dev p0 root");
        tc("qdisc add dev p0 root handle 9: tbf rate 1mbit burst 10k latency 50ms");
        let error = traffic.look(ifindex, Foreign::Replace).unwrap_err();
        assert!(error.to_string().contains("tbf 9:"), "{error}");
    });
}

#[test]
fn a_leftover_of_ours_is_in_nobodys_way() {
    with_device(|traffic, ifindex| {
        put(traffic, ifindex);
        assert_eq!(
            traffic.look(ifindex, Foreign::Keep).unwrap(),
            Before::default()
        );
        put(traffic, ifindex);
    });
}

#[test]
fn no_record_makes_the_parser_panic() {
    portolan_fuzz::check!(1000)
        .with_type::<String>()
        .for_each(|record| {
            let _ = Before::parse(record);
        });
}
