//! Sends one file over a connection and receives it back at the same time, for tests of correctness.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

const BUFFER: usize = 64 * 1024;

#[derive(Serialize)]
pub(crate) struct Report {
    pub bytes: u64,
    pub seconds: f64,
}

pub(crate) fn mirror(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    loop {
        let mut stream = listener.accept()?.0;
        let mut buffer = vec![0; BUFFER];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => stream.write_all(&buffer[..count])?,
                Err(error) => {
                    eprintln!("portolan-traffic: {error}");
                    break;
                }
            }
        }
    }
}

pub(crate) fn send(address: SocketAddr, file: &Path, copy: &Path) -> io::Result<Report> {
    let start = Instant::now();
    let stream = TcpStream::connect(address)?;
    let bytes = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let bytes = copy_all(&mut File::open(file)?, &mut &stream)?;
            stream.shutdown(Shutdown::Write)?;
            Ok::<u64, io::Error>(bytes)
        });
        copy_all(&mut &stream, &mut File::create(copy)?)?;
        writer
            .join()
            .map_err(|_| io::Error::other("the writer panicked"))?
    })?;
    Ok(Report {
        bytes,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// Copies by reads and writes, as most programs do; `io::copy` would splice between sockets and files.
fn copy_all(from: &mut impl Read, to: &mut impl Write) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER];
    let mut total = 0;
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(total),
            count => {
                to.write_all(&buffer[..count])?;
                total += count as u64;
            }
        }
    }
}
