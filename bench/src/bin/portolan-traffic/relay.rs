//! A forwarder on sockets: two connections, joined by splice(2).

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;

use rustix::pipe::{SpliceFlags, pipe, splice};

/// Bytes per splice.
const PIECE: usize = 64 * 1024;

/// Joins each connection with a new one to another endpoint.
pub(crate) fn relay(address: SocketAddr, to: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    loop {
        let near = listener.accept()?.0;
        let far = TcpStream::connect(to)?;
        for stream in [&near, &far] {
            stream.set_nodelay(true)?;
        }
        let back = (far.try_clone()?, near.try_clone()?);
        thread::spawn(move || carry(&near, &far));
        thread::spawn(move || carry(&back.0, &back.1));
    }
}

/// Forwards until `from` ends, then shuts down the write side of `to`.
fn carry(from: &TcpStream, to: &TcpStream) -> io::Result<()> {
    let (taken, put) = pipe()?;
    let flags = SpliceFlags::MOVE;
    loop {
        let mut left = splice(from, None, &put, None, PIECE, flags)?;
        if left == 0 {
            return to.shutdown(Shutdown::Write);
        }
        while left > 0 {
            left -= splice(&taken, None, to, None, left, flags)?;
        }
    }
}
