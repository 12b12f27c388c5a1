//! Bulk transfer in the manner of ttcp: writes for a while, then waits until the other side says
//! how much it has read, so that the rate counts bytes that arrived.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

const READ_SIZE: usize = 256 * 1024;

#[derive(Serialize)]
pub struct Report {
    pub bytes: u64,
    pub seconds: f64,
    pub gigabits_per_second: f64,
}

pub fn sink(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    let mut buffer = vec![0; READ_SIZE];
    loop {
        // A peer that resets its connection ends its own transfer, not the sink.
        if let Err(error) = drain(listener.accept()?.0, &mut buffer) {
            eprintln!("portolan-traffic: {error}");
        }
    }
}

fn drain(mut stream: TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut total = 0u64;
    loop {
        match stream.read(buffer)? {
            0 => return stream.write_all(&total.to_be_bytes()),
            count => total += count as u64,
        }
    }
}

pub fn send(address: SocketAddr, size: usize, duration: Duration) -> io::Result<Report> {
    let mut stream = TcpStream::connect(address)?;
    let block = vec![0x5a; size];
    let start = Instant::now();
    let mut sent = 0u64;
    while start.elapsed() < duration {
        stream.write_all(&block)?;
        sent += size as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = u64::from_be_bytes(answer);
    if bytes != sent {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("sent {sent} bytes, the sink read {bytes}"),
        ));
    }
    Ok(Report {
        bytes,
        seconds,
        gigabits_per_second: bytes as f64 * 8.0 / seconds / 1e9,
    })
}
