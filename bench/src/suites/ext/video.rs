//! Fig. 6: the CPU time of a video server that sends 30 frames per second to each of its clients: one that hands each
//! frame over once, for an extension to send to all clients, beside one that sends to each.

use std::net::SocketAddr;

use super::{number, written};
use crate::MeasureError;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};

const AUDIENCE_PORT: u16 = 7200;
const SERVER_PORT: u16 = 7199;

/// Bytes per datagram, of which each fits the link's MTU.
const SEGMENT: &str = "1400";

static VIDEO: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/video.o"));

/// How the server on kernel sockets sends a frame.
#[derive(Clone, Copy)]
pub(crate) enum Cut {
    /// As one datagram, which the kernel fragments.
    Fragments,
    /// As datagrams that the device segments (`UDP_SEGMENT`), as the extension's owner does.
    Datagrams,
}

/// Returns the CPU time in percent of a processor.
pub(super) fn cpu(bed: &Bed, stack: Stack, streams: u16, frames: u32) -> Result<f64, MeasureError> {
    match stack {
        Stack::Kernel => by_sockets(bed, streams, frames, Cut::Fragments),
        Stack::Portolan => by_extension(bed, streams, frames),
    }
}

/// Returns the CPU time of the extension's owner, divided by that of the server on kernel sockets.
pub(super) fn ratio(bed: &Bed, streams: u16, frames: u32, cut: Cut) -> Result<f64, MeasureError> {
    Ok(by_extension(bed, streams, frames)? / by_sockets(bed, streams, frames, cut)?)
}

pub(crate) fn by_extension(bed: &Bed, streams: u16, frames: u32) -> Result<f64, MeasureError> {
    let _audience = audience(bed, streams)?;
    let object = written(bed, "video.o", VIDEO)?;
    let local = SocketAddr::new(bed.client.address, SERVER_PORT);
    let mut owner = bed.owner_command(Side::Client);
    owner
        .arg("video")
        .args([local, bed.endpoint(AUDIENCE_PORT)].map(|end| end.to_string()))
        .arg(object)
        .args(film(streams, frames))
        .args(["--segment", SEGMENT]);
    number("portolan-owner", &run(&mut owner)?, &["cpu"])
}

pub(crate) fn by_sockets(
    bed: &Bed,
    streams: u16,
    frames: u32,
    cut: Cut,
) -> Result<f64, MeasureError> {
    let _audience = audience(bed, streams)?;
    let mut server = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
    server
        .args(["screen", &bed.endpoint(AUDIENCE_PORT).to_string()])
        .args(film(streams, frames));
    if let Cut::Datagrams = cut {
        server.args(["--segment", SEGMENT]);
    }
    number("portolan-traffic", &run(&mut server)?, &["cpu"])
}

fn film(streams: u16, frames: u32) -> [String; 4] {
    let words = [
        "--streams",
        &streams.to_string(),
        "--frames",
        &frames.to_string(),
    ];
    words.map(str::to_owned)
}

/// Starts the audience, on the kernel's sockets and on a processor of its own.
fn audience(bed: &Bed, streams: u16) -> Result<Background, MeasureError> {
    bed.steer(Side::Server)?;
    let first = bed.endpoint(AUDIENCE_PORT).to_string();
    let arguments = ["audience", &first, "--streams", &streams.to_string()];
    Ok(bed.serve(Stack::Kernel, AUDIENCE_PORT, "portolan-traffic", &arguments)?)
}
