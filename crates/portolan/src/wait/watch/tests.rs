//! Single steps of the watch; `model.rs` combines them.

use std::time::Duration;

use portolan_stack::TxQueueId;

use super::*;

const QUIET: Needs = Needs {
    timer: None,
    full: Full::NONE,
    wire: false,
    local: false,
    additions: 0,
};

const POLLING: (Needs, SleepsOn) = (QUIET, SleepsOn::Descriptors);

#[test]
fn a_leader_that_is_relieved_is_signalled() {
    let mut watch = Watch::default();
    assert_eq!(watch.lead(Leader::Helper, &1, POLLING), None);
    assert_eq!(watch.lead(Leader::Application, &2, POLLING), Some(1));
    assert!(watch.is_led_by(Leader::Application));
}

#[test]
fn more_to_watch_wakes_the_leader() {
    let later = Instant::ZERO + Duration::from_secs(2);
    let sooner = Instant::ZERO + Duration::from_secs(1);
    let until = |timer| Needs {
        timer: Some(timer),
        ..QUIET
    };
    let full = |tx_queue| Needs {
        full: Full::only(TxQueueId(tx_queue)),
        ..QUIET
    };
    let wire = Needs {
        wire: true,
        ..QUIET
    };
    let local = Needs {
        local: true,
        ..QUIET
    };
    let added = Needs {
        additions: 1,
        ..QUIET
    };
    let cases = [
        (QUIET, QUIET, false),
        (QUIET, until(later), true),
        (until(later), QUIET, false),
        (until(later), until(later), false),
        (until(later), until(sooner), true),
        (QUIET, full(0), true),
        (full(0), full(0), false),
        (full(0), full(1), true),
        (full(1), QUIET, false),
        (QUIET, wire, true),
        (wire, QUIET, false),
        (QUIET, local, true),
        (local, local, false),
        (QUIET, added, true),
        (added, added, false),
    ];
    for (watched, needed, is_woken) in cases {
        let mut watch = Watch::default();
        assert_eq!(watch.settle(|| needed), None, "nobody sleeps");
        let _ = watch.lead(Leader::Application, &1, (watched, SleepsOn::Descriptors));
        assert_eq!(
            watch.settle(|| needed),
            is_woken.then_some(1),
            "{watched:?} {needed:?}"
        );
    }
}

#[test]
fn a_follower_is_to_lead_when_the_leader_has_gone() {
    let (leader, follower) = (1, 2);
    let mut watch = Watch::default();
    assert_eq!(watch.lead(Leader::Application, &leader, POLLING), None);
    assert_eq!(watch.follow(&follower), None);
    assert_eq!(watch.hand_over(), None);
    assert_eq!(watch.stop(), Some(leader));
    assert_eq!(watch.hand_over(), Some(follower));
    watch.unfollow(&follower);
    assert_eq!(watch.hand_over(), None);
}

#[test]
fn a_follower_ends_sleep_on_words() {
    let mut watch = Watch::default();
    assert!(watch.may_use_words());
    let _ = watch.lead(Leader::Application, &1, (QUIET, SleepsOn::Words));
    assert_eq!(watch.follow(&2), Some(1));
    assert!(!watch.may_use_words());
}
