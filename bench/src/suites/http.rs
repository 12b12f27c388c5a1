//! wrk with 64 connections, and with few, against nginx, with and without keep-alive.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use super::{Better, Case};
use crate::bed::{Bed, Side, Stack};
use crate::figure::{Latency, Sample};
use crate::process::{Background, run};
use crate::services::file_error;
use crate::{Effort, MeasureError};

const PORT: u16 = 8080;

/// Bytes of the page.
const PAGE: usize = 612;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(2.0);
    let load = |connections, options| Load {
        seconds,
        threads: "1",
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
pub(super) struct Load {
    pub(super) seconds: f64,
    pub(super) threads: &'static str,
    pub(super) connections: &'static str,
    pub(super) options: &'static [&'static str],
}

/// How nginx runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Nginx {
    OneProcess,
    /// The same; on Portolan it performs its handshakes itself from the start.
    Delegated,
    /// As distributions configure it, with two workers.
    MasterAndWorkers,
}

impl Nginx {
    fn processes(self) -> &'static str {
        match self {
            Nginx::OneProcess | Nginx::Delegated => "master_process off;",
            Nginx::MasterAndWorkers => "user root; worker_processes 2;",
        }
    }
}

fn case(name: &str, load: Load, nginx: Nginx) -> Case {
    Case::new(name, "req/s", Better::Higher, move |bed, stack| {
        let _server = serve_page(bed, stack, nginx, bed.endpoint(PORT))?;
        let url = format!("http://{}/", bed.endpoint(PORT));
        let output = wrk(bed, stack, &load, &url)?;
        sample(&output).ok_or(MeasureError::Output {
            program: "wrk",
            output,
        })
    })
}

/// Runs wrk and returns its output.
pub(super) fn wrk(bed: &Bed, stack: Stack, load: &Load, url: &str) -> Result<String, MeasureError> {
    Ok(run(&mut wrk_command(bed, stack, load, url))?)
}

pub(super) fn wrk_command(bed: &Bed, stack: Stack, load: &Load, url: &str) -> Command {
    let mut command = bed.command(Side::Client, stack, "wrk");
    command
        .args(["-t", load.threads, "-c", load.connections])
        // wrk accepts whole seconds only.
        .args(["-d", &format!("{}s", load.seconds.ceil()), "--latency"])
        .args(load.options)
        .arg(url);
    command
}

/// What nginx serves.
pub(super) struct Site<'a> {
    pub(super) directives: &'a str,
    pub(super) endpoint: SocketAddr,
    pub(super) root: &'a Path,
}

/// Starts an nginx with a small page.
pub(super) fn serve_page(
    bed: &Bed,
    stack: Stack,
    nginx: Nginx,
    endpoint: SocketAddr,
) -> Result<Background, MeasureError> {
    let root = bed.file("www");
    fs::create_dir_all(&root)
        .and_then(|()| fs::write(root.join("index.html"), "p".repeat(PAGE)))
        .map_err(|source| file_error(&root, source))?;
    let site = Site {
        directives: "",
        endpoint,
        root: &root,
    };
    serve(bed, stack, nginx, &site)
}

/// Starts an nginx.
pub(super) fn serve(
    bed: &Bed,
    stack: Stack,
    nginx: Nginx,
    site: &Site,
) -> Result<Background, MeasureError> {
    let config = configure(bed, nginx, site)?;
    let (port, words) = (site.endpoint.port(), ["-c", config.as_str()]);
    Ok(match nginx {
        Nginx::Delegated => bed.serve_delegated(stack, port, "nginx", &words)?,
        Nginx::OneProcess | Nginx::MasterAndWorkers => bed.serve(stack, port, "nginx", &words)?,
    })
}

/// Writes a configuration of nginx in the foreground, without logs.
fn configure(bed: &Bed, nginx: Nginx, site: &Site) -> Result<String, MeasureError> {
    let config = bed.file("nginx.conf");
    let text = format!(
        "daemon off; {processes} pid {pid}; error_log stderr crit;\n\
         events {{ worker_connections 2048; }}\n\
         http {{ access_log off; keepalive_requests 1000000000;\n\
         server {{ listen {endpoint}; root {root}; {directives} }} }}\n",
        processes = nginx.processes(),
        pid = bed.file("nginx.pid").display(),
        directives = site.directives,
        endpoint = site.endpoint,
        root = site.root.display(),
    );
    match fs::write(&config, text) {
        Ok(()) => Ok(config.display().to_string()),
        Err(source) => Err(file_error(&config, source)),
    }
}

/// Parses wrk's lines `Requests/sec:  123456.78`, `50%  512.00us` and `99%  1.20ms`.
pub(super) fn sample(output: &str) -> Option<Sample> {
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
