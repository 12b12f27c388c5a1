//! The time of a message, layer by layer (MB Table 4, MS Tables III and IV, BR Tables 1 and 2): small and large
//! messages, sent and received by one program. The library sums up the layers (`PORTOLAN_LAYERS`), less the cost of
//! reading the clock, but including its effect on caches.

use std::fs;

use portolan::layers::Layer;
use portolan_sys::probes::read_totals;

use super::super::{Better, Case};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7430;
const TRAFFIC: &str = "portolan-traffic";

/// Protocols and sizes; the large messages fill a frame.
const MESSAGES: [(&str, usize); 4] = [("tcp", 1), ("tcp", 1460), ("udp", 1), ("udp", 1472)];

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(10_000.0) as usize;
    let messages = if effort.quick {
        &MESSAGES[..1]
    } else {
        &MESSAGES[..]
    };
    let mut cases = Vec::new();
    for &(protocol, size) in messages {
        for (layer, name) in Layer::ALL {
            // Neither the program's own work nor its waiting is the cost of a layer.
            if matches!(layer, Layer::Program | Layer::Sleep) {
                continue;
            }
            cases.push(Case::of_portolan(
                format!("mb-table4-{protocol}-{size}-{name}"),
                "ns",
                Better::Lower,
                move |bed| measure(bed, (protocol, size), count, layer),
            ));
        }
    }
    cases
}

/// Returns the nanoseconds in the layer per round trip, that is one message sent and one received.
fn measure(
    bed: &Bed,
    (protocol, size): (&str, usize),
    count: usize,
    layer: Layer,
) -> Result<f64, MeasureError> {
    let to = bed.endpoint(PORT).to_string();
    let (size, times) = (size.to_string(), count.to_string());
    let arguments = ["echo", protocol, &to, "--size", &size];
    let _echo = match protocol {
        "tcp" => bed.serve(Stack::Portolan, PORT, TRAFFIC, &arguments)?,
        _ => {
            let mut command = bed.command(Side::Server, Stack::Portolan, TRAFFIC);
            let echo = Background::start(command.args(arguments))?;
            std::thread::sleep(super::SETTLE);
            echo
        }
    };
    let file = bed.file("layers");
    let mut ping = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
    ping.env("PORTOLAN_LAYERS", &file);
    run(ping.args(["ping", protocol, &to, "--size", &size, "--count", &times]))?;
    let bytes = fs::read(&file).map_err(|source| MeasureError::File {
        path: file.display().to_string(),
        source,
    })?;
    let (nanoseconds, _) = read_totals(&bytes)
        .get(layer as usize)
        .copied()
        .unwrap_or_default();
    Ok(nanoseconds as f64 / count as f64)
}
