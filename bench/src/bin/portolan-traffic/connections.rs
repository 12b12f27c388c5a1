//! Short connections, one after the other: connect, read one byte and the end of the stream,
//! close. The server closes first and so keeps TIME-WAIT, which leaves the ports of the client free.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

#[derive(Serialize)]
pub(crate) struct Report {
    pub connections: u64,
    pub seconds: f64,
    pub per_second: f64,
}

pub(crate) fn greet(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    loop {
        // The client may have closed before its greeting; this must not affect the next one.
        if let Err(error) = listener.accept()?.0.write_all(b"!") {
            eprintln!("portolan-traffic: {error}");
        }
    }
}

pub(crate) fn open(address: SocketAddr, duration: Duration, count: u64) -> io::Result<Report> {
    let start = Instant::now();
    let mut connections = 0;
    while connections < count && start.elapsed() < duration {
        let mut greeting = Vec::new();
        TcpStream::connect(address)?.read_to_end(&mut greeting)?;
        if greeting != b"!" {
            return Err(ErrorKind::InvalidData.into());
        }
        connections += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Report {
        connections,
        seconds,
        per_second: connections as f64 / seconds,
    })
}
