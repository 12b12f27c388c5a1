//! Round trips, by either interface.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Instant;

use portolan::net::{TcpListener, TcpStream, UdpSocket};
use serde::Serialize;

use crate::{Interface, Transport};

#[derive(Serialize)]
pub(crate) struct Report {
    p50_us: f64,
    p99_us: f64,
}

pub(crate) fn echo(
    (protocol, address): (Transport, SocketAddr),
    by: Interface,
    size: usize,
) -> io::Result<()> {
    if protocol == Transport::Udp {
        let socket = UdpSocket::bind(address)?;
        loop {
            let (bytes, from) = datagram(&socket, by)?;
            socket.send_to(&bytes, from)?;
        }
    }
    let listener = TcpListener::bind(address)?;
    for stream in listener.incoming() {
        let stream = stream?;
        stream.set_nodelay(true)?;
        let mut message = Vec::new();
        while exchange(&stream, by, |bytes| {
            message.extend_from_slice(bytes);
            Ok(())
        })? > 0
        {
            if message.len() >= size {
                (&stream).write_all(&message)?;
                message.clear();
            }
        }
    }
    Ok(())
}

/// Receives the available bytes, passes them to `to`, and returns their number.
fn exchange(
    mut stream: &TcpStream,
    by: Interface,
    mut to: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<usize> {
    if by == Interface::Socket {
        let mut buffer = [0; 65_536];
        let count = stream.read(&mut buffer)?;
        to(&buffer[..count])?;
        return Ok(count);
    }
    let mut pieces = Vec::new();
    let count = stream.receive(&mut pieces)?;
    pieces.iter().try_for_each(|piece| to(piece))?;
    Ok(count)
}

fn datagram(socket: &UdpSocket, by: Interface) -> io::Result<(Vec<u8>, SocketAddr)> {
    if by == Interface::Shared {
        let (piece, from) = socket.receive()?;
        return Ok((piece.to_vec(), from));
    }
    let mut buffer = [0; 65_536];
    let (count, from) = socket.recv_from(&mut buffer)?;
    Ok((buffer[..count].to_vec(), from))
}

pub(crate) fn ping(
    (protocol, address): (Transport, SocketAddr),
    by: Interface,
    (size, count): (usize, usize),
) -> io::Result<Report> {
    let message = vec![0x5a; size];
    let mut trip: Box<dyn FnMut() -> io::Result<()>> = match protocol {
        Transport::Tcp => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            Box::new(move || {
                (&stream).write_all(&message)?;
                let mut left = size;
                while left > 0 {
                    let count = exchange(&stream, by, |_| Ok(()))?;
                    if count == 0 {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                    left = left.saturating_sub(count);
                }
                Ok(())
            })
        }
        Transport::Udp => {
            let any = match address {
                SocketAddr::V4(_) => "0.0.0.0:0",
                SocketAddr::V6(_) => "[::]:0",
            };
            let socket = UdpSocket::bind(any)?;
            socket.connect(address)?;
            Box::new(move || {
                socket.send(&message)?;
                if by == Interface::Shared {
                    socket.receive()?;
                } else {
                    socket.recv(&mut [0; 65_536])?;
                }
                Ok(())
            })
        }
    };
    let mut times = Vec::with_capacity(count);
    for _ in 0..count / 10 + count {
        let start = Instant::now();
        trip()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let mut times = times.split_off(count / 10);
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    Ok(Report {
        p50_us: at(0.5),
        p99_us: at(0.99),
    })
}
