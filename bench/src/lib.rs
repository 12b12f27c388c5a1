//! Benchmarks of Portolan beside the kernel's stack, on one bed, in one run: every figure is
//! measured alternately on both, with one core per side. `portolan bench` prints what this
//! library measures; `portolan demo` and the program tests use its [`bed`].
#![forbid(unsafe_code)]

pub mod bed;
pub mod figure;
pub mod film;
pub mod machine;
pub mod process;
pub mod report;
pub mod services;
pub mod suites;
pub mod table;
pub mod tools;
pub mod transfer;

use std::path::Path;

use bed::{Bed, Stack};
use figure::{Figure, Measured};
use machine::CpuTimes;
use suites::{Case, Suite};

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Measure only the most informative cases, and shorter ones.
    pub quick: bool,
}

impl Effort {
    /// Scales the length of one measurement.
    fn scaled(self, full: f64) -> f64 {
        if self.quick { full / 2.0 } else { full }
    }
}

/// Why a measurement failed.
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
    #[error("the connections were the kernel's")]
    KernelSockets,
    #[error("cannot write {path}: {source}")]
    File {
        path: String,
        source: std::io::Error,
    },
}

/// Events that a run reports to its caller.
pub enum Progress<'a> {
    /// The figure of this name is measured next, as number `index` of `count`.
    Begins {
        name: &'a str,
        index: usize,
        count: usize,
    },
    Done(&'a Figure),
    /// A case needs a program that is not installed.
    LeftOut {
        name: &'a str,
        program: &'a Path,
    },
    /// A case that fails on either stack does not end the run.
    Failed {
        name: &'a str,
        error: MeasureError,
    },
}

/// Returns the cases of some suites whose names contain `only`.
pub fn select(suites: &[Suite], only: &str, effort: Effort) -> Vec<Case> {
    suites
        .iter()
        .flat_map(|suite| suites::cases(*suite, effort))
        .filter(|case| case.name.contains(only))
        .collect()
}

/// Runs cases, and reports each figure when it is complete.
pub fn measure(
    bed: &Bed,
    cases: &[Case],
    runs: usize,
    mut report: impl FnMut(Progress),
) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        report(Progress::Begins {
            name: &case.name,
            index: index + 1,
            count: cases.len(),
        });
        if let Some(program) = case.missing_program() {
            report(Progress::LeftOut {
                name: &case.name,
                program,
            });
            continue;
        }
        match measure_case(bed, case, runs) {
            Ok(figure) => {
                report(Progress::Done(&figure));
                figures.push(figure);
            }
            Err(error) => report(Progress::Failed {
                name: &case.name,
                error,
            }),
        }
    }
    figures
}

/// Alternates between the stacks, so that a disturbance of the machine affects both.
pub(crate) fn measure_case(bed: &Bed, case: &Case, runs: usize) -> Result<Figure, MeasureError> {
    let before = CpuTimes::now();
    let mut portolan = Vec::with_capacity(runs);
    let mut kernel = Vec::with_capacity(runs);
    for _ in 0..runs {
        if case.is_of(Stack::Kernel) {
            kernel.push(case.run(bed, Stack::Kernel)?);
        }
        portolan.push(case.run(bed, Stack::Portolan)?);
    }
    let kernel = (!kernel.is_empty()).then(|| Measured::of(&kernel));
    Ok(Figure::new(
        case,
        Measured::of(&portolan),
        kernel,
        before.state(),
    ))
}
