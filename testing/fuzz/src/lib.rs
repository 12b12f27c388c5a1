//! One harness with three uses. `portolan_fuzz::check!()` is bolero's `check!()` with two changes: as a
//! test it runs the same inputs on every machine and in every run, so that a failure is reproducible;
//! and an input that the fuzzer found is run alone by `PORTOLAN_FUZZ_INPUT=file`.
//! Built by `make fuzz`, the same harness is a coverage-guided target of libFuzzer.
//!
//! `PORTOLAN_FUZZ_ITERATIONS` and `PORTOLAN_FUZZ_SEED` make a test run more, or other, inputs.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub use bolero;

#[cfg(not(fuzzing))]
mod seeded;

#[cfg(not(fuzzing))]
#[doc(hidden)]
pub use seeded::Seeded;

/// A target: `check!(500).with_type::<T>().for_each(|value| …)` runs 500 inputs as a test.
#[cfg(fuzzing)]
#[macro_export]
macro_rules! check {
    ($inputs:expr) => {
        $crate::bolero::check!()
    };
}

/// A target: `check!(500).with_type::<T>().for_each(|value| …)` runs 500 inputs as a test.
#[cfg(not(fuzzing))]
#[macro_export]
macro_rules! check {
    ($inputs:expr) => {
        $crate::bolero::TestTarget::new($crate::Seeded::new($inputs))
    };
}
