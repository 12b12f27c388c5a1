//! Connections per second: connect, one byte, close, one after the other; with a server that serves
//! them itself, and with one that forks a child for each. And what each connection costs.

mod costs;

use super::{Better, Case, Reach, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 7008;

pub(super) const PYTHON: &str = "/usr/bin/python3";

/// A minimal concurrent server: accept, fork, close.
const FORKING: &str = include_str!("forking.py");

/// A connection that migrates from its program to the server and back.
const MOVING: &str = include_str!("moving.py");
const JOURNEYS: &str = "300";

/// The value of `SO_CONCURRENT_SERVER` on the forking server's socket.
#[derive(Clone, Copy)]
enum Caching {
    /// Connections migrate to the child at its first use.
    Delayed,
    /// Connections migrate to the parent at `accept`.
    Undelayed,
}

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(1.0);
    let mut cases = vec![Case::new(
        "connect-close",
        "conn/s",
        Better::Higher,
        move |bed, stack| {
            let endpoint = bed.endpoint(PORT).to_string();
            let _server = bed.serve(stack, PORT, "portolan-traffic", &["greet", &endpoint])?;
            connect(bed, stack, seconds, "per_second")
        },
    )];
    if effort.quick {
        return cases;
    }
    cases.push(Case::new(
        "connect-close-delegated",
        "conn/s",
        Better::Higher,
        move |bed, stack| {
            let endpoint = bed.endpoint(PORT).to_string();
            let words = ["greet", &endpoint];
            let _server = bed.serve_delegated(stack, PORT, "portolan-traffic", &words)?;
            connect(bed, stack, seconds, "per_second")
        },
    ));
    cases.push(Case::new(
        "fork-close",
        "conn/s",
        Better::Higher,
        move |bed, stack| forking(bed, stack, Caching::Delayed, seconds, "per_second"),
    ));
    // Delayed caching has no equivalent in the kernel.
    cases.push(Case::of_portolan(
        "fork-close-undelayed",
        "conn/s",
        Better::Higher,
        move |bed| {
            forking(
                bed,
                Stack::Portolan,
                Caching::Undelayed,
                seconds,
                "per_second",
            )
        },
    ));
    for (suffix, caching) in [("", Caching::Delayed), ("-undelayed", Caching::Undelayed)] {
        cases.push(Case::of_portolan(
            format!("fork-moves{suffix}"),
            "moves/conn",
            Better::Lower,
            move |bed| {
                let before = moves(bed)?;
                let connections = forking(bed, Stack::Portolan, caching, seconds, "connections")?;
                Ok((moves(bed)? - before) / connections)
            },
        ));
    }
    for (suffix, unread) in [("idle", 0), ("256k", 256 << 10), ("2m", 2 << 20)] {
        cases.push(Case::of_portolan(
            format!("move-{suffix}"),
            "us",
            Better::Lower,
            move |bed| move_away_and_back(bed, unread),
        ));
    }
    cases.push(Case::of_portolan(
        "move-bytes",
        "bytes",
        Better::Lower,
        |bed| {
            let (bytes, count) = (capsule_bytes(bed)?, moves(bed)?);
            move_away_and_back(bed, 0)?;
            Ok((capsule_bytes(bed)? - bytes) / (moves(bed)? - count))
        },
    ));
    cases.extend(costs::cases(effort));
    cases
}

/// Returns the microseconds of a session's migration from its program to the server and back, with `unread` bytes.
fn move_away_and_back(bed: &Bed, unread: usize) -> Result<f64, MeasureError> {
    let (address, port) = (bed.server.address.to_string(), PORT.to_string());
    let words = |role: &'static str| ["-S", "-E", "-c", MOVING, role, &address, &port];
    let unread = unread.to_string();
    let giving = [&words("give")[..], &[&unread]].concat();
    let _giver = bed.serve(Stack::Kernel, PORT, PYTHON, &giving)?;
    let mut mover = bed.command(Side::Client, Stack::Portolan, PYTHON);
    mover.args(words("move")).arg(JOURNEYS);
    number("python3", &run(&mut mover)?, &["microseconds"])
}

fn forking(
    bed: &Bed,
    stack: Stack,
    caching: Caching,
    seconds: f64,
    field: &str,
) -> Result<f64, MeasureError> {
    let (address, port) = (bed.server.address.to_string(), PORT.to_string());
    let hint = match caching {
        Caching::Delayed => "1",
        Caching::Undelayed => "0",
    };
    let arguments = ["-S", "-E", "-c", FORKING, &address, &port, hint];
    let _server = bed.serve(stack, PORT, PYTHON, &arguments)?;
    // The client always uses the kernel's stack: the figure is the server's.
    connect(bed, Stack::Kernel, seconds, field)
}

fn connect(bed: &Bed, stack: Stack, seconds: f64, field: &str) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let seconds = seconds.to_string();
    Reach::Wire.traffic(
        bed,
        stack,
        &["connect", &endpoint, "--seconds", &seconds],
        field,
    )
}

/// Returns the number of migrations to and from processes, on both hosts.
fn moves(bed: &Bed) -> Result<f64, MeasureError> {
    Ok(counted(bed, "sessions_cached")? + counted(bed, "sessions_flushed")?)
}

fn capsule_bytes(bed: &Bed) -> Result<f64, MeasureError> {
    counted(bed, "capsule_bytes")
}

/// Returns a counter, summed up over the servers of both hosts.
pub(super) fn counted(bed: &Bed, name: &str) -> Result<f64, MeasureError> {
    Ok(counted_on(bed, Side::Server, name)? + counted_on(bed, Side::Client, name)?)
}

fn counted_on(bed: &Bed, side: Side, name: &str) -> Result<f64, MeasureError> {
    let text = bed.portolan(side, &["counters", "--all", "--json"])?;
    let counters: Vec<serde_json::Value> =
        serde_json::from_str(&text).map_err(|_| MeasureError::Output {
            program: "portolan",
            output: text.clone(),
        })?;
    let counter = counters.iter().find(|counter| counter["name"] == name);
    Ok(counter
        .and_then(|counter| counter["value"].as_f64())
        .unwrap_or(0.0))
}
