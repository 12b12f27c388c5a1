//! wrk with 64 connections, and with few, against nginx, with and without keep-alive.

use std::fs;

use super::{Better, Case};
use crate::bed::{Bed, Side};
use crate::figure::{Latency, Sample};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 8080;

/// Bytes of the page.
const PAGE: usize = 612;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(2.0);
    let load = |connections, options| Load {
        seconds,
        connections,
        options,
    };
    let mut cases = vec![case("wrk-c64", load("64", &[]), Nginx::OneProcess)];
    if !effort.quick {
        let close = load("64", &["-H", "Connection: close"]);
        cases.push(case("wrk-close", close, Nginx::OneProcess));
        cases.push(case("wrk-close-delegated", close, Nginx::Delegated));
        cases.push(case("wrk-close-workers", close, Nginx::MasterAndWorkers));
        cases.push(case("wrk-c1", load("1", &[]), Nginx::OneProcess));
        cases.push(case("wrk-c4", load("4", &[]), Nginx::OneProcess));
    }
    cases
}

/// What wrk does.
#[derive(Clone, Copy)]
struct Load {
    seconds: f64,
    connections: &'static str,
    options: &'static [&'static str],
}

/// How nginx runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Nginx {
    OneProcess,
    /// The same; on Portolan it performs its handshakes itself from the start.
    Delegated,
    /// As distributions configure it, with two workers.
    MasterAndWorkers,
}

impl Nginx {
    fn directives(self) -> &'static str {
        match self {
            Nginx::OneProcess | Nginx::Delegated => "master_process off;",
            Nginx::MasterAndWorkers => "user root; worker_processes 2;",
        }
    }
}

fn case(name: &str, load: Load, nginx: Nginx) -> Case {
    // wrk accepts whole seconds only.
    let duration = format!("{}s", load.seconds.ceil());
    Case::new(name, "req/s", Better::Higher, move |bed, stack| {
        let config = configure(bed, nginx)?;
        let words = ["-c", config.as_str()];
        let _server = match nginx {
            Nginx::Delegated => bed.serve_delegated(stack, PORT, "nginx", &words)?,
            Nginx::OneProcess | Nginx::MasterAndWorkers => {
                bed.serve(stack, PORT, "nginx", &words)?
            }
        };
        let url = format!("http://{}/", bed.endpoint(PORT));
        let output = run(bed
            .command(Side::Client, stack, "wrk")
            .args([
                "-t",
                "1",
                "-c",
                load.connections,
                "-d",
                &duration,
                "--latency",
            ])
            .args(load.options)
            .arg(&url))?;
        sample(&output).ok_or(MeasureError::Output {
            program: "wrk",
            output,
        })
    })
}

/// Writes nginx's page and a configuration in the foreground, without logs.
fn configure(bed: &Bed, nginx: Nginx) -> Result<String, MeasureError> {
    let root = bed.file("www");
    let config = bed.file("nginx.conf");
    let text = format!(
        "daemon off; {directives} pid {pid}; error_log stderr crit;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 1000000000;\n\
         server {{ listen {endpoint}; root {root}; }} }}\n",
        directives = nginx.directives(),
        pid = bed.file("nginx.pid").display(),
        endpoint = bed.endpoint(PORT),
        root = root.display(),
    );
    let path = config.display().to_string();
    fs::create_dir_all(&root)
        .and_then(|()| fs::write(root.join("index.html"), "p".repeat(PAGE)))
        .and_then(|()| fs::write(&config, text))
        .map_err(|source| MeasureError::File {
            path: path.clone(),
            source,
        })?;
    Ok(path)
}

/// Parses wrk's lines `Requests/sec:  123456.78`, `50%  512.00us` and `99%  1.20ms`.
fn sample(output: &str) -> Option<Sample> {
    let field = |name| {
        let line = output.lines().map(str::trim);
        line.filter_map(|line| line.strip_prefix(name)).next()
    };
    Some(Sample {
        value: field("Requests/sec:")?.trim().parse().ok()?,
        latency: Some(Latency {
            p50_us: microseconds(field("50%")?)?,
            p99_us: microseconds(field("99%")?)?,
        }),
    })
}

/// Parses a time as wrk prints it.
fn microseconds(text: &str) -> Option<f64> {
    let text = text.trim();
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    units.iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(number * factor)
    })
}

#[cfg(test)]
mod tests {
    use super::sample;

    #[test]
    fn rate_and_percentiles_are_read_from_their_lines() {
        let output = "Running 2s test\n  Latency Distribution\n     50%  512.00us\n     99%    1.20ms\n\
            Requests/sec:  1234.50\nTransfer/sec: 1MB";
        let sample = sample(output).unwrap();
        assert_eq!(sample.value, 1234.5);
        let latency = sample.latency.unwrap();
        assert_eq!((latency.p50_us, latency.p99_us), (512.0, 1200.0));
    }

    #[test]
    fn an_error_is_no_sample() {
        assert_eq!(sample("unable to connect"), None);
        assert_eq!(sample("Requests/sec:  1234.50"), None);
    }
}
