//! Sends as fast as the socket accepts, to a [`gauge`](crate::gauge) that distinguishes several such
//! senders by their tags.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use serde::Serialize;

const BLOCK: usize = 64 * 1024;

/// Header of a datagram: the tag, zeros, the sequence number.
pub(crate) const HEADER: usize = 16;

#[derive(Serialize)]
pub(crate) struct Report {
    pub tag: u16,
    /// Bytes of payload.
    pub bytes: u64,
    /// Calls that failed because a buffer or queue was full.
    pub refused: u64,
    pub seconds: f64,
}

/// Parameters of a sender.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub to: SocketAddr,
    pub tag: u16,
    pub duration: Duration,
    /// Waits for the end of a line, or of the standard input, before sending.
    pub is_gated: bool,
}

impl Plan {
    fn await_start(&self) -> io::Result<Instant> {
        if self.is_gated {
            io::stdin().read_line(&mut String::new())?;
        }
        Ok(Instant::now())
    }

    fn report(&self, start: Instant, bytes: u64, refused: u64) -> Report {
        Report {
            tag: self.tag,
            bytes,
            refused,
            seconds: start.elapsed().as_secs_f64(),
        }
    }
}

/// Datagrams of `size` bytes, numbered.
pub(crate) fn datagrams(plan: Plan, size: usize) -> io::Result<Report> {
    let any: SocketAddr = match plan.to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(plan.to)?;
    let mut datagram = vec![0x5a; size.max(HEADER)];
    datagram[..HEADER].fill(0);
    datagram[..2].copy_from_slice(&plan.tag.to_be_bytes());
    let start = plan.await_start()?;
    let (mut number, mut refused) = (0u64, 0);
    while start.elapsed() < plan.duration {
        datagram[8..HEADER].copy_from_slice(&number.to_be_bytes());
        match socket.send(&datagram) {
            Ok(_) => number += 1,
            Err(error) if is_want_of_room(&error) => refused += 1,
            Err(error) if has_enough(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(plan.report(start, number * datagram.len() as u64, refused))
}

/// The kernel returns ENOBUFS when a queueing discipline drops a local sender's packet.
fn is_want_of_room(error: &io::Error) -> bool {
    const ENOBUFS: i32 = 105;
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(ENOBUFS)
}

/// Returns true if the receiver has ended after its measurement.
fn has_enough(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionRefused | ConnectionReset
    )
}

/// Sends a stream that begins with the tag.
pub(crate) fn stream(plan: Plan) -> io::Result<Report> {
    let mut stream = TcpStream::connect(plan.to)?;
    let start = plan.await_start()?;
    stream.write_all(&plan.tag.to_be_bytes())?;
    let block = vec![0x5a; BLOCK];
    let mut bytes = 2;
    while start.elapsed() < plan.duration {
        bytes += match stream.write(&block) {
            Ok(count) => count as u64,
            Err(error) if has_enough(&error) => break,
            Err(error) => return Err(error),
        };
    }
    Ok(plan.report(start, bytes, 0))
}
