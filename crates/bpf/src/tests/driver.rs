//! The packet filter in a device's driver: which frames are served there, which are left to the filter at tc, and how
//! it affects a device and programs of others.

use portolan_netns::Namespace;
use portolan_proto::filter::{BindingKey, Budget, Doorbell, FilterInterface, FlowRow};
use portolan_types::{FlowKey, MacAddr, Protocol};

use super::attach::run;
use super::bed::{Bed, CHANNEL, IFINDEX, Outcome, any_address, flows, outcome, row};
use super::frames::{Frame, HOST_MAC};
use crate::driver::{DriverError, DriverHook};

/// Verdicts of linux/bpf.h.
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_REDIRECT: i32 = 4;

const BOTH: [&str; 2] = ["driver_filter", "generic_filter"];

fn in_driver() -> FlowRow {
    FlowRow {
        flags: FlowRow::IN_DRIVER,
        ..row(CHANNEL)
    }
}

/// A bed with a managed input device, and a flow with that row.
fn bed_with(flow: &FlowKey, row: FlowRow) -> Bed {
    let bed = Bed::new();
    let interface = FilterInterface {
        ifindex: IFINDEX,
        mac: HOST_MAC.0,
        reserved: [0; 2],
    };
    bed.filter.set_interfaces(&[interface]).unwrap();
    bed.filter.steer(flow, row).unwrap();
    bed
}

fn filter(bed: &Bed, frame: &[u8]) -> Outcome {
    bed.run_in_driver("driver_filter", frame)
}

fn left(why: &'static str) -> Outcome {
    outcome(XDP_PASS, &[why])
}

fn delivered() -> Outcome {
    outcome(XDP_DROP, &["delivered_in_driver"])
}

#[test]
fn a_packet_of_a_session_that_wants_it_goes_into_the_ring_as_at_tc() {
    for flow in [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(flows) {
        for payload in [0, 1, 183, 439, 951, 1460, 3000] {
            let bed = bed_with(&flow, in_driver());
            let frame = Frame {
                payload,
                ..Frame::received(&flow)
            }
            .build();
            assert_eq!(filter(&bed, &frame), delivered(), "{flow}");
            let tc = bed.run("packet_filter", &frame);
            assert_eq!(tc.counted, ["delivered"], "{flow}");
            let records = bed.records();
            let [(header, copy), (at_tc, copy_at_tc)] = &records[..] else {
                panic!("{} records", records.len());
            };
            assert_eq!((copy, copy_at_tc), (&frame, &frame), "{flow}");
            let facts = |header: &portolan_proto::filter::RecordHeader| {
                let owner = (header.slot, header.generation);
                let frame = (header.length, header.gso_size, header.flags, header.ifindex);
                (owner, frame)
            };
            assert_eq!(facts(header), facts(at_tc), "{flow}");
            assert_eq!(bed.doorbell().delivered, 2);
        }
    }
}

#[test]
fn what_does_not_want_it_is_left_alone() {
    for flow in flows(Protocol::Tcp) {
        let frame = Frame::received(&flow).build();
        for program in BOTH {
            let run = |bed: &Bed, frame: &[u8]| bed.run_in_driver(program, frame);
            let unmarked = bed_with(&flow, row(CHANNEL));
            assert_eq!(run(&unmarked, &frame), left("left_unclaimed"));
            let bed = bed_with(&flow, in_driver());
            let stranger = Frame {
                source: "192.0.2.1:9".parse().unwrap(),
                ..Frame::received(&flow)
            };
            let to_another = Frame {
                destination_mac: MacAddr([2; 6]),
                ..Frame::received(&flow)
            };
            assert_eq!(run(&bed, &to_another.build()), left("left_not_to_host"));
            if flow.local.is_ipv4() {
                assert_eq!(run(&bed, &stranger.build()), left("left_unclaimed"));
                let mut first_fragment = frame.clone();
                first_fragment[20] = 0x20;
                assert_eq!(run(&bed, &first_fragment), left("left_other"));
            }
            let mut arp = frame.clone();
            arp[12..14].copy_from_slice(&[8, 6]);
            assert_eq!(run(&bed, &arp), left("left_other"));
            let mut tagged = frame.clone();
            tagged[12..14].copy_from_slice(&[0x81, 0]);
            assert_eq!(run(&bed, &tagged), left("left_other"));
            assert_eq!(run(&bed, &frame[..30]), left("left_other"));
            assert!(bed.records().is_empty());
        }
    }
}

#[test]
fn sessions_with_extensions_go_by_the_filter_that_calls_them() {
    let [flow, _] = flows(Protocol::Udp);
    let extended = FlowRow {
        flags: FlowRow::IN_DRIVER | FlowRow::EXTENDED,
        ..row(CHANNEL)
    };
    let bed = bed_with(&flow, extended);
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), left("left_extended"));
}

#[test]
fn a_datagram_may_be_several_where_the_hook_is_generic() {
    let [flow, _] = flows(Protocol::Udp);
    let bed = bed_with(&flow, in_driver());
    let frame = Frame::received(&flow).build();
    let generic = bed.run_in_driver("generic_filter", &frame);
    assert_eq!(generic, left("left_datagram"));
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow, in_driver());
    let frame = Frame::received(&flow).build();
    let generic = bed.run_in_driver("generic_filter", &frame);
    assert_eq!(generic, delivered());
}

#[test]
fn a_binding_is_this_hosts_only_by_its_addresses() {
    for flow in flows(Protocol::Udp) {
        let mut bed = bed_with(&flow, in_driver());
        bed.filter.unsteer(&flow).unwrap();
        let key = BindingKey::new(Protocol::Udp, any_address(&flow));
        bed.filter.bind(&key, in_driver()).unwrap();
        let frame = Frame::received(&flow).build();
        assert_eq!(filter(&bed, &frame), delivered(), "{flow}");
        assert_eq!(bed.records()[0].0.flags, 2);
        let mut martian = Frame::received(&flow);
        martian.source.set_ip(flow.local.ip());
        assert_eq!(
            filter(&bed, &martian.build()),
            left("left_unclaimed"),
            "{flow}"
        );
        bed.filter.set_local_addresses(&[], &[]).unwrap();
        assert_eq!(filter(&bed, &frame), left("left_unclaimed"), "{flow}");
    }
}

#[test]
fn a_sleeper_is_woken_by_its_tap_with_the_stamp_before_the_frame() {
    let [flow, _] = flows(Protocol::Tcp);
    let bed = bed_with(&flow, in_driver());
    bed.set_doorbell(Doorbell::ASLEEP_ON_TAP);
    let frame = Frame::received(&flow).build();
    assert_eq!(
        filter(&bed, &frame),
        outcome(XDP_REDIRECT, &["delivered_on_tap"])
    );
    assert_eq!(bed.doorbell().by_tap, 1);
    assert!(bed.records().is_empty());
}

#[test]
fn budgets_hold_and_a_full_ring_is_a_loss() {
    const BUDGET: u16 = 3;
    let [flow, _] = flows(Protocol::Tcp);
    let budgeted = FlowRow {
        budget: BUDGET,
        ..in_driver()
    };
    let bed = bed_with(&flow, budgeted);
    let terms = Budget {
        packet_price: Budget::SECOND,
        priority: Budget::LAST.into(),
        ..Budget::default()
    };
    bed.filter.set_budget(BUDGET, &terms).unwrap();
    let frame = Frame::received(&flow).build();
    assert_eq!(filter(&bed, &frame), delivered());
    let over = outcome(XDP_DROP, &["drop_over_budget"]);
    assert_eq!(filter(&bed, &frame), over);
    bed.filter.steer(&flow, in_driver()).unwrap();
    let full = outcome(XDP_DROP, &["drop_ring_full"]);
    assert!((0..10_000).any(|_| filter(&bed, &frame) == full));
    let losses = bed.filter.losses(CHANNEL);
    assert_eq!((losses.over_budget, losses.ring_full), (1, 1));
}

/// One end of a link whose other end is in the same namespace, and its index.
fn in_namespace_with_link(test: impl FnOnce(u32) + Send) {
    let namespace = Namespace::new("driver");
    namespace.ip("link add va type veth peer name vb");
    namespace.ip("link set va up");
    namespace.ip("link set vb up");
    namespace.enter(|| {
        let line = run("ip -o link show vb");
        test(line.split_once(':').unwrap().0.parse().unwrap());
    });
}

fn link() -> String {
    run("ip -d link show vb")
}

#[test]
fn it_comes_and_goes_and_ends_with_the_server() {
    in_namespace_with_link(|ifindex| {
        let features = || run("ethtool -k va");
        let before = features();
        let mut bed = Bed::new();
        let hook = bed.filter.attach_driver(ifindex, &[DriverHook::Native]);
        assert_eq!(hook.unwrap(), DriverHook::Native);
        assert!(link().contains("xdp"), "{}", link());
        bed.filter.detach_interface(ifindex).unwrap();
        assert!(!link().contains("prog/xdp"), "{}", link());
        assert_eq!(features(), before);
        let both = [DriverHook::Native, DriverHook::Generic];
        bed.filter.attach_driver(ifindex, &both).unwrap();
        assert_eq!(bed.filter.driver_hook(ifindex), Some(DriverHook::Native));
        drop(bed);
        assert!(!link().contains("prog/xdp"), "{}", link());
        assert_eq!(features(), before);
    });
}

#[test]
fn another_users_program_stays() {
    in_namespace_with_link(|ifindex| {
        let mut other = Bed::new();
        other
            .filter
            .attach_driver(ifindex, &[DriverHook::Generic])
            .unwrap();
        let before = link();
        let mut bed = Bed::new();
        for hook in [DriverHook::Native, DriverHook::Generic] {
            let refused = bed.filter.attach_driver(ifindex, &[hook]);
            assert!(matches!(refused, Err(DriverError::InUse)), "{refused:?}");
        }
        assert_eq!(link(), before);
        drop(other);
        bed.filter
            .attach_driver(ifindex, &[DriverHook::Native])
            .unwrap();
    });
}
