//! Several one-way flows at once, each measured by its receiver for a fixed time. Data that senders
//! have queued does not count, so that slow paths need no time to drain.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

const READ_SIZE: usize = 256 * 1024;
const WRITE_SIZE: usize = 64 * 1024;

#[derive(Serialize)]
pub(crate) struct Report {
    /// Rate of each flow, in the order of their ports.
    pub megabits_per_second: Vec<f64>,
    pub mean: f64,
}

/// The measured interval of a flow, which begins some time after its first byte.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub skip: Duration,
    pub length: Duration,
}

/// Receives flows at `count` ports from that of `address` on, answers each with the number of bytes
/// within the window, and continues to read until the peer ends.
pub(crate) fn measure(address: SocketAddr, count: u16, window: Window) -> io::Result<()> {
    // The first port last: a client that can connect to it can connect to all.
    let listeners = ports(address, count)
        .rev()
        .map(TcpListener::bind)
        .collect::<io::Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for listener in &listeners {
            scope.spawn(move || {
                loop {
                    // A flow that is cut off ends alone, without the others.
                    if let Err(error) = listener.accept().and_then(|(s, _)| receive(s, window)) {
                        eprintln!("portolan-traffic: {error}");
                    }
                }
            });
        }
    });
    Ok(())
}

fn receive(mut stream: TcpStream, window: Window) -> io::Result<()> {
    let mut buffer = vec![0; READ_SIZE];
    stream.read_exact(&mut buffer[..1])?;
    let start = Instant::now() + window.skip;
    let end = start + window.length;
    let mut bytes = 0u64;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        // A stalled flow is measured as well.
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) if Instant::now() >= start => bytes += count as u64,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    stream.write_all(&bytes.to_be_bytes())?;
    stream.set_read_timeout(None)?;
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Sends to `count` ports of a `measure` at once until it has answered for all of them. The flows end
/// with this process.
pub(crate) fn send(address: SocketAddr, count: u16, window: Window) -> io::Result<Report> {
    let streams = ports(address, count)
        .map(TcpStream::connect)
        .collect::<io::Result<Vec<_>>>()?;
    for stream in &streams {
        let mut writer = stream.try_clone()?;
        std::thread::spawn(move || {
            let block = vec![0x5a; WRITE_SIZE];
            // Ends with the receiver or with this process.
            while writer.write_all(&block).is_ok() {}
        });
    }
    let seconds = window.length.as_secs_f64();
    let mut rates = Vec::new();
    for mut stream in streams {
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        rates.push(u64::from_be_bytes(answer) as f64 * 8.0 / seconds / 1e6);
    }
    Ok(Report {
        mean: rates.iter().sum::<f64>() / rates.len().max(1) as f64,
        megabits_per_second: rates,
    })
}

fn ports(address: SocketAddr, count: u16) -> impl DoubleEndedIterator<Item = SocketAddr> {
    (0..count).map(move |k| SocketAddr::new(address.ip(), address.port().saturating_add(k)))
}
