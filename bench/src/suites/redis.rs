//! redis-benchmark with 50 connections, and with few, against redis-server, one core each.

use super::{Better, Case};
use crate::bed::{Bed, ServeError, Side, Stack};
use crate::figure::{Latency, Sample};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

pub const PORT: u16 = 6379;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let requests = effort.scaled(100_000.0) as u64;
    let get = Load {
        test: "get",
        connections: 50,
        pipeline: 1,
        requests,
    };
    let mut cases = vec![case("get-c50", get)];
    if !effort.quick {
        cases.push(case("set-c50", Load { test: "set", ..get }));
        let pipelined = Load {
            pipeline: 16,
            requests: requests * 8,
            ..get
        };
        cases.push(case("get-c50-p16", pipelined));
        for (name, connections) in [("get-c1", 1), ("get-c4", 4)] {
            let few = Load {
                connections,
                requests: requests / 2,
                ..get
            };
            cases.push(case(name, few));
        }
    }
    cases
}

/// Parameters of redis-benchmark.
#[derive(Clone, Copy)]
struct Load {
    test: &'static str,
    connections: u32,
    pipeline: u32,
    requests: u64,
}

fn case(name: &str, load: Load) -> Case {
    Case::new(name, "req/s", Better::Higher, move |bed, stack| {
        measure(bed, stack, load)
    })
}

/// Starts a server that writes nothing to disk.
pub fn serve(bed: &Bed, stack: Stack) -> Result<Background, ServeError> {
    let (address, port) = (bed.server.address.to_string(), PORT.to_string());
    let arguments = [
        &[
            "--bind",
            &address,
            "--port",
            &port,
            "--protected-mode",
            "no",
        ][..],
        &["--save", "", "--appendonly", "no", "--loglevel", "warning"],
    ];
    bed.serve(stack, PORT, "redis-server", &arguments.concat())
}

fn measure(bed: &Bed, stack: Stack, load: Load) -> Result<Sample, MeasureError> {
    let address = bed.server.address.to_string();
    let port = PORT.to_string();
    let _server = serve(bed, stack)?;
    let output = run(bed.command(Side::Client, stack, "redis-benchmark").args([
        "-h",
        &address,
        "-p",
        &port,
        "-t",
        load.test,
        "-c",
        &load.connections.to_string(),
        "--csv",
        "-n",
        &load.requests.to_string(),
        "-P",
        &load.pipeline.to_string(),
    ]))?;
    sample(&output).ok_or(MeasureError::Output {
        program: "redis-benchmark",
        output,
    })
}

/// Parses the last line: the name of the test, requests per second, and in milliseconds the mean, the minimum,
/// the 50th, 95th and 99th percentile and the maximum.
fn sample(csv: &str) -> Option<Sample> {
    let fields: Vec<f64> = csv
        .lines()
        .last()?
        .split(',')
        .skip(1)
        .map(|field| field.trim_matches('"').parse())
        .collect::<Result<_, _>>()
        .ok()?;
    let &[rate, _mean, _minimum, p50_ms, _p95, p99_ms, _maximum] = fields.as_slice() else {
        return None;
    };
    Some(Sample {
        value: rate,
        latency: Some(Latency {
            p50_us: p50_ms * 1000.0,
            p99_us: p99_ms * 1000.0,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn rate_and_percentiles_are_read_from_the_last_line() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\
            \"GET\",\"123456.78\",\"0.200\",\"0.048\",\"0.191\",\"0.303\",\"0.415\",\"1.503\"";
        let sample = sample(csv).unwrap();
        assert_eq!(sample.value, 123_456.78);
        let latency = sample.latency.unwrap();
        assert_eq!((latency.p50_us, latency.p99_us), (191.0, 415.0));
    }

    #[test]
    fn an_error_is_no_sample() {
        assert_eq!(sample("Could not connect"), None);
        assert_eq!(sample("\"GET\",\"1.0\""), None);
    }
}
