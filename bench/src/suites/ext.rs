//! Protocol extensions (PX §4, §5): round trips that a handler in the packet filter answers, beside
//! those that programs answer.

use super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7007;

static ECHO: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/echo.o"));

const FIG_5: &str =
    "Fig. 5: in the kernel at interrupt level well below its thread, and that below sockets";

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(40_000.0) as usize;
    let in_filter = move |bed: &Bed| {
        let kernel = by_programs(bed, Stack::Kernel, count)?;
        Ok(by_handler(bed, count)? / kernel)
    };
    vec![
        Case::of_portolan(
            "px-fig5-filter-udp-8",
            "of kernel",
            Better::Lower,
            in_filter,
        )
        .with_bar(0.35)
        .of_paper(FIG_5),
        Case::of_portolan("px-fig5-filter-udp-8-us", "us", Better::Lower, move |bed| {
            by_handler(bed, count)
        }),
        Case::new(
            "px-fig5-library-udp-8",
            "us",
            Better::Lower,
            move |bed, stack| by_programs(bed, stack, count),
        )
        .of_paper(FIG_5),
    ]
}

/// Both ends are programs that spin.
fn by_programs(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut server = bed.command(Side::Server, stack, "portolan-traffic");
    let arguments = ["echo", "udp", &endpoint, "--size", "8", "--spin"];
    let _server = Background::start(server.args(arguments))?;
    ping(bed, stack, count)
}

/// The server's end is a handler.
fn by_handler(bed: &Bed, count: usize) -> Result<f64, MeasureError> {
    let _owner = install(bed, "echo.o", ECHO)?;
    ping(bed, Stack::Portolan, count)
}

/// Installs an extension on the server's end; it goes with the returned.
fn install(bed: &Bed, name: &str, object: &[u8]) -> Result<Background, MeasureError> {
    let path = bed.file(name);
    std::fs::write(&path, object).map_err(|source| MeasureError::File {
        path: path.display().to_string(),
        source,
    })?;
    let mut owner = bed.own_command(Side::Server);
    owner
        .args(["ext", "install"])
        .arg(path)
        .args(["--udp", &PORT.to_string()]);
    Ok(Background::start(&mut owner)?)
}

/// The median of round trips of eight octets. The client asks until somebody answers.
fn ping(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let count = count.to_string();
    let mut client = bed.command(Side::Client, stack, "portolan-traffic");
    client.args([
        "ping", "udp", &endpoint, "--size", "8", "--spin", "--count", &count,
    ]);
    number("portolan-traffic", &run(&mut client)?, &["p50_us"])
}
