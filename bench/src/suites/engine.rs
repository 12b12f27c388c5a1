//! Instructions of the protocol engine for each segment, in order and without loss, counted by
//! valgrind's callgrind: the same number on every machine, with hardware counters or without. The
//! kernel's stack cannot be run under it, so it has no column here.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Better, Case, number};
use crate::bed::Bed;
use crate::process::run;
use crate::{Effort, MeasureError};

/// A counted step, which the program has a function for, and what its report counts it by.
const STEPS: [(&str, &str, &str); 3] = [
    ("send", "count_send", "sent"),
    ("receive", "count_receive", "received"),
    ("ack", "count_acknowledgement", "acknowledgements"),
];

/// Bytes handed over at once: one segment on the wire, and the most that a device cuts or joins.
const SIZES: [(usize, usize); 2] = [(1448, 10_000), (65_160, 2_000)];

/// `rep movsb` would count one instruction for each byte that memcpy moves.
pub(super) const COPY_BY_VECTORS: &str = "glibc.cpu.x86_rep_movsb_threshold=1000000";

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let sizes = if effort.quick {
        &SIZES[..1]
    } else {
        &SIZES[..]
    };
    let mut cases = Vec::new();
    for &(size, segments) in sizes {
        for (name, function, count) in STEPS {
            cases.push(Case::of_portolan(
                format!("engine-{name}-{size}"),
                "instr",
                Better::Lower,
                move |bed| instructions(bed, (size, segments), Way::Fast, (function, count)),
            ));
        }
    }
    // One side of a round trip: a byte comes, is read, and another is written.
    cases.push(Case::of_portolan(
        "engine-turn-1".to_owned(),
        "instr",
        Better::Lower,
        |bed| instructions(bed, (1, 10_000), Way::Fast, ("count_turn", "turns")),
    ));
    cases
}

/// Which way received segments go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Where their headers are as expected.
    Fast,
    Standard,
}

/// Of one step, which a function of the program is, counted over so many segments of that size.
pub(crate) fn instructions(
    bed: &Bed,
    (size, segments): (usize, usize),
    way: Way,
    (function, count): (&str, &str),
) -> Result<f64, MeasureError> {
    let log = bed.file("callgrind");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(count_in(&format!("*{function}*"), &log))
        .env("GLIBC_TUNABLES", COPY_BY_VECTORS)
        .arg(&bed.tools().engine)
        .args([&segments.to_string(), "--size", &size.to_string()]);
    if way == Way::Standard {
        valgrind.arg("--apart");
    }
    let report = run(&mut valgrind)?;
    let steps = number("portolan-engine", &report, &[count])?;
    Ok(collected(&log)? / steps)
}

/// Arguments of valgrind: counts within the function.
pub(super) fn count_in(function: &str, log: &Path) -> [String; 4] {
    [
        "--tool=callgrind".to_owned(),
        "--callgrind-out-file=/dev/null".to_owned(),
        format!("--log-file={}", log.display()),
        format!("--toggle-collect={function}"),
    ]
}

/// What was counted.
pub(super) fn collected(log: &Path) -> Result<f64, MeasureError> {
    let output = fs::read_to_string(log).map_err(|source| MeasureError::File {
        path: log.display().to_string(),
        source,
    })?;
    let collected = output
        .lines()
        .find_map(|line| line.split("Collected :").nth(1)?.trim().parse::<f64>().ok());
    match collected {
        // None at all are what a program without symbols has.
        Some(instructions) if instructions > 0.0 => Ok(instructions),
        _ => Err(MeasureError::Output {
            program: "valgrind",
            output,
        }),
    }
}
