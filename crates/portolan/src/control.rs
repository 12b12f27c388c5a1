//! The connection to the server: one request, one reply, one caller at a time.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use portolan_proto::MAX_MESSAGE;
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_sys::unix::{ConnectError, Connection, ReceiveError, SendError};
use portolan_sys::wait;
use portolan_types::Instant;
use rustix::io::Errno;

use crate::table;
use crate::wait::pollfd;

pub(crate) struct Control {
    connection: Connection,
    exchange: Mutex<Exchange>,
    lost: AtomicBool,
}

struct Exchange {
    next_id: u32,
    buffer: Vec<u8>,
}

/// The server has gone, or said something that is no reply.
#[derive(Debug)]
pub(crate) struct Lost;

impl Control {
    pub(crate) fn connect(path: &Path) -> Result<Control, ConnectError> {
        let connection = Connection::connect(path)?;
        Ok(Control::over(Connection::from(table::hide(
            connection.into(),
        ))))
    }

    /// One that is closed again at once.
    pub(crate) fn connect_briefly(path: &Path) -> Result<Control, ConnectError> {
        Connection::connect(path).map(Control::over)
    }

    fn over(connection: Connection) -> Control {
        Control {
            connection,
            exchange: Mutex::new(Exchange {
                next_id: 1,
                buffer: vec![0; MAX_MESSAGE],
            }),
            lost: AtomicBool::new(false),
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Notices that the server has hung up; costs a system call.
    pub(crate) fn has_hung_up(&self) -> bool {
        let mut fds = [pollfd(self.connection.as_fd().as_raw_fd(), 0)];
        let looked = wait::ppoll(&mut fds, Some(Instant::ZERO), None);
        if looked.is_ok() && fds[0].revents & (libc::POLLHUP | libc::POLLERR) != 0 {
            self.lost.store(true, Ordering::Relaxed);
        }
        self.is_lost()
    }

    /// Sends a request and waits for its reply. `ReplyBody::Error` comes back as `Ok`.
    pub(crate) fn call(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
        if self.is_lost() {
            return Err(Lost);
        }
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = self.exchange(&mut exchange, body, fds);
        if answer.is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        answer
    }

    fn exchange(
        &self,
        exchange: &mut Exchange,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
        let id = exchange.next_id;
        exchange.next_id = exchange.next_id.checked_add(1).unwrap_or(1);
        self.send(&Request { id, body }, fds)?;
        loop {
            let received = match self.connection.receive(&mut exchange.buffer) {
                Ok(received) => received,
                Err(ReceiveError::Blocked) => {
                    self.wait_until(libc::POLLIN)?;
                    continue;
                }
                Err(_) => return Err(Lost),
            };
            let octets = exchange.buffer.get(..received.length).ok_or(Lost)?;
            let reply: Reply = portolan_proto::decode(octets).map_err(|_| Lost)?;
            if reply.id == id {
                return Ok((reply.body, received.fds.into_iter().collect()));
            }
        }
    }

    /// Sends a request that wants no reply.
    pub(crate) fn tell(&self, body: RequestBody, fds: &[BorrowedFd<'_>]) -> Result<(), Lost> {
        if self.is_lost() {
            return Err(Lost);
        }
        let sent = self.send(&Request { id: 0, body }, fds);
        if sent.is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        sent
    }

    fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Lost> {
        let octets = portolan_proto::encode(request);
        loop {
            match self.connection.send(&octets, fds) {
                Ok(()) => return Ok(()),
                Err(SendError::Blocked) => self.wait_until(libc::POLLOUT)?,
                Err(_) => return Err(Lost),
            }
        }
    }

    /// The server answers at once or is gone, so a signal does not end this wait.
    fn wait_until(&self, events: i16) -> Result<(), Lost> {
        let mut fds = [pollfd(self.connection.as_fd().as_raw_fd(), events)];
        match wait::ppoll(&mut fds, None, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(_) => Err(Lost),
        }
    }
}
