//! TCP sockets that are neither connected nor listening.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use super::{TcpListener, TcpStream};
use crate::net;
use crate::net::handle::Handle;
use crate::net::options::{flag_option, number_option, service_options, stream_options};

/// A TCP socket whose options are set before it connects or listens, as
/// [`tokio::net::TcpSocket`](https://docs.rs/tokio/latest/tokio/net/struct.TcpSocket.html).
///
/// ```no_run
/// # async fn ask() -> std::io::Result<()> {
/// use portolan::net::tokio::TcpSocket;
///
/// let socket = TcpSocket::new_v4()?;
/// socket.set_recv_buffer_size(1 << 20)?;
/// socket.bind("192.0.2.1:0".parse().unwrap())?;
/// let stream = socket.connect("192.0.2.7:7".parse().unwrap()).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TcpSocket(Handle<std::net::TcpStream>);

impl TcpSocket {
    /// Opens an IPv4 socket.
    ///
    /// # Errors
    /// The process has no free descriptor. `NetworkDown` where `PORTOLAN=require` and there is no server.
    pub fn new_v4() -> io::Result<TcpSocket> {
        TcpSocket::open(libc::AF_INET)
    }

    /// Opens an IPv6 socket.
    ///
    /// # Errors
    /// As [`TcpSocket::new_v4`].
    pub fn new_v6() -> io::Result<TcpSocket> {
        TcpSocket::open(libc::AF_INET6)
    }

    fn open(domain: i32) -> io::Result<TcpSocket> {
        Handle::open_in(domain, libc::SOCK_STREAM | libc::SOCK_NONBLOCK).map(TcpSocket)
    }

    /// Binds to `address`. Port 0 means any free port.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`; `InvalidInput`: it is bound already.
    pub fn bind(&self, address: SocketAddr) -> io::Result<()> {
        self.0.bind(address)
    }

    /// Connects to `address`. Dropping the call gives up.
    ///
    /// # Errors
    /// As [`TcpStream::connect`].
    pub async fn connect(self, address: SocketAddr) -> io::Result<TcpStream> {
        let begun = net::TcpStream::begin_to_connect_by(self.0, address)?;
        TcpStream::opened(begun).await
    }

    /// Listens. At most `backlog` connections, and no more than the kernel's `somaxconn`, wait to be accepted.
    ///
    /// # Errors
    /// `AddrInUse`: another socket listens on the address.
    pub fn listen(self, backlog: u32) -> io::Result<TcpListener> {
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        let listener = net::TcpListener::listen_on(self.0.convert(), backlog)?;
        TcpListener::from_blocking(listener)
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None is expected.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0
            .call(crate::posix::local_address, |std| std.local_addr())
    }

    /// Takes the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// None is expected.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.0.take_error()
    }

    fn handle(&self) -> &Handle<std::net::TcpStream> {
        &self.0
    }

    stream_options!();
    service_options!();
    flag_option!(
        "the address may be bound although connections of an earlier listener exist",
        reuseaddr,
        set_reuseaddr,
        SOL_SOCKET,
        SO_REUSEADDR
    );
    flag_option!(
        "several sockets may be bound to the address",
        reuseport,
        set_reuseport,
        SOL_SOCKET,
        SO_REUSEPORT
    );
    number_option!(
        "the size of the send buffer in bytes; as on Linux, twice the value that was set",
        send_buffer_size,
        set_send_buffer_size,
        SOL_SOCKET,
        SO_SNDBUF
    );
    number_option!(
        "the size of the receive buffer in bytes; as on Linux, twice the value that was set",
        recv_buffer_size,
        set_recv_buffer_size,
        SOL_SOCKET,
        SO_RCVBUF
    );
}

impl AsFd for TcpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for TcpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.number()
    }
}
