//! Instructions of the protocol engine per segment, in order and without loss, counted by valgrind's
//! callgrind, which gives the same number on every machine, with or without hardware counters. The
//! kernel's stack cannot run under it and so has no column here.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Better, Case, number};
use crate::bed::Bed;
use crate::process::run;
use crate::{Effort, MeasureError};

/// The counted steps: name, function of the program, and field of its report with the number of calls.
const STEPS: [(&str, &str, &str); 3] = [
    ("send", "count_send", "sent"),
    ("receive", "count_receive", "received"),
    ("ack", "count_acknowledgement", "acknowledgements"),
];

/// Bytes per frame: one segment on the link, and the maximum that a device segments or coalesces.
const SIZES: [(usize, usize); 2] = [(1448, 10_000), (65_160, 2_000)];

/// Avoids `rep movsb`, which would count one instruction for each byte that memcpy copies.
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
    // One side of a round trip: receives a byte, reads it, and writes another.
    cases.push(Case::of_portolan(
        "engine-turn-1".to_owned(),
        "instr",
        Better::Lower,
        |bed| instructions(bed, (1, 10_000), Way::Fast, ("count_turn", "turns")),
    ));
    cases
}

/// The path of received segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// For segments with the expected headers.
    Fast,
    Standard,
}

/// Returns the instructions of one step, a function of the program, counted over some segments of a size.
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

/// Returns valgrind's arguments for counting within `function`.
pub(super) fn count_in(function: &str, log: &Path) -> [String; 4] {
    [
        "--tool=callgrind".to_owned(),
        "--callgrind-out-file=/dev/null".to_owned(),
        format!("--log-file={}", log.display()),
        format!("--toggle-collect={function}"),
    ]
}

/// Returns the counted instructions from valgrind's log.
pub(super) fn collected(log: &Path) -> Result<f64, MeasureError> {
    let output = fs::read_to_string(log).map_err(|source| MeasureError::File {
        path: log.display().to_string(),
        source,
    })?;
    let collected = output
        .lines()
        .find_map(|line| line.split("Collected :").nth(1)?.trim().parse::<f64>().ok());
    match collected {
        // Zero means that the program has no symbols.
        Some(instructions) if instructions > 0.0 => Ok(instructions),
        _ => Err(MeasureError::Output {
            program: "valgrind",
            output,
        }),
    }
}
