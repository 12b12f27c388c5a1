//! Fast Open (RFC 7413): data in the SYN, accepted or not, lost or not.

use core::time::Duration;

use portolan_sim::{Pair, Side};
use portolan_tcp::{Config, Connection, Cookie, FastOpen, GrantedCookie, StateName};
use portolan_types::SeqNum;
use portolan_wire::tcp::TcpFlags;

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);
const TEXT: &[u8] = b"an early request";

fn granted(mss: u16) -> GrantedCookie {
    let cookie = Cookie([7; 8].into_iter().collect());
    GrantedCookie { cookie, mss }
}

/// A opens with data; `accept` is B's reaction to the SYN, whose answer A receives.
fn opened(
    how: FastOpen,
    text: &[u8],
    accept: fn(&mut Connection, &[u8], portolan_types::Instant),
) -> Pair {
    let mut pair = Pair::new(7, 10 * MS, &Config::default());
    pair.connect(Side::A);
    let now = pair.now;
    pair.a.tcp().open_fast(how);
    pair.a.tcp().send(now, text);
    pair.flush(Side::A);
    pair.now += 10 * MS;
    let now = pair.now;
    let syn = pair.a_to_b.receive(now).expect("the SYN has arrived");
    assert_eq!(syn.header.flags, TcpFlags::SYN);
    let mut connection = Connection::accept(&pair.b.config, &syn.header, SeqNum(77), now);
    accept(&mut connection, &syn.payload, now);
    pair.b.connection = Some(connection);
    pair
}

fn received(pair: &mut Pair, side: Side) -> Vec<u8> {
    let now = pair.now;
    let mut bytes = vec![0; 1 << 16];
    let count = pair.end(side).tcp().recv(now, &mut bytes);
    bytes.truncate(count);
    bytes
}

#[test]
fn text_that_came_with_the_syn_is_read_and_answered_before_the_handshake_is_done() {
    let mut pair = opened(
        FastOpen::With(granted(1460)),
        TEXT,
        |connection, text, now| {
            connection.take_early(now, text);
        },
    );
    assert_eq!(received(&mut pair, Side::B), TEXT);
    assert_eq!(pair.b.tcp().state(), StateName::SynReceived);
    let now = pair.now;
    assert_eq!(pair.b.tcp().send(now, b"an early answer"), 15);
    pair.run_for(11 * MS);
    assert_eq!(received(&mut pair, Side::A), b"an early answer");
    pair.run_for(MINUTE);
    for side in [Side::A, Side::B] {
        assert_eq!(pair.end(side).tcp().state(), StateName::Established);
        assert!(pair.end(side).tcp().tcp_info().early_data, "{side:?}");
        assert!(pair.end(side).tcp().is_flushed());
        assert_eq!(pair.end(side).tcp().tcp_info().retransmits, 0);
    }
    pair.transfer(Side::A, &[1; 100_000], MINUTE);
    pair.transfer(Side::B, &[2; 100_000], MINUTE);
}

#[test]
fn text_that_was_not_taken_is_sent_again_after_the_handshake() {
    let mut pair = opened(FastOpen::With(granted(1460)), TEXT, |connection, _, _| {
        connection.grant_cookie(Cookie([9; 8].into_iter().collect()));
    });
    pair.run_for(MINUTE);
    assert_eq!(received(&mut pair, Side::B), TEXT);
    assert!(!pair.a.tcp().tcp_info().early_data);
    let granted = pair.a.tcp().take_cookie().expect("a new cookie");
    assert_eq!(granted.cookie.0.as_slice(), [9; 8]);
    assert_eq!(pair.a.tcp().take_cookie(), None);
}

#[test]
fn without_a_cookie_the_syn_asks_for_one_and_carries_no_text() {
    let mut pair = opened(FastOpen::Ask, TEXT, |connection, text, _| {
        assert!(text.is_empty());
        connection.grant_cookie(Cookie([9; 8].into_iter().collect()));
    });
    pair.run_for(MINUTE);
    assert!(pair.a.tcp().take_cookie().is_some());
    assert_eq!(received(&mut pair, Side::B), TEXT);
}

#[test]
fn a_lost_syn_is_repeated_without_text() {
    let mut pair = Pair::new(7, 10 * MS, &Config::default());
    pair.b.listens = true;
    pair.connect(Side::A);
    let now = pair.now;
    pair.a.tcp().open_fast(FastOpen::With(granted(1460)));
    pair.a.tcp().send(now, TEXT);
    pair.a_to_b.loss = 1000;
    pair.flush(Side::A);
    pair.a_to_b.loss = 0;
    pair.run_for(1015 * MS);
    assert_eq!(pair.b.tcp().state(), StateName::SynReceived);
    assert_eq!(pair.b.tcp().readable(), 0);
    pair.run_for(MINUTE);
    assert_eq!(received(&mut pair, Side::B), TEXT);
}

#[test]
fn a_lost_answer_to_early_text_is_repeated() {
    let mut pair = opened(
        FastOpen::With(granted(1460)),
        TEXT,
        |connection, text, now| {
            connection.take_early(now, text);
        },
    );
    let now = pair.now;
    pair.b.tcp().send(now, b"an early answer");
    pair.b_to_a.loss = 1000;
    pair.flush(Side::B);
    pair.b_to_a.loss = 0;
    pair.run_for(MINUTE);
    assert_eq!(received(&mut pair, Side::A), b"an early answer");
    assert_eq!(received(&mut pair, Side::B), TEXT);
    assert_eq!(pair.a.tcp().state(), StateName::Established);
    assert_eq!(pair.b.tcp().state(), StateName::Established);
}

#[test]
fn a_side_that_closes_early_still_finishes_the_handshake_first() {
    let mut pair = opened(
        FastOpen::With(granted(1460)),
        TEXT,
        |connection, text, now| {
            connection.take_early(now, text);
        },
    );
    assert_eq!(received(&mut pair, Side::B), TEXT);
    let now = pair.now;
    pair.b.tcp().send(now, b"bye");
    pair.b.tcp().close(now);
    pair.run_for(MINUTE / 60);
    assert_eq!(received(&mut pair, Side::A), b"bye");
    assert_eq!(pair.a.tcp().state(), StateName::CloseWait);
    assert_eq!(pair.b.tcp().state(), StateName::FinWait2);
}

#[test]
fn no_more_text_goes_with_the_syn_than_the_peer_took_when_it_granted_the_cookie() {
    let text = [b'x'; 1400];
    let how = FastOpen::With(granted(536));
    let mut pair = opened(how, &text, |connection, text, now| {
        // The data leaves room for all options.
        assert_eq!(text.len(), 536 - 40);
        connection.take_early(now, text);
    });
    pair.run_for(MINUTE);
    assert_eq!(received(&mut pair, Side::B), text);
}

#[test]
fn the_size_of_segments_is_kept_with_the_cookie_and_anew_with_each_use() {
    for sent in [Some(granted(1460)), None] {
        let mut pair = Pair::new(7, 10 * MS, &Config::default());
        pair.b.config.mss = 1000;
        pair.b.listens = true;
        pair.connect(Side::A);
        let used = sent.is_some();
        pair.a
            .tcp()
            .open_fast(sent.map_or(FastOpen::Ask, FastOpen::With));
        pair.run_for(15 * MS);
        if !used {
            let cookie = granted(0).cookie;
            pair.b.tcp().grant_cookie(cookie);
        }
        pair.run_for(MINUTE);
        // Without a cookie in the SYN, the SYN+ACK was sent before B could grant one.
        let expected = used.then(|| granted(1000));
        assert_eq!(pair.a.tcp().take_cookie(), expected);
    }
}
