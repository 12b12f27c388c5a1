//! The wheel fires what a sorted map would, no earlier and less than a tick later.

use std::collections::BTreeMap;

use bolero::TypeGenerator;
use portolan_types::Instant;

use super::{TICK_BITS, Wheel};

const TICK: u64 = 1 << TICK_BITS;

fn fired(wheel: &mut Wheel, now: Instant) -> Vec<u32> {
    let mut slots = Vec::new();
    wheel.expire(now, |slot| slots.push(slot));
    slots.sort_unstable();
    slots
}

#[test]
fn a_timer_fires_once_and_not_before_its_deadline() {
    let mut wheel = Wheel::new(Instant::ZERO);
    let deadline = Instant::from_millis(200);
    wheel.set(3, deadline);
    assert_eq!(
        fired(&mut wheel, Instant::from_nanos(deadline.as_nanos() - 1)),
        []
    );
    let late = Instant::from_nanos(deadline.as_nanos() + TICK);
    assert_eq!(fired(&mut wheel, late), [3]);
    assert_eq!(fired(&mut wheel, Instant::from_millis(1000)), []);
    assert_eq!(wheel.next(), None);
}

#[test]
fn setting_again_replaces_and_clearing_forgets() {
    let mut wheel = Wheel::new(Instant::ZERO);
    wheel.set(0, Instant::from_millis(10));
    wheel.set(1, Instant::from_millis(10));
    wheel.set(0, Instant::from_millis(500));
    wheel.clear(1);
    wheel.clear(7);
    assert_eq!(fired(&mut wheel, Instant::from_millis(100)), []);
    assert_eq!(fired(&mut wheel, Instant::from_millis(501)), [0]);
}

#[test]
fn nobody_has_to_look_at_the_wheel_for_a_deadline_that_is_gone() {
    let mut wheel = Wheel::new(Instant::ZERO);
    wheel.set(0, Instant::from_millis(40));
    wheel.set(1, Instant::from_millis(60));
    wheel.set(0, Instant::from_millis(60_000));
    assert!(wheel.next() > Some(Instant::from_millis(40)));
    wheel.clear(1);
    assert!(wheel.next() > Some(Instant::from_millis(30_000)));
    wheel.clear(0);
    assert_eq!(wheel.next(), None);
}

#[test]
fn a_deadline_beyond_the_wheel_waits_its_turn() {
    let mut wheel = Wheel::new(Instant::ZERO);
    let year = Instant::from_millis(365 * 24 * 3600 * 1000);
    wheel.set(0, year);
    wheel.set(1, Instant::FAR_FUTURE);
    let before = Instant::from_nanos(year.as_nanos() - 1);
    assert_eq!(fired(&mut wheel, before), []);
    assert_eq!(
        fired(&mut wheel, Instant::from_nanos(year.as_nanos() + TICK)),
        [0]
    );
}

#[derive(Debug, TypeGenerator)]
enum Step {
    Set { slot: u8, after: u64, magnitude: u8 },
    Clear { slot: u8 },
    Advance { by: u64, magnitude: u8 },
    Sleep,
}

/// Spreads values over all levels.
fn scaled(value: u64, magnitude: u8) -> u64 {
    value >> (8 + magnitude % 56)
}

struct Model {
    now: u64,
    deadlines: BTreeMap<u32, u64>,
}

impl Model {
    /// Checks that `fired` is exactly what was due for a tick.
    fn check(&mut self, fired: &[u32]) {
        for slot in fired {
            let deadline = self
                .deadlines
                .remove(slot)
                .expect("fires only what was set");
            assert!(deadline <= self.now, "{slot} fired early");
        }
        let overdue = |&deadline: &u64| deadline.saturating_add(TICK) <= self.now;
        assert!(
            !self.deadlines.values().any(overdue),
            "a timer was slept through"
        );
    }
}

#[test]
fn the_wheel_agrees_with_a_sorted_map() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<Step>>()
        .for_each(|steps| {
            let mut model = Model {
                now: 1_000_000_000,
                deadlines: BTreeMap::new(),
            };
            let mut wheel = Wheel::new(Instant::from_nanos(model.now));
            for step in steps {
                match *step {
                    Step::Set {
                        slot,
                        after,
                        magnitude,
                    } => {
                        let deadline = model.now.saturating_add(scaled(after, magnitude));
                        wheel.set(slot.into(), Instant::from_nanos(deadline));
                        model.deadlines.insert(slot.into(), deadline);
                    }
                    Step::Clear { slot } => {
                        wheel.clear(slot.into());
                        model.deadlines.remove(&u32::from(slot));
                    }
                    Step::Advance { by, magnitude } => {
                        model.now = model.now.saturating_add(scaled(by, magnitude));
                    }
                    Step::Sleep => {
                        let Some(next) = wheel.next() else { continue };
                        let earliest = *model.deadlines.values().min().expect("something is set");
                        assert!(
                            next.as_nanos() <= earliest.saturating_add(TICK).max(model.now + TICK)
                        );
                        model.now = model.now.max(next.as_nanos());
                    }
                }
                let slots = fired(&mut wheel, Instant::from_nanos(model.now));
                model.check(&slots);
            }
            assert_eq!(wheel.next().is_none(), model.deadlines.is_empty());
        });
}
