//! Threads with CPU reservations among threads that use all CPU time left (MS §VII-B). No thread is pinned to a core:
//! the kernel grants deadlines only to threads that may run on all cores.

use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use portolan_proto::qos::{Adapt, Cpu, QosRequest, Scope};

use super::super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, TIME_LIMIT};
use crate::{Effort, MeasureError};

const PROGRAM: &str = "portolan-traffic";
const PORT: u16 = 7310;

/// Round trips per run, and bytes per message.
const ROUND_TRIPS: usize = 2000;
const SIZE: usize = 1400;

/// CPU-bound programs per core.
const HOGS_OF_CORE: usize = 4;

/// Pictures per second, and the CPU time of decoding each: nine tenths of the reserved rate.
const PICTURES: u32 = 30;
const WORK_MS: u32 = 9;
/// Minimum number of CPU-bound programs beside the viewer.
const VIEWERS_HOGS: usize = 8;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    vec![
        Case::of_portolan("ms-fig19-reserved", "p99/idle", Better::Lower, move |bed| {
            slowdown(bed, Stack::Portolan, Some(RATE_OF_PING), effort)
        })
        .with_bar(1.5)
        .of_paper("as standalone"),
        Case::new(
            "ms-fig19-unreserved",
            "p99/idle",
            Better::Lower,
            move |bed, stack| slowdown(bed, stack, None, effort),
        )
        .of_paper("occasional, but substantial increases"),
        Case::of_portolan(
            "ms-fig21-rate-reserved",
            "1/s",
            Better::Higher,
            move |bed| {
                view(
                    bed,
                    Stack::Portolan,
                    Some(RATE_OF_VIEWER),
                    effort,
                    "per_second",
                )
            },
        )
        .with_bar(29.9)
        .of_paper("29.99"),
        Case::of_portolan("ms-fig21-gap-reserved", "ms", Better::Lower, move |bed| {
            view(
                bed,
                Stack::Portolan,
                Some(RATE_OF_VIEWER),
                effort,
                "longest_gap_ms",
            )
        })
        .with_bar(66.0)
        .of_paper("66 at most"),
        Case::new(
            "ms-fig21-rate-unreserved",
            "1/s",
            Better::Higher,
            move |bed, stack| view(bed, stack, None, effort, "per_second"),
        )
        .of_paper("14"),
        Case::new(
            "ms-fig21-gap-unreserved",
            "ms",
            Better::Lower,
            move |bed, stack| view(bed, stack, None, effort, "longest_gap_ms"),
        ),
    ]
}

/// A requested reservation.
#[derive(Clone, Copy)]
pub(crate) struct Rate {
    ppm: u32,
    period_us: u32,
}

pub(crate) const RATE_OF_PING: Rate = Rate {
    ppm: 100_000,
    period_us: 10_000,
};

pub(crate) const RATE_OF_VIEWER: Rate = Rate {
    ppm: 300_000,
    period_us: 33_000,
};

/// Returns the 99th percentile of round trips beside CPU-bound programs, divided by that without them. Both have the
/// reservation, so that other load of the machine affects them alike.
fn slowdown(
    bed: &Bed,
    stack: Stack,
    rate: Option<Rate>,
    effort: Effort,
) -> Result<f64, MeasureError> {
    let count = effort.scaled(ROUND_TRIPS as f64) as usize;
    let idle = round_trips(bed, stack, rate, count)?;
    let _hogs = hogs(bed, hogs_of_all_cores())?;
    Ok(round_trips(bed, stack, rate, count)? / idle)
}

fn round_trips(
    bed: &Bed,
    stack: Stack,
    rate: Option<Rate>,
    count: usize,
) -> Result<f64, MeasureError> {
    number(PROGRAM, &profile(bed, stack, rate, count)?, &["p99_us"])
}

/// Returns the report of round trips, with the series of them. Starts no other programs: the caller does.
pub(crate) fn profile(
    bed: &Bed,
    stack: Stack,
    rate: Option<Rate>,
    count: usize,
) -> Result<String, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let (size, count) = (SIZE.to_string(), count.to_string());
    let mut echo = unbound(bed, Side::Server, stack);
    echo.args(["echo", "tcp", &endpoint, "--size", &size]);
    let echo = bed.serve_command(PORT, PROGRAM, echo.stdout(Stdio::null()))?;
    reserve(bed, Side::Server, &echo, rate)?;
    let mut ping = unbound(bed, Side::Client, stack);
    ping.args(["ping", "tcp", &endpoint, "--size", &size, "--count", &count]);
    output(bed, ping.arg("--series"), rate)
}

/// Returns one number of the viewer's report.
fn view(
    bed: &Bed,
    stack: Stack,
    rate: Option<Rate>,
    effort: Effort,
    field: &'static str,
) -> Result<f64, MeasureError> {
    number(PROGRAM, &pictures(bed, stack, rate, effort)?, &[field])
}

/// Returns the report of a viewer of pictures beside CPU-bound programs.
pub(crate) fn pictures(
    bed: &Bed,
    stack: Stack,
    rate: Option<Rate>,
    effort: Effort,
) -> Result<String, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let (pictures, work) = (PICTURES.to_string(), WORK_MS.to_string());
    let seconds = effort.scaled(10.0).to_string();
    // Real-time priority, as if on a machine of its own.
    let mut show = bed.namespace(Side::Server).exec("chrt");
    show.args(["--fifo", "1"]).arg(&bed.tools().traffic);
    show.args(["show", &endpoint, "--rate", &pictures]);
    let _show = bed.serve_command(PORT, PROGRAM, show.stdout(Stdio::null()))?;
    let _hogs = hogs(bed, hogs_of_all_cores().max(VIEWERS_HOGS))?;
    let mut view = unbound(bed, Side::Client, stack);
    view.args(["view", &endpoint, "--seconds", &seconds, "--work-ms", &work]);
    output(bed, &mut view, rate)
}

/// Returns our traffic program, not pinned to a core.
fn unbound(bed: &Bed, side: Side, stack: Stack) -> Command {
    let words = bed.words(stack, PROGRAM);
    let mut command = bed.namespace(side).exec(&words[0]);
    command.args(&words[1..]);
    command
}

pub(crate) fn hogs_of_all_cores() -> usize {
    HOGS_OF_CORE * available_parallelism().map_or(1, |cores| cores.get())
}

/// Starts CPU-bound programs, which run until they are dropped.
pub(crate) fn hogs(bed: &Bed, count: usize) -> Result<Vec<Background>, MeasureError> {
    let start = || {
        let mut hog = bed.namespace(Side::Client).exec("sh");
        Background::start(hog.args(["-c", "while :; do :; done"]))
    };
    let started: Result<Vec<_>, _> = (0..count).map(|_| start()).collect();
    Ok(started?)
}

/// Returns the output of a program with a reservation.
fn output(bed: &Bed, command: &mut Command, rate: Option<Rate>) -> Result<String, MeasureError> {
    let mut program = Background::start_with_output(command.stdout(Stdio::piped()))?;
    reserve(bed, Side::Client, &program, rate)?;
    program.wait(TIME_LIMIT);
    Ok(program.finish())
}

fn reserve(
    bed: &Bed,
    side: Side,
    program: &Background,
    rate: Option<Rate>,
) -> Result<(), MeasureError> {
    let Some(rate) = rate else {
        return Ok(());
    };
    let spec = Cpu {
        class: None,
        rate_ppm: rate.ppm,
        period_us: rate.period_us,
        slack: false,
        adapt: Adapt::Off,
    };
    let scope = Scope::Process { pid: program.pid() };
    bed.ask_qos(side, QosRequest::Cpu { scope, spec })?;
    Ok(())
}
