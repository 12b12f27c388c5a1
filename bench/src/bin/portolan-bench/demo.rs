//! `portolan demo`: unmodified programs on Portolan between two namespaces, step by step.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, anyhow};
use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::{Background, run as run_to_end};
use portolan_bench::suites::{Suite, redis};
use portolan_bench::{Effort, select};

use crate::exit::{Failure, print};
use crate::figures::{Sink, measure, require_root};

const HTTP_PORT: u16 = 8080;
const IPERF_PORT: u16 = 5201;
const KERNEL_PORT: u16 = 9090;

/// Duration of the transfer that `portolan ss` shows.
const TRANSFER_S: &str = "3";

/// Suites that are short enough for a demonstration.
const SUITES: [Suite; 5] = [
    Suite::Rtt,
    Suite::Bulk,
    Suite::Redis,
    Suite::Http,
    Suite::Conns,
];

/// Runs of each figure.
const RUNS: usize = 5;

pub(crate) fn run() -> Result<(), Failure> {
    require_root("demo")?;
    step("two hosts, one veth wire, a Portolan server on each")?;
    let bed = Bed::new().context("cannot make the bed")?;
    for side in [Side::Client, Side::Server] {
        let host = bed.host(side);
        print(format!("  the {side} host has {}", host.address))?;
        show(&bed.portolan(side, &["status"])?)?;
    }
    let capture = capture(&bed)?;
    redis(&bed)?;
    web(&bed)?;
    transfer(&bed)?;
    beside(&bed)?;
    wire(capture)?;
    step("the same programs on both stacks, measured in turns")?;
    let effort = Effort { quick: true };
    let cases = select(&SUITES, "", effort);
    let (_, complete) = measure(&bed, &cases, RUNS, Sink::Output)?;
    if complete {
        Ok(())
    } else {
        Err(Failure::Shown)
    }
}

fn redis(bed: &Bed) -> Result<(), Failure> {
    step("redis-server and redis-cli")?;
    let (address, port) = (bed.server.address.to_string(), redis::PORT.to_string());
    let _server = redis::serve(bed, Stack::Portolan)?;
    for words in [
        &["SET", "greeting", "hello over Portolan"][..],
        &["GET", "greeting"],
    ] {
        let mut command = bed.command(Side::Client, Stack::Portolan, "redis-cli");
        command.args(["-h", &address, "-p", &port]).args(words);
        print(format!("  redis-cli {}", words.join(" ")))?;
        show(&run_to_end(&mut command)?)?;
    }
    Ok(())
}

fn web(bed: &Bed) -> Result<(), Failure> {
    step("nginx with four workers, and curl")?;
    let config = bed.file("demo-nginx.conf");
    let text = format!(
        "daemon off; worker_processes 4; pid {}; error_log stderr crit;\n\
         events {{}}\n\
         http {{ access_log off; server {{ listen {}; location / {{\n\
         return 200 'hello from $hostname, worker $pid\\n'; }} }} }}\n",
        bed.file("demo-nginx.pid").display(),
        bed.endpoint(HTTP_PORT),
    );
    fs::write(&config, text).context("cannot write nginx's configuration")?;
    let config = config.display().to_string();
    let _server = bed.serve(Stack::Portolan, HTTP_PORT, "nginx", &["-c", &config])?;
    let url = format!("http://{}/", bed.endpoint(HTTP_PORT));
    print(format!("  curl {url}"))?;
    let mut curl = bed.command(Side::Client, Stack::Portolan, "curl");
    show(&run_to_end(curl.args([
        "--silent",
        "--show-error",
        "--max-time",
        "10",
        &url,
    ]))?)
}

/// Lists the sessions while iperf3 transfers data.
fn transfer(bed: &Bed) -> Result<(), Failure> {
    step("iperf3, and what `portolan ss -i` shows meanwhile")?;
    let (address, port) = (bed.server.address.to_string(), IPERF_PORT.to_string());
    let _server = bed.serve(
        Stack::Portolan,
        IPERF_PORT,
        "iperf3",
        &["-s", "-B", &address, "-p", &port],
    )?;
    let mut client = bed.command(Side::Client, Stack::Portolan, "iperf3");
    client.args(["-c", &address, "-p", &port, "-t", TRANSFER_S, "-f", "g"]);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| run_to_end(&mut client));
        std::thread::sleep(Duration::from_secs(1));
        for side in [Side::Client, Side::Server] {
            print(format!("  on the {side} host:"))?;
            show(&bed.portolan(side, &["ss", "-i"])?)?;
        }
        let report = client
            .join()
            .map_err(|_| anyhow!("iperf3 was not waited for"))??;
        let summary: Vec<_> = report
            .lines()
            .filter(|line| line.contains("sender") || line.contains("receiver"))
            .collect();
        show(&summary.join("\n"))
    })
}

/// Shows that the kernel keeps serving its own sockets on the same address.
fn beside(bed: &Bed) -> Result<(), Failure> {
    step("a program on the kernel's stack, on the same address, from a client on Portolan")?;
    let endpoint = bed.endpoint(KERNEL_PORT).to_string();
    let _server = bed.serve(
        Stack::Kernel,
        KERNEL_PORT,
        "portolan-traffic",
        &["greet", &endpoint],
    )?;
    let mut client = bed.command(Side::Client, Stack::Portolan, "portolan-traffic");
    show(&run_to_end(client.args([
        "connect",
        &endpoint,
        "--count",
        "100",
        "--seconds",
        "5",
    ]))?)
}

fn capture(bed: &Bed) -> Result<Background, Failure> {
    let mut command = bed.command(Side::Client, Stack::Kernel, "tcpdump");
    command
        .args([
            "-i",
            INTERFACE,
            "-n",
            "-q",
            "-l",
            "--immediate-mode",
            "port",
            "6379",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    Ok(Background::start_with_output(&mut command)?)
}

fn wire(capture: Background) -> Result<(), Failure> {
    step("tcpdump on the wire saw, of redis alone")?;
    let text = capture.finish();
    let lines: Vec<_> = text.lines().collect();
    show(&lines[..lines.len().min(4)].join("\n"))?;
    print(format!("  … {} packets in all", lines.len()))
}

fn step(title: &str) -> Result<(), Failure> {
    print(format!("\n== {title}"))
}

fn show(text: &str) -> Result<(), Failure> {
    text.lines()
        .try_for_each(|line| print(format!("    {line}")))
}
