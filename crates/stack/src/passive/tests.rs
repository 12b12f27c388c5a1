//! What segments to a listener lead to.

use portolan_tcp::{Cookie, fast_open_cookie};
use portolan_types::Protocol;
use portolan_wire::tcp::TcpFlags;

use super::*;

const NOW: Instant = Instant::from_millis(60_000);
const SECRET: Secret = Secret([1; 16]);
const SERVES: FastOpenUse = FastOpenUse(2);

fn flow() -> FlowKey {
    FlowKey {
        protocol: Protocol::Tcp,
        local: ([10, 0, 0, 1], 80).into(),
        remote: ([10, 0, 0, 2], 1234).into(),
    }
}

fn opens(backlog: u32, fast_open_queue: u32) -> PassiveOpen<u32> {
    let options = HandshakeOptions {
        fast_open_queue: Some(fast_open_queue),
        ..HandshakeOptions::default()
    };
    PassiveOpen::new(options, backlog)
}

/// A SYN with one word of text.
fn syn(cookie: Option<Cookie>) -> TcpHeader {
    let mut syn = TcpHeader {
        source_port: 1234,
        destination_port: 80,
        seq: SeqNum(1000),
        flags: TcpFlags::SYN,
        ..TcpHeader::default()
    };
    syn.options.fast_open = cookie.map(|cookie| cookie.0);
    syn
}

fn step(opens: &PassiveOpen<u32>, header: &TcpHeader, path: Option<Config>) -> Step {
    let terms = Terms {
        cookies: CookieUse::WhenFull,
        fast_open: SERVES,
        syn_ack_retries: 5,
        secret: &SECRET,
        fast_open_secret: &SECRET,
        clock: CookieClock::default(),
        config: &|_| path.clone(),
        is_unfinished: &|id| id != 0,
    };
    let segment = Segment {
        flow: flow(),
        hop_limit: 1,
        header,
        payload: b"word",
    };
    opens.on_segment(NOW, &segment, &terms)
}

fn fast_open(opens: &PassiveOpen<u32>, cookie: Option<Cookie>) -> FastOpenOutcome {
    match step(opens, &syn(cookie), Some(Config::default())) {
        Step::Open(connection, Origin::Syn(outcome)) => {
            let is_accepted = outcome == FastOpenOutcome::Accepted;
            assert_eq!(connection.readable() > 0, is_accepted);
            outcome
        }
        other => panic!("{other:?}"),
    }
}

fn good_cookie() -> Option<Cookie> {
    Some(fast_open_cookie(&SECRET, &flow(), NOW))
}

#[test]
fn text_is_taken_from_whoever_has_a_cookie() {
    let opens = opens(4, 4);
    let other = fast_open_cookie(&Secret([2; 16]), &flow(), NOW);
    assert_eq!(fast_open(&opens, good_cookie()), FastOpenOutcome::Accepted);
    assert_eq!(fast_open(&opens, Some(other)), FastOpenOutcome::Refused);
    assert_eq!(fast_open(&opens, None), FastOpenOutcome::Unused);
}

#[test]
fn so_many_connections_at_most_have_text_before_their_handshake_is_done() {
    let mut opens = opens(4, 2);
    // The handshake of the first is done by now.
    opens.fast = vec![0, 1];
    assert_eq!(fast_open(&opens, good_cookie()), FastOpenOutcome::Accepted);
    opens.fast = vec![0, 1, 2];
    assert_eq!(fast_open(&opens, good_cookie()), FastOpenOutcome::QueueFull);
}

#[test]
fn a_syn_meets_the_queues_and_the_path() {
    let mut opens = opens(0, 4);
    let missing = step(&opens, &syn(None), None);
    assert!(matches!(missing, Step::Ignore(Unanswered::NoRoute)));
    opens.queue.handshake_started(1);
    let crowded = step(&opens, &syn(None), Some(Config::default()));
    assert!(matches!(crowded, Step::Cookie(_)), "{crowded:?}");
    opens.queue.handshake_done(1);
    let full = step(&opens, &syn(None), Some(Config::default()));
    assert!(matches!(full, Step::Ignore(Unanswered::SynDropped)));
}

#[test]
fn who_is_too_far_is_not_heeded() {
    let mut opens = opens(4, 4);
    opens.options.ip.min_ttl = 2;
    let far = step(&opens, &syn(good_cookie()), Some(Config::default()));
    assert!(matches!(far, Step::Ignore(Unanswered::TooFar)), "{far:?}");
}
