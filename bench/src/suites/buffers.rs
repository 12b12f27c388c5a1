//! Shared buffers beside the socket interface on the same sessions (MB Table 3): the same program transfers bulk data
//! by either. The other end uses shared buffers, so that it limits the program least. In addition to the throughput,
//! figures state the data transferred per second of the program's CPU time.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 7440;
const NATIVE: &str = "portolan-native";

/// Time limit for a program to print its counts.
const PRINTS: Duration = Duration::from_secs(5);

/// The gain of the paper's interface.
const PAPER: &str = "+1...5 %";

/// The direction of the program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Receive,
    Send,
}

impl Direction {
    pub(crate) const ALL: [Direction; 2] = [Direction::Receive, Direction::Send];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::Receive => "receive",
            Direction::Send => "send",
        }
    }
}

pub(crate) const INTERFACES: [&str; 2] = ["socket", "shared"];

/// The result of one transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Gb/s
    pub(crate) rate: f64,
    /// Gb per second of CPU time.
    pub(crate) per_processor: f64,
}

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(2.0);
    let mut cases = Vec::new();
    for direction in Direction::ALL {
        for interface in INTERFACES {
            let name = format!("mb-{}-{interface}", direction.name());
            let rate = move |bed: &Bed| Ok(transfer(bed, direction, interface, seconds)?.rate);
            let work =
                move |bed: &Bed| Ok(transfer(bed, direction, interface, seconds)?.per_processor);
            let both = [
                Case::of_portolan(name.as_str(), "Gb/s", Better::Higher, rate),
                Case::of_portolan(format!("{name}-work"), "Gb/cpu-s", Better::Higher, work),
            ];
            cases.extend(both.map(|case| match interface {
                "shared" => case.of_paper(PAPER),
                _ => case,
            }));
        }
    }
    cases
}

/// Transfers bulk data for a while; each byte is read once, or written once.
pub(crate) fn transfer(
    bed: &Bed,
    direction: Direction,
    interface: &str,
    seconds: f64,
) -> Result<Transfer, MeasureError> {
    let to = bed.endpoint(PORT).to_string();
    let seconds = seconds.to_string();
    let native = |side| {
        let mut command = bed.command(side, Stack::Kernel, NATIVE);
        command.env("PORTOLAN", "require");
        command
    };
    let options = ["--by", interface, "--work", "touch"];
    match direction {
        Direction::Receive => {
            let path = bed.file("native.json");
            let mut sink = native(Side::Server);
            sink.args(["sink", &to]).args(options);
            let output = File::create(&path).map_err(|source| MeasureError::File {
                path: path.display().to_string(),
                source,
            })?;
            let _sink = bed.serve_command(PORT, NATIVE, sink.stdout(output))?;
            let mut client = native(Side::Client);
            let report = run(client.args(["bulk", &to, "--seconds", &seconds]))?;
            let told = first_line(&path);
            let time = number(NATIVE, &told, &["processor_seconds"])?;
            of(&report, time)
        }
        Direction::Send => {
            let mut sink = native(Side::Server);
            sink.args(["sink", &to]).stdout(Stdio::null());
            let _sink = bed.serve_command(PORT, NATIVE, &mut sink)?;
            let mut client: Command = native(Side::Client);
            client
                .args(["bulk", &to, "--seconds", &seconds])
                .args(options);
            let report = run(&mut client)?;
            let time = number(NATIVE, &report, &["moved", "processor_seconds"])?;
            of(&report, time)
        }
    }
}

fn of(report: &str, processor: f64) -> Result<Transfer, MeasureError> {
    let bytes = number(NATIVE, report, &["bytes"])?;
    Ok(Transfer {
        rate: number(NATIVE, report, &["gigabits_per_second"])?,
        per_processor: bytes * 8.0 / 1e9 / processor.max(1e-6),
    })
}

/// Waits for the line that the program prints when its connection has ended.
fn first_line(path: &std::path::Path) -> String {
    let start = Instant::now();
    loop {
        let text = fs::read_to_string(path).unwrap_or_default();
        if let Some((line, _)) = text.split_once('\n') {
            return line.to_owned();
        }
        if start.elapsed() > PRINTS {
            return text;
        }
        sleep(Duration::from_millis(10));
    }
}
