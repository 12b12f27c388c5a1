//! The precomputed header filter (BR §3.2): the share of segments on the fast path for programs on the link, and the
//! cost of a segment on the standard path, beside the rows of the suite `engine`, which measure the fast path.

use super::super::conns::counted;
use super::super::engine::{Way, instructions};
use super::super::{Better, Case, Reach};
use crate::bed::{Bed, Stack};
use crate::{Effort, MeasureError};

const PORT: u16 = 7330;

/// Number of segments whose instructions are counted, in order, and their size in bytes.
const SEGMENTS: usize = 10_000;
const SIZE: usize = 1448;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = (effort.scaled(20_000.0) as usize).to_string();
    let seconds = effort.scaled(2.0).to_string();
    let mut cases = vec![
        share("br-fast-share-rr", "echo", move |bed, to| {
            let ping = ["ping", "tcp", to, "--count", &count];
            Reach::Wire.traffic(bed, Stack::Portolan, &ping, "p50_us")
        }),
        share("br-fast-share-bulk", "sink", move |bed, to| {
            let bulk = ["bulk", to, "--seconds", &seconds];
            Reach::Wire.traffic(bed, Stack::Portolan, &bulk, "gigabits_per_second")
        }),
    ];
    for (step, function, field) in [
        ("receive", "count_receive", "received"),
        ("ack", "count_acknowledgement", "acknowledgements"),
    ] {
        cases.push(Case::of_portolan(
            format!("br-standard-{step}-{SIZE}"),
            "instr",
            Better::Lower,
            move |bed| instructions(bed, (SIZE, SEGMENTS), Way::Standard, (function, field)),
        ));
    }
    for size in [1, SIZE] {
        for (name, path) in [("fast", Way::Fast), ("standard", Way::Standard)] {
            let counted = ("count_datagram", "datagrams");
            cases.push(Case::of_portolan(
                format!("br-{name}-datagram-{size}"),
                "instr",
                Better::Lower,
                move |bed| instructions(bed, (size, SEGMENTS), path, counted),
            ));
        }
    }
    cases
}

/// Returns the share of segments on the fast path among all that both ends receive.
fn share(
    name: &str,
    service: &'static str,
    load: impl Fn(&Bed, &str) -> Result<f64, MeasureError> + 'static,
) -> Case {
    let measure = move |bed: &Bed| {
        let to = bed.endpoint(PORT).to_string();
        let arguments = match service {
            "echo" => vec!["echo", "tcp", &to],
            _ => vec![service, &to],
        };
        let _service = bed.serve(Stack::Portolan, PORT, "portolan-traffic", &arguments)?;
        let before = taken(bed)?;
        load(bed, &to)?;
        let after = taken(bed)?;
        let [fast, standard] = [0, 1].map(|path| after[path] - before[path]);
        Ok(fast / (fast + standard))
    };
    Case::of_portolan(name, "", Better::Higher, measure).with_bar(0.95)
}

/// Returns the segments on the fast and on the standard path so far.
pub(crate) fn taken(bed: &Bed) -> Result<[f64; 2], MeasureError> {
    Ok([
        counted(bed, "headers_expected")?,
        counted(bed, "headers_taken_apart")?,
    ])
}
