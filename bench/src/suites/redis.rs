//! redis-benchmark with 50 connections against redis-server, one core each.

use super::{Better, Case};
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 6379;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let requests = effort.scaled(100_000.0) as u64;
    let mut cases = vec![case("get-c50", "get", requests, 1)];
    if !effort.quick {
        cases.push(case("set-c50", "set", requests, 1));
        cases.push(case("get-c50-p16", "get", requests * 8, 16));
    }
    cases
}

fn case(name: &str, test: &'static str, requests: u64, pipeline: u32) -> Case {
    Case::new(name, "req/s", Better::Higher, move |bed, stack| {
        measure(bed, stack, test, requests, pipeline)
    })
}

fn measure(
    bed: &Bed,
    stack: Stack,
    test: &str,
    requests: u64,
    pipeline: u32,
) -> Result<f64, MeasureError> {
    let address = bed.server.address.to_string();
    let port = PORT.to_string();
    let _server = bed.serve(
        stack,
        PORT,
        "redis-server",
        &[
            "--bind",
            &address,
            "--port",
            &port,
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
            "--loglevel",
            "warning",
        ],
    )?;
    let output = run(bed.command(Side::Client, stack, "redis-benchmark").args([
        "-h",
        &address,
        "-p",
        &port,
        "-t",
        test,
        "-c",
        "50",
        "--csv",
        "-n",
        &requests.to_string(),
        "-P",
        &pipeline.to_string(),
    ]))?;
    rate(&output).ok_or(MeasureError::Output {
        program: "redis-benchmark",
        output,
    })
}

/// The second field of the last line: `"GET","123456.78","0.2",…`.
fn rate(csv: &str) -> Option<f64> {
    csv.lines()
        .last()?
        .split(',')
        .nth(1)?
        .trim_matches('"')
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn the_rate_is_read_from_the_last_line() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"123456.78\",\"0.2\"";
        assert_eq!(rate(csv), Some(123_456.78));
        assert_eq!(rate("Could not connect"), None);
    }
}
