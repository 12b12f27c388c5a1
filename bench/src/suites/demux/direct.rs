//! Direct mapping (BR §3.2): sessions with rings of their own beside sessions that share one, by the round trips and by
//! the time that the protocol takes for a message and its answer.

use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use super::super::{Better, Case, number};
use super::SETTLE;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7420;
const TRAFFIC: &str = "portolan-traffic";

/// With the value of `PORTOLAN_DIRECT`.
const MAPPINGS: [(&str, &str); 2] = [("shared", "0"), ("direct", "1")];

/// What a direct mapping spared the paper's receiver.
const PROTOCOLS: [(&str, &str); 2] = [("tcp", "-20 %"), ("udp", "-41 %")];

/// Round trips that no measurement outlasts.
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
            let case = Case::of_portolan(format!("{name}-work"), "ns", Better::Lower, work);
            cases.push(match mapping {
                "direct" => case.of_paper(paper),
                _ => case,
            });
        }
    }
    cases
}

fn echo(bed: &Bed, value: &str, protocol: &str) -> Result<Background, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut command = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
    command.env("PORTOLAN_DIRECT", value).stdout(Stdio::null());
    command.args(["echo", protocol, &endpoint, "--spin"]);
    if protocol == "tcp" {
        return Ok(bed.serve_command(PORT, TRAFFIC, &mut command)?);
    }
    let echo = Background::start(&mut command)?;
    sleep(SETTLE);
    Ok(echo)
}

fn pings(bed: &Bed, protocol: &str, count: &str) -> std::process::Command {
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

/// What the echo's library takes for a message that comes and its answer: the program's copies and calls aside.
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

/// Microseconds, and messages, of the session that had most.
fn spent(bed: &Bed) -> Result<[f64; 2], MeasureError> {
    let text = bed.portolan(Side::Server, &["ss", "--json"])?;
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
