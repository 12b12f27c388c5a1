//! Direct mapping (BR §3.2): sessions with rings of their own beside sessions that share one. Measures round trips,
//! the protocol's time for a message and its answer, and the instructions of the receiver.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use super::super::engine::{COPY_BY_VECTORS, collected, count_in};
use super::super::{Better, Case, number};
use super::SETTLE;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7420;
const TRAFFIC: &str = "portolan-traffic";

/// Names of mappings, with the value of `PORTOLAN_DIRECT`.
const MAPPINGS: [(&str, &str); 2] = [("shared", "0"), ("direct", "1")];

/// Savings of the paper's receiver by direct mapping.
const PROTOCOLS: [(&str, &str); 2] = [("tcp", "-20 %"), ("udp", "-41 %")];

/// Receives the records of all rings and passes them to their sessions.
const RECEIVER: &str = "portolan::runtime::Core::receive";

/// Round trips for which instructions are counted.
const COUNTED: usize = 2_000;

/// More round trips than any measurement takes.
const ENDLESS: &str = "100000000";

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(20_000.0) as usize;
    let time = Duration::from_secs_f64(effort.scaled(2.0));
    let mut cases = Vec::new();
    for (mapping, value) in MAPPINGS {
        for (protocol, paper) in PROTOCOLS {
            let name = format!("br-{mapping}-{protocol}");
            let round_trip = move |bed: &Bed| ping(bed, value, protocol, count);
            cases.push(Case::of_portolan(
                name.as_str(),
                "us",
                Better::Lower,
                round_trip,
            ));
            let work = move |bed: &Bed| work(bed, value, protocol, time);
            let receive = move |bed: &Bed| instructions(bed, value, protocol);
            let costs = [
                Case::of_portolan(format!("{name}-work"), "ns", Better::Lower, work),
                Case::of_portolan(format!("{name}-receive"), "instr", Better::Lower, receive),
            ];
            cases.extend(costs.map(|case| match mapping {
                "direct" => case.of_paper(paper),
                _ => case,
            }));
        }
    }
    cases
}

fn echo(bed: &Bed, value: &str, protocol: &str) -> Result<Background, MeasureError> {
    let mut command = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    command.args(["echo", protocol, &bed.endpoint(PORT).to_string(), "--spin"]);
    start(bed, value, protocol, command)
}

fn start(
    bed: &Bed,
    value: &str,
    protocol: &str,
    mut echo: Command,
) -> Result<Background, MeasureError> {
    echo.env("PORTOLAN_DIRECT", value).stdout(Stdio::null());
    if protocol == "tcp" {
        return Ok(bed.serve_command(PORT, TRAFFIC, &mut echo)?);
    }
    let echo = Background::start(&mut echo)?;
    sleep(SETTLE);
    Ok(echo)
}

/// Returns the instructions that the echo's library executes to get a message from the ring to the session. The echo
/// sleeps, since a spinning one would poll the ring more often than messages arrive.
fn instructions(bed: &Bed, value: &str, protocol: &str) -> Result<f64, MeasureError> {
    let log = bed.file("callgrind");
    let mut valgrind = bed.command(Side::Server, Stack::Portolan, "valgrind");
    valgrind.env("GLIBC_TUNABLES", COPY_BY_VECTORS);
    valgrind
        .args(count_in(RECEIVER, &log))
        .arg(&bed.tools().traffic);
    valgrind.args(["echo", protocol, &bed.endpoint(PORT).to_string()]);
    let echo = start(bed, value, protocol, valgrind)?;
    let mut command = pings(bed, protocol, &COUNTED.to_string());
    run(command.args(["--warm-up", "0"]))?;
    drop(echo);
    Ok(collected(&log)? / COUNTED as f64)
}

fn pings(bed: &Bed, protocol: &str, count: &str) -> Command {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut command = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    command.args(["ping", protocol, &endpoint, "--count", count, "--spin"]);
    command
}

fn ping(bed: &Bed, value: &str, protocol: &str, count: usize) -> Result<f64, MeasureError> {
    let _echo = echo(bed, value, protocol)?;
    let mut command = pings(bed, protocol, &count.to_string());
    number(TRAFFIC, &run(&mut command)?, &["p50_us"])
}

/// Returns the time that the echo's library takes for a message and its answer, without the program's copies and calls.
fn work(bed: &Bed, value: &str, protocol: &str, time: Duration) -> Result<f64, MeasureError> {
    let _echo = echo(bed, value, protocol)?;
    let mut command = pings(bed, protocol, ENDLESS);
    let _pings = Background::start(command.stdout(Stdio::null()))?;
    sleep(SETTLE);
    let before = spent(bed)?;
    sleep(time);
    let after = spent(bed)?;
    Ok((after[0] - before[0]) * 1e3 / (after[1] - before[1]).max(1.0))
}

/// Returns the microseconds and the messages of the session that received most.
fn spent(bed: &Bed) -> Result<[f64; 2], MeasureError> {
    let text = bed.portolan(Side::Server, &["ss", "-a", "--json"])?;
    let sessions: Vec<serde_json::Value> =
        serde_json::from_str(&text).map_err(|_| MeasureError::Output {
            program: "portolan",
            output: text.clone(),
        })?;
    let figures = sessions.iter().map(|session| &session["figures"]);
    let busiest = figures.max_by_key(|figures| figures["segments_in"].as_u64());
    let of = |name: &str| busiest.and_then(|figures| figures[name].as_f64());
    Ok([
        of("cpu_us").unwrap_or_default(),
        of("segments_in").unwrap_or_default(),
    ])
}
