//! How connections open and end: all orders of SYN, FIN and RST, and the time-outs.

use core::time::Duration;

use portolan_sim::{Packet, Pair, Side, segment};
use portolan_tcp::{Config, Error, Events, IcmpError, IcmpKind, KeepAlive, StateName};
use portolan_types::SeqNum;
use portolan_wire::tcp::TcpFlags;

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);

fn established() -> Pair {
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.establish();
    pair.run_for(MINUTE);
    pair
}

fn states(pair: &mut Pair) -> (StateName, StateName) {
    (pair.a.tcp().state(), pair.b.tcp().state())
}

fn close(pair: &mut Pair, side: Side) {
    let now = pair.now;
    pair.end(side).tcp().close(now);
}

#[test]
fn both_sides_close_one_after_the_other() {
    let mut pair = established();
    close(&mut pair, Side::A);
    pair.run_for(10 * MS);
    assert_eq!(
        states(&mut pair),
        (StateName::FinWait2, StateName::CloseWait)
    );
    assert!(pair.b.events.contains(Events::PEER_CLOSED));
    close(&mut pair, Side::B);
    pair.run_for(10 * MS);
    assert_eq!(states(&mut pair), (StateName::TimeWait, StateName::Closed));
    pair.run_for(MINUTE);
    assert_eq!(pair.a.tcp().state(), StateName::Closed);
    assert_eq!(pair.a.tcp().error(), None);
}

#[test]
fn both_sides_close_at_once() {
    let mut pair = established();
    close(&mut pair, Side::A);
    close(&mut pair, Side::B);
    pair.flush(Side::A);
    pair.flush(Side::B);
    assert_eq!(
        states(&mut pair),
        (StateName::FinWait1, StateName::FinWait1)
    );
    pair.run_for(Duration::from_micros(1500));
    assert_eq!(states(&mut pair), (StateName::Closing, StateName::Closing));
    pair.run_for(10 * MS);
    assert_eq!(
        states(&mut pair),
        (StateName::TimeWait, StateName::TimeWait)
    );
}

#[test]
fn a_closed_direction_leaves_the_other_open() {
    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().send(now, b"last");
    pair.a.tcp().shutdown_send(now);
    assert_eq!(pair.a.tcp().send(now, b"late"), 0);
    pair.run_for(10 * MS);
    let mut out = [0; 16];
    let now = pair.now;
    assert_eq!(pair.b.tcp().recv(now, &mut out), 4);
    assert!(pair.b.tcp().is_receive_finished());
    pair.transfer(Side::B, &[7; 200_000], MINUTE);
    assert_eq!(
        states(&mut pair),
        (StateName::FinWait2, StateName::CloseWait)
    );
    pair.run_for(2 * MINUTE);
    assert_eq!(
        pair.a.tcp().state(),
        StateName::FinWait2,
        "a user that waits may wait"
    );
}

#[test]
fn two_active_opens_meet_in_one_connection() {
    let mut pair = Pair::new(3, MS, &Config::default());
    pair.connect(Side::A);
    pair.connect(Side::B);
    pair.run_for(MS / 2);
    assert_eq!(states(&mut pair), (StateName::SynSent, StateName::SynSent));
    pair.run_for(MS);
    assert_eq!(
        states(&mut pair),
        (StateName::SynReceived, StateName::SynReceived)
    );
    pair.run_for(10 * MS);
    assert_eq!(
        states(&mut pair),
        (StateName::Established, StateName::Established)
    );
    pair.transfer(Side::A, &[1; 100_000], MINUTE);
    pair.transfer(Side::B, &[2; 100_000], MINUTE);
}

#[test]
fn two_active_opens_meet_although_packets_are_lost() {
    for seed in 0..30 {
        let mut pair = Pair::new(seed, MS, &Config::default());
        pair.links(|link| link.loss = 300);
        pair.connect(Side::A);
        pair.connect(Side::B);
        pair.run_for(2 * MINUTE);
        assert_eq!(
            states(&mut pair),
            (StateName::Established, StateName::Established),
            "{seed}"
        );
    }
}

#[test]
fn unread_bytes_turn_a_close_into_a_reset() {
    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().send(now, b"never read");
    pair.run_for(10 * MS);
    close(&mut pair, Side::B);
    pair.run_for(10 * MS);
    assert_eq!(states(&mut pair), (StateName::Closed, StateName::Closed));
    assert_eq!(pair.a.tcp().take_error(), Some(Error::Reset));
    assert!(pair.a.events.contains(Events::ERROR | Events::CLOSED));
}

#[test]
fn bytes_for_a_user_that_is_gone_are_answered_by_a_reset() {
    let mut pair = established();
    close(&mut pair, Side::B);
    pair.run_for(10 * MS);
    let now = pair.now;
    assert_eq!(pair.a.tcp().send(now, b"anyone?"), 7);
    pair.run_for(10 * MS);
    assert_eq!(states(&mut pair), (StateName::Closed, StateName::Closed));
    // As `tcp_reset` of Linux in CLOSE-WAIT.
    assert_eq!(pair.a.tcp().error(), Some(Error::BrokenPipe));
}

#[test]
fn an_abort_resets_the_peer_in_every_synchronized_state() {
    let prepare: [fn(&mut Pair); 4] = [
        |_| {},
        |pair| close(pair, Side::A),
        |pair| close(pair, Side::B),
        |pair| {
            close(pair, Side::A);
            close(pair, Side::B);
        },
    ];
    for (case, prepare) in prepare.iter().enumerate() {
        for after in [0, 1500, 10_000] {
            let mut pair = established();
            prepare(&mut pair);
            pair.run_for(Duration::from_micros(after));
            let now = pair.now;
            pair.a.tcp().abort(now);
            pair.run_for(10 * MS);
            assert_eq!(pair.a.tcp().state(), StateName::Closed);
            // Where both had closed, B has received everything and is in TIME-WAIT (RFC 1337).
            let b = pair.b.tcp().state();
            let done = case == 3 && b == StateName::TimeWait;
            assert!(
                done || b == StateName::Closed,
                "case {case} after {after}: {b}"
            );
        }
    }
}

#[test]
fn a_closed_port_refuses() {
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.connect(Side::A);
    let syn = pair
        .a
        .tcp()
        .transmit(portolan_sim::START)
        .expect("a SYN is due")
        .header;
    let header = portolan_tcp::reset_for(&syn, 0).expect("a SYN is answered");
    pair.inject(Side::A, &Packet::new(header, Vec::new()));
    assert_eq!(pair.a.tcp().error(), Some(Error::Refused));
    assert_eq!(pair.a.tcp().error().map(Error::errno), Some(111));
}

#[test]
fn a_connect_to_nobody_times_out_after_127_seconds() {
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.connect(Side::A);
    pair.run_for(Duration::from_secs(126));
    assert_eq!(pair.a.tcp().state(), StateName::SynSent);
    assert_eq!(pair.a.tcp().tcp_info().segments_out, 7);
    pair.run_for(Duration::from_secs(2));
    assert_eq!(pair.a.tcp().error(), Some(Error::TimedOut));
}

#[test]
fn an_unreachable_host_ends_an_opening_connection_but_not_an_open_one() {
    let error = Error::HostUnreachable;
    let kind = IcmpKind::Unreachable { hard: true, error };
    let mut pair = Pair::new(1, MS, &Config::default());
    pair.connect(Side::A);
    let quoted = pair
        .a
        .tcp()
        .transmit(portolan_sim::START)
        .expect("a SYN is due")
        .header
        .seq;
    pair.a.tcp().on_icmp(IcmpError {
        quoted: quoted + 1,
        kind,
    });
    assert_eq!(pair.a.tcp().error(), None, "the quoted number is checked");
    pair.a.tcp().on_icmp(IcmpError { quoted, kind });
    assert_eq!(pair.a.tcp().error(), Some(error));

    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().send(now, b"x");
    let quoted = pair.a.tcp().transmit(now).expect("data is due").header.seq;
    pair.a.tcp().on_icmp(IcmpError { quoted, kind });
    assert_eq!(pair.a.tcp().state(), StateName::Established);
}

#[test]
fn a_path_that_takes_less_gets_smaller_segments() {
    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().send(now, &[0; 10_000]);
    let quoted = pair.a.tcp().transmit(now).expect("data is due").header.seq;
    let kind = IcmpKind::TooBig { mtu_payload: 1240 };
    pair.a.tcp().on_icmp(IcmpError { quoted, kind });
    let segment = pair.a.tcp().transmit(now).expect("the data goes out again");
    assert_eq!((segment.header.seq, segment.segment_size), (quoted, 1228));
}

#[test]
fn what_was_too_big_for_the_path_goes_again_at_once_and_the_window_stays() {
    let mut pair = established();
    let now = pair.now;
    // A full segment and one that fits the smaller path MTU; the report concerns the first.
    pair.a.tcp().options().nodelay = true;
    let mut send = |size| {
        pair.a.tcp().send(now, &vec![7; size]);
        let segment = pair.a.tcp().transmit(now).expect("there is room");
        segment.header.seq
    };
    let (quoted, next) = (send(1448), send(500));
    assert_eq!(next, quoted + 1448);
    let before = pair.a.tcp().tcp_info();
    let kind = IcmpKind::TooBig { mtu_payload: 1240 };
    pair.a.tcp().on_icmp(IcmpError { quoted, kind });
    let sizes: Vec<_> = core::iter::from_fn(|| {
        let segment = pair.a.tcp().transmit(now)?;
        Some((
            segment.header.seq - quoted,
            segment.payload_len(),
            segment.segment_size,
        ))
    })
    .collect();
    assert_eq!(sizes, [(0, 1448, 1228)]);
    let after = pair.a.tcp().tcp_info();
    assert_eq!((after.cwnd, after.ssthresh), (before.cwnd, before.ssthresh));
    assert_eq!(pair.a.tcp().retransmissions_in_flight(), 2);
    assert!(!after.fast_recovery && !after.loss_recovery);
}

#[test]
fn a_peer_that_vanished_is_given_up_after_a_probe_and_15_retransmissions() {
    let mut pair = established();
    pair.links(|link| link.loss = 1000);
    let now = pair.now;
    pair.a.tcp().send(now, b"hello?");
    pair.run_for(15 * MINUTE);
    assert_eq!(pair.a.tcp().state(), StateName::Established);
    pair.run_for(5 * MINUTE);
    assert_eq!(pair.a.tcp().error(), Some(Error::TimedOut));
    assert_eq!(pair.a.tcp().tcp_info().retransmits, 16);
}

#[test]
fn a_user_timeout_gives_up_earlier() {
    let mut pair = established();
    pair.links(|link| link.loss = 1000);
    pair.a.tcp().options().user_timeout = Some(Duration::from_secs(5));
    let now = pair.now;
    pair.a.tcp().send(now, b"hello?");
    pair.run_for(Duration::from_secs(4));
    assert_eq!(pair.a.tcp().error(), None);
    pair.run_for(Duration::from_secs(2));
    assert_eq!(pair.a.tcp().error(), Some(Error::TimedOut));
}

#[test]
fn keep_alive_finds_out_that_the_peer_vanished() {
    let mut pair = established();
    let keepalive = &mut pair.a.tcp().options().keepalive;
    keepalive.enabled = true;
    keepalive.idle = Duration::from_secs(100);
    keepalive.interval = Duration::from_secs(10);
    keepalive.count = 3;
    pair.run_for(10 * MINUTE);
    assert_eq!(pair.a.tcp().error(), None, "the peer answers the probes");
    assert!(pair.a.tcp().tcp_info().segments_out > 5);
    pair.links(|link| link.loss = 1000);
    pair.run_for(Duration::from_secs(140));
    assert_eq!(pair.a.tcp().error(), Some(Error::TimedOut));
}

#[test]
fn an_orphan_does_not_wait_for_ever_for_the_peers_fin() {
    let mut pair = established();
    close(&mut pair, Side::A);
    pair.run_for(10 * MS);
    assert_eq!(pair.a.tcp().state(), StateName::FinWait2);
    pair.run_for(MINUTE);
    assert_eq!(pair.a.tcp().state(), StateName::Closed);
}

/// RFC 5961: sequence numbers that are merely plausible get a challenge ACK, at a limited rate.
#[test]
fn a_blind_attacker_provokes_few_acknowledgements_and_no_reset() {
    let mut pair = established();
    let segments = pair.a.tcp().tcp_info().segments_out;
    pair.b.tcp().send(portolan_sim::START, b"x");
    pair.flush(Side::B);
    let mut genuine = None;
    while let Some(packet) = pair.b_to_a.receive(pair.now + MS) {
        genuine = Some(packet.header);
    }
    let next = genuine.expect("B sent").seq;
    for i in 1..1000 {
        let (source, destination) = (2000, 1000);
        let flags = if i % 2 == 0 {
            TcpFlags::RST
        } else {
            TcpFlags::SYN
        };
        let header = segment(source, destination, next + i, flags);
        pair.inject(Side::A, &Packet::new(header, Vec::new()));
        pair.flush(Side::A);
    }
    assert_eq!(pair.a.tcp().state(), StateName::Established);
    assert!(pair.a.tcp().tcp_info().segments_out - segments <= 10);
    let header = segment(2000, 1000, next, TcpFlags::RST);
    pair.inject(Side::A, &Packet::new(header, Vec::new()));
    assert_eq!(pair.a.tcp().error(), Some(Error::Reset));
}

#[test]
fn a_new_syn_reopens_time_wait_only_if_it_is_newer() {
    let mut pair = established();
    close(&mut pair, Side::A);
    pair.run_for(10 * MS);
    close(&mut pair, Side::B);
    pair.run_for(10 * MS);
    let now = pair.now;
    let mut syn = segment(2000, 1000, SeqNum(1), TcpFlags::SYN);
    let clock = pair.now.as_millis() as u32;
    let stamp = |value| Some(portolan_wire::tcp::Timestamps { value, echo: 0 });
    syn.options.timestamps = stamp(clock - 100_000);
    assert_eq!(
        pair.a
            .tcp()
            .time_wait()
            .expect("TIME-WAIT")
            .reopens(now, &syn),
        None
    );
    syn.options.timestamps = stamp(clock + 1);
    assert!(
        pair.a
            .tcp()
            .time_wait()
            .expect("TIME-WAIT")
            .reopens(now, &syn)
            .is_some()
    );
}

#[test]
fn segments_grow_again_when_a_report_has_aged_but_never_beyond_what_was_agreed() {
    let mut pair = established();
    let now = pair.now;
    pair.a.tcp().send(now, &[0; 10_000]);
    let quoted = pair.a.tcp().transmit(now).expect("data is due").header.seq;
    let kind = IcmpKind::TooBig { mtu_payload: 1240 };
    pair.a.tcp().on_icmp(IcmpError { quoted, kind });
    assert_eq!(pair.a.tcp().tcp_info().mss, 1228);
    pair.a.tcp().set_path_mtu(9000);
    assert_eq!(pair.a.tcp().tcp_info().mss, 1448);
    pair.a.tcp().set_path_mtu(1000);
    assert_eq!(pair.a.tcp().tcp_info().mss, 988);
    assert!(pair.a.tcp().validate().is_ok());
}

#[test]
fn a_session_that_would_probe_without_a_pause_is_refused() {
    let mut pair = established();
    assert!(pair.a.tcp().validate().is_ok());
    for change in [
        |keepalive: &mut KeepAlive| keepalive.idle = Duration::ZERO,
        |keepalive: &mut KeepAlive| keepalive.interval = Duration::ZERO,
        |keepalive: &mut KeepAlive| keepalive.count = 0,
    ] {
        let keepalive = &mut pair.a.tcp().options().keepalive;
        let before = *keepalive;
        change(keepalive);
        assert!(pair.a.tcp().validate().is_err());
        pair.a.tcp().options().keepalive = before;
    }
}
