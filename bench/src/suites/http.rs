//! wrk with 64 connections against one nginx worker, one core each, with and without keep-alive.

use std::fs;

use super::{Better, Case};
use crate::bed::{Bed, Side};
use crate::process::run;
use crate::{Effort, MeasureError};

const PORT: u16 = 8080;

/// Octets of the page.
const PAGE: usize = 612;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(2.0);
    let mut cases = vec![case("wrk-c64", seconds, &[])];
    if !effort.quick {
        cases.push(case("wrk-close", seconds, &["-H", "Connection: close"]));
    }
    cases
}

fn case(name: &str, seconds: f64, options: &'static [&'static str]) -> Case {
    // wrk takes whole seconds.
    let duration = format!("{}s", seconds.ceil());
    Case::new(name, "req/s", Better::Higher, move |bed, stack| {
        let config = configure(bed)?;
        let _server = bed.serve(stack, PORT, "nginx", &["-c", &config])?;
        let url = format!("http://{}/", bed.endpoint(PORT));
        let output = run(bed
            .command(Side::Client, stack, "wrk")
            .args(["-t", "1", "-c", "64", "-d", &duration])
            .args(options)
            .arg(&url))?;
        rate(&output).ok_or(MeasureError::Output {
            program: "wrk",
            output,
        })
    })
}

/// Writes nginx's page and configuration, one process in the foreground without logs.
fn configure(bed: &Bed) -> Result<String, MeasureError> {
    let root = bed.file("www");
    let config = bed.file("nginx.conf");
    let text = format!(
        "daemon off; master_process off; pid {pid}; error_log stderr crit;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 1000000000;\n\
         server {{ listen {endpoint}; root {root}; }} }}\n",
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

/// wrk's line `Requests/sec:  123456.78`.
fn rate(output: &str) -> Option<f64> {
    output.lines().find_map(|line| {
        line.trim()
            .strip_prefix("Requests/sec:")?
            .trim()
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn the_rate_is_read_from_its_line() {
        assert_eq!(
            rate("Running 2s test\nRequests/sec:  1234.50\nTransfer/sec: 1MB"),
            Some(1234.5)
        );
        assert_eq!(rate("unable to connect"), None);
    }
}
