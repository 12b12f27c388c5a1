//! Connections per second: connect, one octet, close, one after the other; by a server that serves
//! them itself, and by one that leaves each to a child.

use super::{Better, Case, Reach};
use crate::bed::{Bed, Side, Stack};
use crate::{Effort, MeasureError};

const PORT: u16 = 7008;

/// A concurrent server without anything else: accept, fork, close.
const FORKING: &str = include_str!("forking.py");

/// What `SO_CONCURRENT_SERVER` of the forking server is set to.
#[derive(Clone, Copy)]
enum Caching {
    /// Connections go to the child with its first use.
    Delayed,
    /// They go to the parent with `accept`.
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
    for (suffix, caching) in [("", Caching::Delayed), ("-undelayed", Caching::Undelayed)] {
        cases.push(Case::new(
            format!("fork-close{suffix}"),
            "conn/s",
            Better::Higher,
            move |bed, stack| forking(bed, stack, caching, seconds, "per_second"),
        ));
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
    cases
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
    let _server = bed.serve(stack, PORT, "/usr/bin/python3", &arguments)?;
    // The client's end is the kernel's, whatever the server's is: the figure is the server's.
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

/// How often sessions went to a process or came back on the server host.
fn moves(bed: &Bed) -> Result<f64, MeasureError> {
    let text = bed.portolan(Side::Server, &["counters", "--all", "--json"])?;
    let counters: Vec<serde_json::Value> =
        serde_json::from_str(&text).map_err(|_| MeasureError::Output {
            program: "portolan",
            output: text.clone(),
        })?;
    let of = |name: &str| {
        let counter = counters.iter().find(|counter| counter["name"] == name);
        counter
            .and_then(|counter| counter["value"].as_f64())
            .unwrap_or(0.0)
    };
    Ok(of("sessions-cached") + of("sessions-flushed"))
}
