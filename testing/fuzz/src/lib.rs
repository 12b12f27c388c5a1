//! One harness, three uses. `portolan_fuzz::check!()` is bolero's `check!()` with two changes: as
//! a test it tries the same inputs on every machine and every run, so that a failure is a failure
//! for everybody; and a file that the fuzzer found is tried alone by `PORTOLAN_FUZZ_INPUT=file`.
//! Built by `make fuzz`, the same harness is a target of libFuzzer, guided by coverage.
//!
//! `PORTOLAN_FUZZ_ITERATIONS` and `PORTOLAN_FUZZ_SEED` make a test try more inputs, or others.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub use bolero;

#[cfg(not(fuzzing))]
mod seeded;

#[cfg(not(fuzzing))]
#[doc(hidden)]
pub use seeded::Seeded;

/// A target: `check!(500).with_type::<T>().for_each(|value| …)` tries 500 inputs as a test.
#[cfg(fuzzing)]
#[macro_export]
macro_rules! check {
    ($inputs:expr) => {
        $crate::bolero::check!()
    };
}

/// A target: `check!(500).with_type::<T>().for_each(|value| …)` tries 500 inputs as a test.
#[cfg(not(fuzzing))]
#[macro_export]
macro_rules! check {
    ($inputs:expr) => {
        $crate::bolero::TestTarget::new($crate::Seeded::new($inputs))
    };
}
