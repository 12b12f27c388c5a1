//! Bulk transfer in the style of ttcp: writes for a while, then waits until the peer reports how many
//! bytes it has read, so that the rate counts bytes that arrived.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use portolan_bench::transfer::Transfer;

const READ_SIZE: usize = 256 * 1024;

pub(crate) fn sink(address: SocketAddr) -> io::Result<()> {
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

pub(crate) fn send(address: SocketAddr, size: usize, duration: Duration) -> io::Result<Transfer> {
    let mut stream = TcpStream::connect(address)?;
    let block = vec![0x5a; size];
    let start = Instant::now();
    let mut sent = 0u64;
    while start.elapsed() < duration {
        stream.write_all(&block)?;
        sent += size as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    Transfer::confirmed(stream, sent, start)
}
