//! Packets that enclose the handle of their receiver (MS §VI-B).

use portolan_proto::extension::Event;
use portolan_proto::extension::layout::{Chain, GuardKey};
use portolan_proto::filter::{FilterSettings, FlowRow};
use portolan_types::{ChannelId, FlowKey, Handle, Protocol};
use portolan_wire::demux::{enclose_v4, enclose_v6};

use super::bed::{Bed, CHANNEL, OTHER_CHANNEL, OWN_MAC, REDIRECT, SHOT, UNSPEC};
use super::bed::{flows, outcome, row};
use super::frames::Frame;

/// DSCP 3.
const MARKER: u8 = 0x0c;
const NONCE: u64 = 0x0123_4567_89ab_cdef;

fn active_bed() -> Bed {
    Bed::with(FilterSettings {
        marker: MARKER.into(),
        ..FilterSettings::default()
    })
}

fn tcp_flow() -> FlowKey {
    flows(Protocol::Tcp)[0]
}

/// The same flow from another port of the peer.
fn from_port(flow: FlowKey, port: u16) -> FlowKey {
    let mut other = flow;
    other.remote.set_port(port);
    other
}

/// Steers the flow and gives it a handle.
fn given(bed: &Bed, flow: &FlowKey, row: FlowRow, nonce: u64) -> Handle {
    bed.filter.steer(flow, row).unwrap();
    let index = bed.filter.give_handle(flow, row, nonce).unwrap().unwrap();
    Handle {
        index,
        nonce,
        marker: MARKER,
    }
}

fn enclosing(frame: &Frame, handle: Handle) -> Vec<u8> {
    let mut bytes = frame.build();
    if frame.source.is_ipv6() {
        bytes[14] |= handle.marker >> 4;
        bytes[15] = handle.marker << 4;
        let length = u16::from_be_bytes([bytes[18], bytes[19]]) + 16;
        bytes[18..20].copy_from_slice(&length.to_be_bytes());
        bytes[20] = 60;
        bytes.splice(54..54, enclose_v6(handle));
        return bytes;
    }
    bytes[14] = 0x48;
    bytes[15] = handle.marker;
    let total = u16::from_be_bytes([bytes[16], bytes[17]]) + 12;
    bytes[16..18].copy_from_slice(&total.to_be_bytes());
    bytes.splice(34..34, enclose_v4(handle));
    bytes
}

fn receive(bed: &Bed, frame: &[u8]) -> super::bed::Outcome {
    bed.run("packet_filter", frame)
}

#[test]
fn a_handle_leads_to_its_owners_ring_without_a_look_at_the_flow() {
    let bed = active_bed();
    for own in flows(Protocol::Tcp) {
        let handle = given(&bed, &own, row(CHANNEL), NONCE);
        // The other one is no known flow: the session checks the peer.
        for flow in [own, from_port(own, 1)] {
            let frame = enclosing(&Frame::received(&flow), handle);
            let taken = outcome(SHOT, &["handle_taken", "delivered"]);
            assert_eq!(sorted(receive(&bed, &frame)), sorted(taken));
            let records = bed.records();
            let (header, copy) = &records[0];
            assert_eq!((header.slot, header.generation), (77, 5));
            assert_eq!(copy, &frame);
        }
    }
}

/// They are called after the look-up of the flow; the chain here names an extension that does not exist.
#[test]
fn handlers_see_what_a_handle_would_have_led_past_them() {
    for own in flows(Protocol::Tcp) {
        let bed = active_bed();
        let extended = FlowRow {
            flags: FlowRow::EXTENDED,
            ..row(CHANNEL)
        };
        let handle = given(&bed, &own, extended, NONCE);
        let frame = enclosing(&Frame::received(&own), handle);
        let nobodys = outcome(SHOT, &["handle_extended", "delivered"]);
        assert_eq!(sorted(receive(&bed, &frame)), sorted(nobodys));
        let key = GuardKey {
            channel: CHANNEL.0,
            port: own.local.port().to_be_bytes(),
            protocol: own.protocol.number(),
            event: Event::TcpReceive.number(),
        };
        let mut chain = Chain {
            count: 1,
            ..Chain::default()
        };
        chain.numbers[0] = 1;
        bed.filter.extensions.guard(&key, &chain).unwrap();
        // It was shown, and passed to the owner: not "unseen".
        let shown = outcome(SHOT, &["handle_extended", "passed", "delivered"]);
        assert_eq!(sorted(receive(&bed, &frame)), sorted(shown));
        let records = bed.records();
        assert_eq!(records.last().unwrap().1, frame);
        // The same flow without its handlers.
        bed.filter.steer(&own, row(CHANNEL)).unwrap();
        let taken = outcome(SHOT, &["handle_taken", "delivered"]);
        assert_eq!(sorted(receive(&bed, &frame)), sorted(taken));
    }
}

#[test]
fn a_forged_or_replayed_handle_is_looked_up_as_if_it_were_not_there() {
    for flow in flows(Protocol::Tcp) {
        forge_and_replay(flow);
    }
}

fn forge_and_replay(flow: FlowKey) {
    let bed = active_bed();
    let handle = given(&bed, &flow, row(CHANNEL), NONCE);
    let forged = [
        Handle {
            nonce: NONCE ^ 1,
            ..handle
        },
        Handle { nonce: 0, ..handle },
        Handle {
            index: handle.index + 1,
            ..handle
        },
        Handle {
            index: u16::MAX,
            nonce: 0,
            ..handle
        },
    ];
    for handle in forged {
        let frame = enclosing(&Frame::received(&flow), handle);
        let found = outcome(SHOT, &["handle_stale", "delivered"]);
        assert_eq!(sorted(receive(&bed, &frame)), sorted(found), "{handle:?}");
    }
    // The session was flushed, cached by another process, and removed: the old handle is invalid.
    let replayed = enclosing(&Frame::received(&flow), handle);
    bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
    let lost = outcome(SHOT, &["handle_stale", "drop_no_channel"]);
    assert_eq!(sorted(receive(&bed, &replayed)), sorted(lost));
    bed.filter.unsteer(&flow).unwrap();
    let passed = outcome(UNSPEC, &["handle_stale", "pass_unclaimed"]);
    assert_eq!(sorted(receive(&bed, &replayed)), sorted(passed));
    // It stays invalid when its index is given to another flow.
    let other = from_port(flow, 2);
    let next = given(&bed, &other, row(CHANNEL), NONCE + 2);
    assert_eq!(next.index, handle.index);
    let passed = outcome(UNSPEC, &["handle_stale", "pass_unclaimed"]);
    assert_eq!(sorted(receive(&bed, &replayed)), sorted(passed));
}

#[test]
fn a_handle_stays_good_while_its_owner_stays() {
    let bed = active_bed();
    let flow = tcp_flow();
    let handle = given(&bed, &flow, row(CHANNEL), NONCE);
    let changed = FlowRow {
        class: 9,
        ..row(CHANNEL)
    };
    bed.filter.steer(&flow, changed).unwrap();
    let frame = enclosing(&Frame::received(&flow), handle);
    let taken = outcome(SHOT, &["handle_taken", "delivered"]);
    assert_eq!(sorted(receive(&bed, &frame)), sorted(taken));
    // A new session in the same slot is another session.
    let successor = FlowRow {
        generation: 6,
        ..changed
    };
    bed.filter.steer(&flow, successor).unwrap();
    let found = outcome(SHOT, &["handle_stale", "delivered"]);
    assert_eq!(sorted(receive(&bed, &frame)), sorted(found));
}

#[test]
fn a_receiver_that_is_not_alone_is_not_found_by_a_handle() {
    let bed = active_bed();
    let [v4, v6] = flows(Protocol::Tcp);
    for (flow, flags) in [
        (v4, FlowRow::SHARED),
        (v4, FlowRow::DEALT),
        (v6, FlowRow::SHARED),
        (v6, FlowRow::DEALT),
    ] {
        let shared = FlowRow {
            flags,
            ..row(CHANNEL)
        };
        let handle = given(&bed, &flow, shared, NONCE);
        let frame = enclosing(&Frame::received(&flow), handle);
        let found = outcome(SHOT, &["handle_not_exclusive", "delivered"]);
        assert_eq!(sorted(receive(&bed, &frame)), sorted(found));
    }
}

#[test]
fn what_is_not_marked_whole_and_first_is_looked_up() {
    let bed = active_bed();
    let flow = tcp_flow();
    let handle = given(&bed, &flow, row(CHANNEL), NONCE);
    let good = enclosing(&Frame::received(&flow), handle);
    let spoilt = |at: usize, byte: u8| {
        let mut frame = good.clone();
        frame[at] = byte;
        frame
    };
    for frame in [
        spoilt(15, 0),
        spoilt(15, 0xb8),
        // Another option, or a longer one.
        spoilt(34, 1),
        spoilt(35, 16),
    ] {
        let found = outcome(SHOT, &["delivered"]);
        assert_eq!(receive(&bed, &frame), found);
    }
    // Congestion marks are set by routers.
    let taken = outcome(SHOT, &["handle_taken", "delivered"]);
    assert_eq!(
        sorted(receive(&bed, &spoilt(15, MARKER | 3))),
        sorted(taken)
    );
    // UDP has no handles.
    assert_eq!(
        receive(&bed, &spoilt(23, 17)),
        outcome(UNSPEC, &["pass_unclaimed"])
    );
}

#[test]
fn without_active_demultiplexing_handles_are_options_like_any_other() {
    let bed = Bed::new();
    let flow = tcp_flow();
    bed.filter.steer(&flow, row(CHANNEL)).unwrap();
    assert_eq!(
        bed.filter.give_handle(&flow, row(CHANNEL), NONCE).unwrap(),
        None
    );
    let handle = Handle {
        index: 0,
        nonce: NONCE,
        marker: MARKER,
    };
    let received = enclosing(&Frame::received(&flow), handle);
    assert_eq!(receive(&bed, &received), outcome(SHOT, &["delivered"]));
    let sent = enclosing(&Frame::sent(&flow, OWN_MAC), handle);
    let dropped = outcome(SHOT, &["drop_malformed"]);
    assert_eq!(bed.run("transmit_filter", &sent), dropped);
}

#[test]
fn a_handle_is_the_only_option_that_is_sent() {
    let bed = active_bed();
    let flow = tcp_flow();
    bed.filter.steer(&flow, row(ChannelId(CHANNEL.0))).unwrap();
    let handle = Handle {
        index: 0,
        nonce: NONCE,
        marker: MARKER,
    };
    let good = enclosing(&Frame::sent(&flow, OWN_MAC), handle);
    assert_eq!(
        bed.run("transmit_filter", &good),
        outcome(REDIRECT, &["sent"])
    );
    // A source route in place of or behind the handle, or a header longer than the handle.
    for (at, byte) in [(34, 131), (35, 8), (35, 16), (14, 0x49), (14, 0x46)] {
        let mut frame = good.clone();
        frame[at] = byte;
        let dropped = outcome(SHOT, &["drop_malformed"]);
        assert_eq!(bed.run("transmit_filter", &frame), dropped, "{at}: {byte}");
    }
    // Nobody can enclose a handle in another's packet.
    bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
    assert_eq!(
        bed.run("transmit_filter", &good),
        outcome(SHOT, &["drop_foreign"])
    );
}

#[test]
fn over_ipv6_what_is_not_marked_whole_and_first_is_looked_up() {
    let bed = active_bed();
    let flow = flows(Protocol::Tcp)[1];
    let handle = given(&bed, &flow, row(CHANNEL), NONCE);
    let good = enclosing(&Frame::received(&flow), handle);
    let spoilt = |at: usize, byte: u8| {
        let mut frame = good.clone();
        frame[at] = byte;
        frame
    };
    for (at, byte) in [
        // No marker, and another one.
        (15, 0),
        (15, 0x80),
        // Other padding, another option, another length.
        (56, 0),
        (57, 1),
        (58, 0x3e),
        (59, 8),
    ] {
        let found = outcome(SHOT, &["delivered"]);
        assert_eq!(receive(&bed, &spoilt(at, byte)), found, "{at}: {byte}");
    }
    let taken = outcome(SHOT, &["handle_taken", "delivered"]);
    let marked = spoilt(15, good[15] | 0x30);
    assert_eq!(sorted(receive(&bed, &marked)), sorted(taken));
    // UDP has no handles.
    let unclaimed = outcome(UNSPEC, &["pass_unclaimed"]);
    assert_eq!(receive(&bed, &spoilt(54, 17)), unclaimed);
}

#[test]
fn a_handle_is_the_only_extension_header_that_is_sent() {
    let flow = flows(Protocol::Tcp)[1];
    let handle = Handle {
        index: 0,
        nonce: NONCE,
        marker: MARKER,
    };
    let good = enclosing(&Frame::sent(&flow, OWN_MAC), handle);
    let send = |bed: &Bed, frame: &[u8]| bed.run("transmit_filter", frame);
    let bed = active_bed();
    bed.filter.steer(&flow, row(CHANNEL)).unwrap();
    assert_eq!(send(&bed, &good), outcome(REDIRECT, &["sent"]));
    // A routing header in place of or behind it, a longer one, another option.
    for (at, byte) in [(20, 43), (54, 43), (54, 17), (55, 2), (58, 0xc2), (59, 8)] {
        let mut frame = good.clone();
        frame[at] = byte;
        let dropped = outcome(SHOT, &["drop_protocol"]);
        assert_eq!(send(&bed, &frame), dropped, "{at}: {byte}");
    }
    // Nobody can enclose a handle in another's packet, and nobody at all where handles are disabled.
    bed.filter.steer(&flow, row(OTHER_CHANNEL)).unwrap();
    assert_eq!(send(&bed, &good), outcome(SHOT, &["drop_foreign"]));
    let without = Bed::new();
    without.filter.steer(&flow, row(CHANNEL)).unwrap();
    assert_eq!(send(&without, &good), outcome(SHOT, &["drop_protocol"]));
}

/// The order of the counters does not matter.
fn sorted(mut outcome: super::bed::Outcome) -> super::bed::Outcome {
    outcome.counted.sort_unstable();
    outcome
}
