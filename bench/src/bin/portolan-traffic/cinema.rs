//! A film for an audience of many ports (PX §5.1), sent by one call per port.

use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

use portolan_bench::film::{Film, Shown};
use portolan_sys::datagram::{Departure, send};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Sends each frame to all viewers in turn.
pub(crate) fn show(first: SocketAddr, film: &Film) -> io::Result<Shown> {
    let any: SocketAddr = match first {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    film.show(|frame| {
        for to in film.audience(first) {
            let departure = Departure {
                to: Some(to),
                segment: film.segment,
                ..Departure::default()
            };
            send_in_time(&socket, frame, &departure)?;
        }
        Ok(())
    })
}

/// Sends a frame. Waits while the socket's buffer is full.
fn send_in_time(socket: &UdpSocket, frame: &[u8], departure: &Departure) -> io::Result<()> {
    while let Err(errno) = send(socket, &[IoSlice::new(frame)], departure) {
        if errno != Errno::AGAIN {
            return Err(errno.into());
        }
        poll(&mut [PollFd::new(socket, PollFlags::OUT)], None)?;
    }
    Ok(())
}

/// Receives at the audience's ports until it is killed.
pub(crate) fn attend(first: SocketAddr, film: &Film) -> io::Result<()> {
    let sockets = film.audience(first).map(UdpSocket::bind);
    let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
    for socket in &sockets {
        socket.set_nonblocking(true)?;
    }
    // A listening port signals that the audience is ready.
    let _listener = TcpListener::bind(first)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let wanted = |socket| PollFd::new(socket, PollFlags::IN);
        poll(&mut sockets.iter().map(wanted).collect::<Vec<_>>(), None)?;
        for socket in &sockets {
            while socket.recv(&mut buffer).is_ok() {}
        }
    }
}
