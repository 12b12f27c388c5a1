//! The engine of tests: inputs by number, the same on every machine, shrunk when they fail.

use core::fmt::Debug;
use core::ops::Range;

use bolero::bolero_engine::driver::Options;
use bolero::bolero_engine::input::Bytes;
use bolero::bolero_engine::{Failure, panic};
use bolero::{Engine, Test};

/// Bytes of the longest input.
const LONGEST: u64 = 4096;

#[derive(Clone, Copy, Debug)]
pub struct Seeded {
    inputs: u64,
}

impl Seeded {
    pub fn new(inputs: u64) -> Seeded {
        Seeded { inputs }
    }

    fn seeds(self) -> Range<u64> {
        let number = |name| std::env::var(name).ok().and_then(|n| n.parse().ok());
        let first = number("PORTOLAN_FUZZ_SEED").unwrap_or(0_u64);
        let inputs = number("PORTOLAN_FUZZ_ITERATIONS").unwrap_or(self.inputs);
        first..first.saturating_add(inputs)
    }
}

impl<T: Test> Engine<T> for Seeded
where
    T::Value: Debug,
{
    type Output = ();

    fn run(self, mut test: T, options: Options) {
        panic::set_hook();
        panic::forward_panic(false);
        if let Ok(path) = std::env::var("PORTOLAN_FUZZ_INPUT") {
            let input = std::fs::read(&path).expect("PORTOLAN_FUZZ_INPUT is a file");
            attempt(&mut test, &options, &path, input);
        } else {
            for seed in self.seeds() {
                let name = format!("PORTOLAN_FUZZ_SEED={seed}");
                attempt(&mut test, &options, &name, input(seed));
            }
        }
        panic::forward_panic(true);
    }
}

fn attempt<T: Test>(test: &mut T, options: &Options, name: &str, input: Vec<u8>)
where
    T::Value: Debug,
{
    let Err(error) = test.test(&mut Bytes::new(&input, options)) else {
        return;
    };
    let failure = match test.shrink(input.clone(), None, options) {
        Some(shrunken) => format!("{shrunken:#}"),
        None => {
            let input = test.generate_value(&mut Bytes::new(&input, options));
            let seed = None;
            format!("{:#}", Failure { error, input, seed })
        }
    };
    panic::forward_panic(true);
    panic!("{name}\n{failure}");
}

/// Returns the input of a seed. Short inputs are as likely as long ones.
fn input(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d);
    let bits = draw(&mut state) % (LONGEST.ilog2() as u64 + 1);
    let length = draw(&mut state) % (2 << bits).min(LONGEST);
    (0..length.div_ceil(8))
        .flat_map(|_| draw(&mut state).to_le_bytes())
        .take(length as usize)
        .collect()
}

/// SplitMix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn the_same_inputs_come_every_time() {
        assert_eq!(super::input(7), super::input(7));
        assert_ne!(super::input(7), super::input(8));
    }

    #[test]
    fn a_failure_tells_the_shrunken_input() {
        let failing = || {
            crate::check!(1000)
                .with_type::<u32>()
                .for_each(|&value| assert!(value < 1000));
        };
        let message = catch_unwind(AssertUnwindSafe(failing)).expect_err("some input fails");
        let message = message.downcast_ref::<String>().expect("a message");
        assert!(message.contains("PORTOLAN_FUZZ_SEED="), "{message}");
        assert!(message.contains("value < 1000"), "{message}");
    }
}
