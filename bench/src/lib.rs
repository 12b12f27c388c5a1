//! Benchmarks of Portolan beside the kernel's stack, on one bed, in one run: every figure is
//! measured alternately on both, with one core per side. `portolan bench` prints what this
//! library measures; `portolan demo` and the program tests use its [`bed`].
#![forbid(unsafe_code)]

pub mod bed;
pub mod figure;
pub mod film;
pub mod process;
pub mod suites;
pub mod table;
pub mod tools;

use bed::{Bed, Stack};
use figure::{Figure, Spread};
use suites::{Case, Suite};

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Measurements of each figure on each stack.
    pub runs: usize,
    /// The few cases that tell most, and shorter ones.
    pub quick: bool,
}

impl Effort {
    /// Scales the length of one measurement.
    fn scaled(self, full: f64) -> f64 {
        if self.quick { full / 2.0 } else { full }
    }
}

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    #[error(transparent)]
    Process(#[from] process::ProcessError),
    #[error(transparent)]
    Bed(#[from] bed::BedError),
    #[error(transparent)]
    Service(#[from] bed::ServeError),
    #[error("{program} printed what cannot be read: {output}")]
    Output {
        program: &'static str,
        output: String,
    },
    #[error("cannot write {path}: {source}")]
    File {
        path: String,
        source: std::io::Error,
    },
}

/// Runs the cases of some suites whose names contain `only`, and calls `done` with each figure as it is there. A case that
/// fails on either stack is reported through `failed` and does not end the run.
pub fn measure(
    bed: &Bed,
    suites: &[Suite],
    only: &str,
    effort: Effort,
    mut done: impl FnMut(&Figure),
    mut failed: impl FnMut(&str, MeasureError),
) -> Vec<Figure> {
    let mut figures = Vec::new();
    let cases = suites.iter().flat_map(|suite| suite.cases(effort));
    for case in cases.filter(|case| case.name.contains(only)) {
        match measure_case(bed, &case, effort.runs) {
            Ok(figure) => {
                done(&figure);
                figures.push(figure);
            }
            Err(error) => failed(&case.name, error),
        }
    }
    figures
}

/// Alternates the stacks, so that a disturbance of the machine falls on both.
fn measure_case(bed: &Bed, case: &Case, runs: usize) -> Result<Figure, MeasureError> {
    let mut portolan = Vec::with_capacity(runs);
    let mut kernel = Vec::with_capacity(runs);
    for _ in 0..runs {
        if case.is_of(Stack::Kernel) {
            kernel.push(case.run(bed, Stack::Kernel)?);
        }
        portolan.push(case.run(bed, Stack::Portolan)?);
    }
    let kernel = (!kernel.is_empty()).then(|| Spread::of(&mut kernel));
    Ok(Figure::new(case, Spread::of(&mut portolan), kernel))
}
