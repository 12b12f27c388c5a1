//! How a connection ends for one side when the other side is killed.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Interval of writes: a side that does not send misses some ends.
const NUDGE: Duration = Duration::from_millis(200);

/// If the connection has not ended by then, `none` is reported.
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Serialize)]
pub(crate) struct Report {
    /// `eof`, `reset`, or `none` within the limit.
    pub end: &'static str,
}

pub(crate) fn hold(address: SocketAddr, listen: bool) -> io::Result<()> {
    let mut stream = open(address, listen)?;
    stream.write_all(b"!")?;
    println!("connected");
    loop {
        std::thread::park();
    }
}

pub(crate) fn watch(address: SocketAddr, listen: bool) -> io::Result<Report> {
    let mut stream = open(address, listen)?;
    stream.read_exact(&mut [0])?;
    eprintln!("connected");
    stream.set_read_timeout(Some(NUDGE))?;
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        match stream.read(&mut [0]) {
            Ok(0) => return Ok(Report { end: "eof" }),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // An error of the connection is reported by the next read.
                let _ = stream.write(b".");
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                return Ok(Report { end: "reset" });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Report { end: "none" })
}

fn open(address: SocketAddr, listen: bool) -> io::Result<TcpStream> {
    if listen {
        Ok(TcpListener::bind(address)?.accept()?.0)
    } else {
        TcpStream::connect(address)
    }
}
