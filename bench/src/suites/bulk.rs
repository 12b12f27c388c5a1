//! One-way transfers: ttcp-like with our own traffic program, and iperf3. Rates count the bytes that the
//! receiver got.

use super::{Better, Case, Reach, number};
use crate::bed::{Bed, Stack};
use crate::process::run;
use crate::{Effort, MeasureError};

const TTCP_PORT: u16 = 5001;
const IPERF_PORT: u16 = 5201;
const UNIT: &str = "Gb/s";

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    over(Reach::Wire, effort)
}

/// Cases between two programs of one host.
pub(super) fn local_cases(effort: Effort) -> Vec<Case> {
    over(Reach::Host, effort)
}

fn over(reach: Reach, effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(2.0);
    let name = format!("{}ttcp-1", reach.prefix());
    let mut cases = vec![
        Case::new(name, UNIT, Better::Higher, move |bed, stack| {
            ttcp(bed, stack, (reach, seconds))
        }),
        iperf("iperf3-1", (reach, seconds), &["-P", "1"]),
    ];
    if !effort.quick {
        cases.push(iperf("iperf3-4", (reach, seconds), &["-P", "4"]));
        cases.push(iperf(
            "iperf3-1-reverse",
            (reach, seconds),
            &["-P", "1", "-R"],
        ));
    }
    cases
}

fn ttcp(bed: &Bed, stack: Stack, (reach, seconds): (Reach, f64)) -> Result<f64, MeasureError> {
    let endpoint = reach.endpoint(bed, TTCP_PORT).to_string();
    let _sink = bed.serve(stack, TTCP_PORT, "portolan-traffic", &["sink", &endpoint])?;
    let seconds = seconds.to_string();
    reach.traffic(
        bed,
        stack,
        &["bulk", &endpoint, "--seconds", &seconds],
        "gigabits_per_second",
    )
}

fn iperf(name: &str, (reach, seconds): (Reach, f64), options: &'static [&'static str]) -> Case {
    let name = format!("{}{name}", reach.prefix());
    // iperf3 accepts whole seconds only.
    let seconds = seconds.ceil().to_string();
    Case::new(name, UNIT, Better::Higher, move |bed, stack| {
        let address = reach.endpoint(bed, IPERF_PORT).ip().to_string();
        let port = IPERF_PORT.to_string();
        let _server = bed.serve(
            stack,
            IPERF_PORT,
            "iperf3",
            &["-s", "-B", &address, "-p", &port],
        )?;
        let output = run(reach
            .client(bed, stack, "iperf3")
            .args(["-c", &address, "-p", &port, "-t", &seconds, "-J"])
            .args(options))?;
        let bits = number(
            "iperf3",
            &output,
            &["end", "sum_received", "bits_per_second"],
        )?;
        Ok(bits / 1e9)
    })
}
