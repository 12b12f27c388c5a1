//! Programs that once failed, found by the harnesses above and minimized.

use portolan_sim::Side::{A, B};

use crate::arena::Arena;
use crate::program::Step::*;
use crate::program::{Host, Setup, Step, Who};

const HOST: Host = Host::plain();

fn setup() -> Setup {
    Setup {
        a: HOST,
        b: HOST,
        crossing: false,
        gro: false,
        start: 0,
        established: true,
    }
}

fn play(setup: &Setup, on_path: bool, steps: &[Step]) {
    let mut arena = Arena::new(setup, on_path);
    arena.run(steps);
    arena.settle();
}

#[test]
fn a_syn_ack_sent_again_offers_no_less_than_before() {
    let setup = Setup {
        established: false,
        ..setup()
    };
    let (who, kind, value) = (Who::from(B), 6, 0);
    let steps = [
        DeliverAll(A.into()),
        Option { who, kind, value },
        Wait(255),
        DropAll(B.into()),
    ];
    play(&setup, false, &steps);
}

#[test]
fn a_host_that_slept_sends_one_keep_alive_probe() {
    let who = Who::from(B);
    let (kind, value) = (11, 0);
    play(&setup(), false, &[Option { who, kind, value }, Wait(255)]);
}

#[test]
fn what_seemed_to_follow_a_fin_is_dropped() {
    let (who, bytes) = (Who::from(A), 256);
    let (place, field, value) = (0, 3, 1);
    let steps = [
        Write { who, bytes },
        // The first segment is given a FIN, and arrives last.
        Corrupt {
            who,
            place,
            field,
            value,
        },
        DeliverAll(who),
    ];
    play(&setup(), true, &steps);
}

#[test]
fn a_window_goes_with_the_acknowledgement_it_came_with() {
    // B's earlier data overtakes a segment that B sent after A's data had arrived. The latter has a
    // smaller window and a lower sequence number.
    let (a, b) = (Who::from(A), Who::from(B));
    let steps = [
        Write { who: a, bytes: 768 },
        Write { who: b, bytes: 256 },
        DeliverAll(a),
        Wait(255),
        Deliver { who: b, place: 4 },
    ];
    for gro in [false, true] {
        play(&Setup { gro, ..setup() }, false, &steps);
    }
}
