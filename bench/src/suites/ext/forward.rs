//! Fig. 7: the time that a forwarder adds to a TCP round trip, as a handler in the filter and as a program
//! that joins two connections. Three hosts on a switch: a client, the forwarder, and the server,
//! the outer two on the kernel's stack.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_netns::Namespace;

use super::{number, written};
use crate::MeasureError;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};

const ECHO_PORT: u16 = 7021;
const HANDLER_PORT: u16 = 7022;
const PROXY_PORT: u16 = 7023;

static FORWARD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/forward.o"));

/// Time until owners and listeners are ready whose readiness cannot be observed.
const SETTLED: Duration = Duration::from_millis(500);

/// Median round trips in microseconds.
pub(crate) struct Times {
    pub(crate) direct: f64,
    pub(crate) by_handler: f64,
    pub(crate) by_proxy: f64,
}

/// Returns the time that the handler adds, divided by the time that the proxy adds.
pub(super) fn added(count: usize) -> Result<f64, MeasureError> {
    let times = measure(1, count)?;
    Ok((times.by_handler - times.direct) / (times.by_proxy - times.direct))
}

/// Returns the time that the handler adds, in microseconds.
pub(super) fn added_by_handler(count: usize) -> Result<f64, MeasureError> {
    let times = measure(1, count)?;
    Ok(times.by_handler - times.direct)
}

/// Measures with messages of `size` bytes.
pub(crate) fn measure(size: usize, count: usize) -> Result<Times, MeasureError> {
    let bed = Bed::switched()?;
    let guest = bed.guest(9);
    let echo = bed.endpoint(ECHO_PORT);
    let end = echo.to_string();
    let echoing = ["echo", "tcp", &end, "--size", &size.to_string()];
    let _echo = bed.serve(Stack::Kernel, ECHO_PORT, "portolan-traffic", &echoing)?;
    let _forwarders = [handler(&bed, echo)?, proxy(&bed, echo)?];
    std::thread::sleep(SETTLED);
    let by = |port| SocketAddr::new(bed.client.address, port);
    Ok(Times {
        direct: ping(&bed, &guest, echo, [size, count])?,
        by_handler: ping(&bed, &guest, by(HANDLER_PORT), [size, count])?,
        by_proxy: ping(&bed, &guest, by(PROXY_PORT), [size, count])?,
    })
}

fn handler(bed: &Bed, echo: SocketAddr) -> Result<Background, MeasureError> {
    let object = written(bed, "forward.o", FORWARD)?;
    let front = SocketAddr::new(bed.client.address, HANDLER_PORT);
    let mut owner = bed.owner_command(Side::Client);
    owner
        .args(["forward", "tcp"])
        .args([front, echo].map(|end| end.to_string()));
    Ok(Background::start(owner.arg(object))?)
}

fn proxy(bed: &Bed, echo: SocketAddr) -> Result<Background, MeasureError> {
    let front = SocketAddr::new(bed.client.address, PROXY_PORT);
    let mut relay = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    relay
        .arg("relay")
        .args([front, echo].map(|end| end.to_string()));
    Ok(Background::start(relay.stdout(Stdio::null()))?)
}

fn ping(
    bed: &Bed,
    guest: &Namespace,
    to: SocketAddr,
    [size, count]: [usize; 2],
) -> Result<f64, MeasureError> {
    let mut client: Command = guest.exec(&bed.tools().traffic);
    client.args([
        "ping",
        "tcp",
        &to.to_string(),
        "--size",
        &size.to_string(),
        "--count",
        &count.to_string(),
    ]);
    number("portolan-traffic", &run(&mut client)?, &["p50_us"])
}
