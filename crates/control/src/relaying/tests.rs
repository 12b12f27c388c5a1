//! How relays proceed and end, by inputs and effects alone.

use super::*;
use crate::budget::Limit;
use crate::control::Input;
use crate::control::tests::{Bed, SLOT, USER};
use crate::relay::Relays;
use crate::session::Holder;

fn relayed(start: Start) -> (Bed, SessionId) {
    let mut bed = Bed::new();
    let id = bed.connection(Life::Parked, Holder::Server(SLOT));
    let effects = bed.does(Input::Relay(id, start));
    assert_eq!(effects, [Effect::MoveBytes(id)]);
    (bed, id)
}

fn relay(bed: &mut Bed, id: SessionId) -> &mut Relay {
    bed.control.registry.relay_mut(id).unwrap()
}

const OPEN: RelayProgress = RelayProgress {
    stored: Some(0),
    is_writable: true,
    is_over: false,
    is_stalled: false,
    is_blocked: false,
};

#[test]
fn a_descriptor_is_watched_for_what_can_be_moved() {
    let (mut bed, id) = relayed(Start::AtOnce);
    for (progress, bytes, room) in [
        (OPEN, true, false),
        (
            RelayProgress {
                is_writable: false,
                ..OPEN
            },
            false,
            false,
        ),
        (
            RelayProgress {
                is_blocked: true,
                ..OPEN
            },
            true,
            true,
        ),
        (
            RelayProgress {
                is_stalled: true,
                ..OPEN
            },
            false,
            false,
        ),
    ] {
        let watched = Effect::WatchPeerEnd(id, Interest { bytes, room });
        let effects = bed.does(Input::Relayed(id, progress));
        assert_eq!(effects, [watched], "{progress:?}");
    }
}

#[test]
fn the_end_of_both_sides_closes_and_bytes_that_nobody_read_reset() {
    for left_unread in [false, true] {
        let (mut bed, id) = relayed(Start::AtOnce);
        relay(&mut bed, id).hung_up = true;
        assert_eq!(bed.does(Input::Relayed(id, OPEN)), [], "bytes may be in it");
        let state = relay(&mut bed, id);
        (state.near_ended, state.left_unread) = (true, left_unread);
        let end = if left_unread {
            Effect::ResetConnection(SLOT)
        } else {
            Effect::CloseConnection(id, SLOT)
        };
        let effects = bed.does(Input::Relayed(id, OPEN));
        assert_eq!(effects, [Effect::ClosePeerEnd(id), end]);
    }
}

#[test]
fn what_may_go_back_at_once_gets_a_first_helping_only() {
    let (mut bed, id) = relayed(Start::Gently);
    assert_eq!(relay(&mut bed, id).allowance, Some(FIRST_HELPING));
    assert_eq!(
        bed.passes(Duration::from_millis(3)),
        [Effect::MoveBytes(id)]
    );
    assert_eq!(relay(&mut bed, id).allowance, None);
}

#[test]
fn a_user_without_room_waits_and_others_do_not() {
    let (mut bed, id) = relayed(Start::AtOnce);
    bed.control.relays = Relays::new(Limit {
        total: 100_000,
        per_user: 10_000,
        reserve: 0,
    });
    let stored = Some(9_000);
    bed.does(Input::Relayed(id, RelayProgress { stored, ..OPEN }));
    assert_eq!(bed.control.relay_room(id, stored), 1_000);
    let other = bed.connection(Life::Parked, Holder::Server(SLOT));
    assert_eq!(bed.control.relay_room(other, Some(96)), 4_000, "the least");
    assert_eq!(bed.control.relay_room(id, None), usize::MAX, "a local one");
    let is_stalled = true;
    let progress = RelayProgress { is_stalled, ..OPEN };
    bed.does(Input::Relayed(id, progress));
    assert!(bed.control.timers.is_armed(Timer::RelayMemory));
    assert_eq!(bed.control.stalled_relays(), [Effect::MoveBytes(id)]);
    // The charge ends with the relay.
    bed.does(Input::Park(id));
    assert_eq!(bed.control.relays.memory.used_by(USER), 0);
}
