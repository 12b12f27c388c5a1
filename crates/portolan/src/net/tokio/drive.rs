//! Waiting in a runtime instead of in a thread of the library.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;
use ::tokio::task::yield_now;

use crate::net::reactor::{Driven, Driver};

/// Has the runtime that polls this future wait for all sockets of this module, instead of a thread: a worker of the runtime
/// that is out of work then wakes for a packet itself, and runs the protocol. A server with a runtime of its own
/// should spawn it first. It never ends; dropping it, or shutting the runtime down, returns the task to the thread.
///
/// ```no_run
/// use portolan::net::tokio::{TcpListener, drive};
///
/// # async fn serve() -> std::io::Result<()> {
/// tokio::spawn(drive());
/// let listener = TcpListener::bind("0.0.0.0:7").await?;
/// # Ok(()) }
/// ```
///
/// A worker should not compute for long without `await`: until another one is out of work, packets are received late,
/// by the library's background thread, after up to 20 ms.
///
/// # Errors
/// There is no server, or the process has no free descriptor. The thread then waits as before.
///
/// # Panics
/// In a runtime without I/O (`enable_io`).
pub async fn drive() -> io::Result<std::convert::Infallible> {
    let mut driver = Driver::new()?;
    // Its replacement is unsafe; this descriptor stays open until the `AsyncFd` is dropped.
    #[allow(deprecated)]
    let readable = AsyncFd::with_interest(Number(driver.as_fd().as_raw_fd()), Interest::READABLE)?;
    loop {
        match driver.wait()? {
            // The tasks run first.
            Driven::Woken => yield_now().await,
            Driven::Asleep => readable.readable().await?.clear_ready(),
        }
    }
}

/// The number of a descriptor that the driver closes.
struct Number(RawFd);

impl AsRawFd for Number {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}
