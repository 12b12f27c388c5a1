//! Two hosts of whole stacks and a hostile path between them: real frames are lost, duplicated, reordered,
//! damaged and too large for a router, while sessions migrate between two holders of one host by capsule
//! with frames in flight. Then the hostility ends, and both hosts must have complete streams and become
//! idle.

mod arena;
mod device;
mod host;

use arena::{Arena, Setup, Step};
use bolero::generator::*;

#[test]
fn stacks_keep_their_streams_on_every_path() {
    portolan_fuzz::check!(1500)
        .with_generator((
            produce::<Setup>(),
            produce::<Vec<Step>>().with().len(0..120usize),
        ))
        .for_each(|(setup, steps)| {
            let mut arena = Arena::new(setup);
            arena.run(steps);
            arena.settle();
        });
}

/// A case that the generator might miss.
#[test]
fn a_session_moves_while_its_frames_wait_for_the_old_holder() {
    for family in [0, 1] {
        let mut arena = Arena::new(&Setup::plain(family));
        let steps: Vec<Step> = (0..40)
            .flat_map(|round| {
                [
                    Step::Write {
                        who: round % 2 == 0,
                        bytes: 5000,
                    },
                    Step::Move {
                        who: round % 3 == 0,
                        waiting: 3,
                    },
                    Step::Drop {
                        who: true,
                        place: round,
                    },
                    Step::Calm(2),
                ]
            })
            .collect();
        arena.run(&steps);
        arena.settle();
        assert!(arena.strays() > 10, "{}", arena.strays());
    }
}

#[test]
fn a_router_that_takes_less_is_heard_at_once() {
    for family in [0, 1] {
        let mut arena = Arena::new(&Setup::plain(family));
        let write = Step::Write {
            who: false,
            bytes: 20_000,
        };
        arena.run(&[Step::Narrow(0), write, Step::Calm(7)]);
        assert!(arena.reports() > 0);
        assert_eq!(arena.delivered(), 20_000, "within seven round trips");
        arena.settle();
    }
}
