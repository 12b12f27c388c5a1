//! Linear search: each packet is compared with the flows in turn.

use std::net::SocketAddr;

use portolan_proto::filter::{FilterSettings, FlowRow};
use portolan_types::{FlowKey, Protocol};

use super::bed::{Bed, CHANNEL, SHOT, UNSPEC, flows, outcome, row};
use super::frames::Frame;

fn linear_bed() -> Bed {
    Bed::with(FilterSettings {
        algorithm: FilterSettings::LINEAR,
        ..FilterSettings::default()
    })
}

/// Flows that differ in the peer's port.
fn crowd(of: &FlowKey, count: u16) -> impl Iterator<Item = FlowKey> {
    let (flow, address) = (*of, of.remote.ip());
    (1..=count).map(move |port| FlowKey {
        remote: SocketAddr::new(address, port),
        ..flow
    })
}

/// The slot to which a packet of the flow is delivered.
fn slot_of(bed: &Bed, flow: &FlowKey) -> u32 {
    let frame = Frame::received(flow).build();
    let delivered = outcome(SHOT, &["delivered"]);
    assert_eq!(bed.run("packet_filter", &frame), delivered, "{flow}");
    let [(header, _)] = &bed.records()[..] else {
        panic!("one record of {flow}");
    };
    header.slot
}

fn steer(bed: &Bed, flow: &FlowKey, slot: u32) {
    let row = FlowRow {
        slot,
        ..row(CHANNEL)
    };
    bed.filter.steer(flow, row).unwrap();
}

fn assert_unclaimed(bed: &Bed, flow: &FlowKey) {
    let frame = Frame::received(flow).build();
    let passed = outcome(UNSPEC, &["pass_unclaimed"]);
    assert_eq!(bed.run("packet_filter", &frame), passed, "{flow}");
}

#[test]
fn every_flow_is_found_among_the_others() {
    let bed = linear_bed();
    for base in [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(flows) {
        for (flow, slot) in crowd(&base, 100).zip(0..) {
            steer(&bed, &flow, slot);
        }
        for (flow, slot) in crowd(&base, 100).zip(0..) {
            assert_eq!(slot_of(&bed, &flow), slot);
        }
        assert_unclaimed(&bed, &base);
    }
}

#[test]
fn a_flow_that_is_aimed_anew_or_removed_leaves_no_old_row() {
    let bed = linear_bed();
    let [base, _] = flows(Protocol::Udp);
    let all: Vec<_> = crowd(&base, 9).collect();
    for (flow, slot) in all.iter().zip(0..) {
        steer(&bed, flow, slot);
    }
    for round in 1..=50 {
        for (flow, slot) in all.iter().zip(0..) {
            steer(&bed, flow, 100 * round + slot);
        }
        for (flow, slot) in all.iter().zip(0..) {
            assert_eq!(slot_of(&bed, flow), 100 * round + slot);
        }
    }
    let (removed, kept) = all.split_at(4);
    for flow in removed {
        bed.filter.unsteer(flow).unwrap();
        assert_unclaimed(&bed, flow);
    }
    for (flow, slot) in kept.iter().zip(4..) {
        assert_eq!(slot_of(&bed, flow), 5000 + slot);
    }
}

#[test]
fn as_many_flows_fit_as_the_table_is_for() {
    let bed = linear_bed();
    let [base, _] = flows(Protocol::Udp);
    for flow in crowd(&base, 1024) {
        steer(&bed, &flow, 7);
    }
    // The last one is compared last.
    let last = crowd(&base, 1024).last().unwrap();
    assert_eq!(slot_of(&bed, &last), 7);
    // There is no room for another; existing ones can be removed.
    assert!(bed.filter.steer(&base, row(CHANNEL)).is_err());
    bed.filter.unsteer(&last).unwrap();
    steer(&bed, &base, 8);
    assert_eq!(slot_of(&bed, &base), 8);
    assert_unclaimed(&bed, &last);
}
