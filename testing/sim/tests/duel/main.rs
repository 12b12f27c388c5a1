//! Two engines with a hostile scheduler between them. A generated program writes, reads, closes,
//! migrates, and decides for each packet whether and when it arrives; attackers forge segments.
//! Afterwards the network is undisturbed, and both engines must become idle.

mod arena;
mod end;
mod found;
mod program;
mod settle;

use arena::Arena;
use bolero::generator::*;
use program::{Setup, Step};

/// Loss, reordering, duplicates, migration, and attackers that do not know the window must not cost
/// a single byte.
#[test]
fn streams_survive_every_schedule_and_blind_attackers() {
    portolan_fuzz::check!(4000)
        .with_generator((
            produce::<Setup>(),
            produce::<Vec<Step>>().with().len(0..160usize),
        ))
        .for_each(|(setup, steps)| {
            let mut arena = Arena::new(setup, false);
            arena.run(steps);
            arena.settle();
        });
}

/// With an attacker on the path, who forges any segment, streams may break, but nothing else may.
#[test]
fn engines_end_in_order_whatever_is_forged() {
    portolan_fuzz::check!(4000)
        .with_generator((
            produce::<Setup>(),
            produce::<Vec<Step>>().with().len(0..160usize),
        ))
        .for_each(|(setup, steps)| {
            let mut arena = Arena::new(setup, true);
            arena.run(steps);
            arena.settle();
        });
}
