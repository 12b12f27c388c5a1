//! Protocol extensions (PX §4, §5): round trips answered by a handler in the packet filter, beside
//! those answered by programs.

pub(crate) mod forward;
pub(crate) mod video;

use std::net::SocketAddr;
use std::path::PathBuf;

use super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7007;

static ECHO: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/echo.o"));
static MESSAGES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/messages.o"));
static VALUES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/values.o"));
static RALLY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rally.o"));

const FIG_5: &str =
    "Fig. 5: in the kernel at interrupt level well below its thread, and that below sockets";

const FIG_6: &str =
    "Fig. 6: half the processor's time of a server on sockets, at 15 streams that fill the network";

/// Frames of one film.
const FRAMES: f64 = 60.0;

const FIG_7: &str = "Fig. 7: a forwarder in the kernel adds far less than one that splices sockets";

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(40_000.0) as usize;
    let time = |name, measure: fn(&Bed, usize) -> Result<f64, MeasureError>| {
        Case::of_portolan(name, "us", Better::Lower, move |bed| measure(bed, count))
    };
    let mut cases = vec![
        Case::of_portolan(
            "px-fig5-filter-udp-8",
            "of kernel",
            Better::Lower,
            move |bed| Ok(by_handlers(bed, count)? / by_programs(bed, Stack::Kernel, count)?),
        )
        .with_bar(0.35)
        .of_paper(FIG_5),
        time("px-fig5-filter-udp-8-us", by_handlers),
        time("px-fig5-half-udp-8", by_handler_and_program),
        Case::of_portolan(
            "px-fig5-thread-udp-8",
            "of kernel",
            Better::Lower,
            move |bed| Ok(by_threads(bed, count / 4)? / by_sleepers(bed, count / 4)?),
        )
        .of_paper(FIG_5),
        time("px-fig5-thread-udp-8-us", |bed, count| {
            by_threads(bed, count / 4)
        }),
        Case::new(
            "px-fig5-library-udp-8",
            "us",
            Better::Lower,
            move |bed, stack| by_programs(bed, stack, count),
        )
        .of_paper(FIG_5),
    ];
    cases.extend(message_cases(count / 4));
    cases.extend(value_cases(count / 4));
    cases.extend(video_cases(effort));
    cases.extend([
        Case::of_portolan(
            "px-fig7-added-latency",
            "of proxy",
            Better::Lower,
            move |_| forward::added(count / 8),
        )
        .with_bar(0.3)
        .of_paper(FIG_7),
        Case::of_portolan("px-fig7-added-us", "us", Better::Lower, move |_| {
            forward::added_by_handler(count / 8)
        }),
    ]);
    cases
}

/// Active messages over Ethernet, whose handlers run in the filter or in a program.
fn message_cases(count: usize) -> [Case; 3] {
    let time = |name, measure: fn(&Bed, usize) -> Result<f64, MeasureError>| {
        Case::of_portolan(name, "us", Better::Lower, move |bed| measure(bed, count))
    };
    [
        Case::of_portolan(
            "px-messages-filter",
            "of program",
            Better::Lower,
            move |bed| Ok(messages_by_handler(bed, count)? / messages_by_program(bed, count)?),
        )
        .of_paper(FIG_5),
        time("px-messages-filter-us", messages_by_handler),
        time("px-messages-program-us", messages_by_program),
    ]
}

/// A key-value server: the handler in the filter, or a program on sockets. The client sleeps on a kernel socket.
fn value_cases(count: usize) -> [Case; 3] {
    [
        Case::of_portolan("px-values-filter", "of kernel", Better::Lower, move |bed| {
            Ok(values_by_handler(bed, count)? / values_by_program(bed, Stack::Kernel, count)?)
        })
        .of_paper(FIG_5),
        Case::of_portolan("px-values-filter-us", "us", Better::Lower, move |bed| {
            values_by_handler(bed, count)
        }),
        Case::new(
            "px-values-program-us",
            "us",
            Better::Lower,
            move |bed, stack| values_by_program(bed, stack, count),
        ),
    ]
}

/// Video for one to thirty streams.
fn video_cases(effort: Effort) -> Vec<Case> {
    let frames = effort.scaled(FRAMES) as u32;
    let ratio = |name, cut| {
        let measure = move |bed: &Bed| video::ratio(bed, 30, frames, cut);
        Case::of_portolan(name, "of kernel", Better::Lower, measure)
    };
    let streams: &[u16] = if effort.quick {
        &[1, 30]
    } else {
        &[1, 5, 10, 15, 20, 30]
    };
    let side_by_side = streams.iter().map(|&streams| {
        let name = format!("px-fig6-cpu-{streams}");
        Case::new(name, "% CPU", Better::Lower, move |bed, stack| {
            video::cpu(bed, stack, streams, frames)
        })
        .of_paper(FIG_6)
    });
    let ratios = [
        ratio("px-fig6-of-sockets-30", video::Cut::Fragments)
            .with_bar(0.5)
            .of_paper(FIG_6),
        ratio("px-fig6-of-segments-30", video::Cut::Datagrams).of_paper(FIG_6),
    ];
    ratios.into_iter().chain(side_by_side).collect()
}

/// Measures with handlers at both ends, as in the paper's applications.
pub(crate) fn by_handlers(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    const LOCAL_PORT: u16 = 7006;
    let _echo = install(bed, "echo.o", ECHO)?;
    // A rally does not retransmit: the other end must be ready.
    ping(bed, Stack::Kernel, 1)?;
    let object = written(bed, "rally.o", RALLY)?;
    let local = SocketAddr::new(bed.client.address, LOCAL_PORT);
    let mut owner = bed.owner_command(Side::Client);
    owner
        .arg("rally")
        .args([local, bed.endpoint(PORT)].map(|end| end.to_string()));
    owner.arg(object).args(["--count", &count.to_string()]);
    number("portolan-owner", &run(&mut owner)?, &["p50_us"])
}

/// Measures with handlers at both ends, in threads of their programs, which sleep between two datagrams.
pub(crate) fn by_threads(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    const LOCAL_PORT: u16 = 7006;
    let end = bed.endpoint(PORT).to_string();
    let mut owner = bed.owner_command(Side::Server);
    let _echo = Background::start(owner.args(["threaded", &end]))?;
    ping(bed, Stack::Kernel, 1)?;
    let local = SocketAddr::new(bed.client.address, LOCAL_PORT).to_string();
    let mut owner = bed.owner_command(Side::Client);
    owner.args(["threaded-rally", &local, &end]);
    owner.args(["--count", &count.to_string()]);
    number("portolan-owner", &run(&mut owner)?, &["p50_us"])
}

fn messages_by_handler(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let path = written(bed, "messages.o", MESSAGES)?;
    let mut owner = bed.own_command(Side::Server);
    owner.args(["ext", "install"]).arg(path);
    let _owner = Background::start(owner.args(["--ethertype", "0x88b5"]))?;
    call(bed, count)
}

fn messages_by_program(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let _station = Background::start(bed.owner_command(Side::Server).arg("station"))?;
    call(bed, count)
}

/// Calls until the station answers, then `count` times.
fn call(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let address = bed.endpoint(0).ip().to_string();
    let mut owner = bed.owner_command(Side::Client);
    owner.args(["call", &address, "--count", &count.to_string()]);
    number("portolan-owner", &run(&mut owner)?, &["p50_us"])
}

fn values_by_handler(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let path = written(bed, "values.o", VALUES)?;
    let end = bed.endpoint(PORT).to_string();
    let mut owner = bed.owner_command(Side::Server);
    let _owner = Background::start(owner.args(["values", &end]).arg(path))?;
    ask(bed, count)
}

fn values_by_program(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let end = bed.endpoint(PORT).to_string();
    let mut server = bed.command(Side::Server, stack, "portolan-owner");
    let _server = Background::start(server.args(["values-by-socket", &end]))?;
    ask(bed, count)
}

/// Asks until the server answers, then `count` times.
fn ask(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let end = bed.endpoint(PORT).to_string();
    let mut client = bed.command(Side::Client, Stack::Kernel, "portolan-owner");
    client.args(["ask", &end, "--count", &count.to_string()]);
    number("portolan-owner", &run(&mut client)?, &["p50_us"])
}

/// Measures with programs on the kernel's sockets at both ends, which sleep.
fn by_sleepers(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let end = bed.endpoint(PORT).to_string();
    let mut server = bed.command(Side::Server, Stack::Kernel, "portolan-traffic");
    let _server = Background::start(server.args(["echo", "udp", &end, "--size", "8"]))?;
    let count = count.to_string();
    let mut client = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    client.args(["ping", "udp", &end, "--size", "8", "--count", &count]);
    number("portolan-traffic", &run(&mut client)?, &["p50_us"])
}

/// Measures with programs at both ends, which spin.
fn by_programs(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut server = bed.command(Side::Server, stack, "portolan-traffic");
    let arguments = ["echo", "udp", &endpoint, "--size", "8", "--spin"];
    let _server = Background::start(server.args(arguments))?;
    ping(bed, stack, count)
}

/// Measures with a handler at the server's end.
pub(crate) fn by_handler_and_program(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let _owner = install(bed, "echo.o", ECHO)?;
    ping(bed, Stack::Portolan, count)
}

/// Installs an extension on the server's end; dropping the returned process removes it.
fn install(bed: &Bed, name: &str, object: &[u8]) -> Result<Background, MeasureError> {
    let path = written(bed, name, object)?;
    let mut owner = bed.own_command(Side::Server);
    owner
        .args(["ext", "install"])
        .arg(path)
        .args(["--udp", &PORT.to_string()]);
    Ok(Background::start(&mut owner)?)
}

fn written(bed: &Bed, name: &str, object: &[u8]) -> Result<PathBuf, MeasureError> {
    let path = bed.file(name);
    match std::fs::write(&path, object) {
        Ok(()) => Ok(path),
        Err(source) => Err(MeasureError::File {
            path: path.display().to_string(),
            source,
        }),
    }
}

/// Returns the median of round trips of eight bytes. The client retries until the server answers.
fn ping(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let count = count.to_string();
    let mut client = bed.command(Side::Client, stack, "portolan-traffic");
    client.args([
        "ping", "udp", &endpoint, "--size", "8", "--spin", "--count", &count,
    ]);
    number("portolan-traffic", &run(&mut client)?, &["p50_us"])
}
