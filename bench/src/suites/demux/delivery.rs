//! The ways in which packets reach a program (MB §4.1), beside the kernel's own stack (MB Table 2).

use super::super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7410;
const TRAFFIC: &str = "portolan-traffic";

/// With what the paper measured on a DECstation 5000/200, whose kernel had 1070 KB/s and 1.40 ms.
const FORMS: [(&str, &str, &str); 3] = [
    ("server", "740 KB/s", "3.64 ms"),
    ("ipc", "910 KB/s", "1.69 ms"),
    ("shm", "1076 KB/s", "1.82 ms"),
];

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(10_000.0) as usize;
    let seconds = effort.scaled(2.0);
    let of_form = |(form, rate, time): (&'static str, _, _)| {
        let throughput = Case::new(
            format!("mb-table2-{form}-throughput"),
            "Gb/s",
            Better::Higher,
            move |bed, stack| bulk(bed, stack, form, seconds),
        );
        let latency = Case::new(
            format!("mb-table2-{form}-latency"),
            "us",
            Better::Lower,
            move |bed, stack| ping(bed, stack, form, count),
        );
        [throughput.of_paper(rate), latency.of_paper(time)]
    };
    FORMS.into_iter().flat_map(of_form).collect()
}

fn bulk(bed: &Bed, stack: Stack, form: &str, seconds: f64) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let _sink = serve(bed, stack, form, &["sink", &endpoint])?;
    let seconds = seconds.to_string();
    let arguments = ["bulk", &endpoint, "--seconds", &seconds];
    client(bed, stack, form, &arguments, "gigabits_per_second")
}

fn ping(bed: &Bed, stack: Stack, form: &str, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let _echo = serve(bed, stack, form, &["echo", "tcp", &endpoint])?;
    let count = count.to_string();
    let arguments = ["ping", "tcp", &endpoint, "--count", &count];
    client(bed, stack, form, &arguments, "p50_us")
}

fn serve(
    bed: &Bed,
    stack: Stack,
    form: &str,
    arguments: &[&str],
) -> Result<Background, MeasureError> {
    let mut command = bed.command(Side::Server, stack, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form).args(arguments);
    command.stdout(std::process::Stdio::null());
    Ok(bed.serve_command(PORT, TRAFFIC, &mut command)?)
}

fn client(
    bed: &Bed,
    stack: Stack,
    form: &str,
    arguments: &[&str],
    field: &str,
) -> Result<f64, MeasureError> {
    let mut command = bed.command(Side::Client, stack, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form).args(arguments);
    number(TRAFFIC, &run(&mut command)?, &[field])
}
