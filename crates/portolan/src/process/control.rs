//! The connection to the server: one request, one reply, one caller at a time.
//!
//! Replies bring descriptors, and what a message brings when no number is free is lost. So a few
//! numbers are kept (`Reserve`), and a request whose reply could not be received is not sent: a
//! program that is short of descriptors gets `EMFILE` for that call, and loses nothing.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use portolan_proto::MAX_MESSAGE;
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_sys::unix::{
    ConnectError, Connection, PairKind, ReceiveError, SendError, socket_pair,
};
use portolan_sys::{descriptor, wait};
use portolan_types::Instant;
use rustix::io::{DupFlags, Errno};
use rustix::process::{Resource, getrlimit};

use crate::descriptors::{self, InternalFd};
use crate::process::limit::{self, Raised};
use crate::wait::pollfd;

pub(crate) struct Control {
    /// Its number stays; what it refers to is another connection after a restart of the server.
    connection: Connection,
    exchange: Mutex<Exchange>,
    standing: Standing,
}

/// Which of the connections this is, and whether it is lost: the failure of a call says nothing of the connection that
/// has taken the place of the call's own.
#[derive(Debug, Default)]
struct Standing(AtomicU32);

impl Standing {
    const LOST: u32 = 1;

    fn is_lost(&self) -> bool {
        self.0.load(Ordering::Acquire) & Standing::LOST != 0
    }

    fn now(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// The connection that stood so is lost.
    fn lose(&self, seen: u32) {
        let lost = seen | Standing::LOST;
        // Another thread was faster, or it has been replaced.
        let _ = self
            .0
            .compare_exchange(seen, lost, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// There is another connection.
    fn renew(&self) {
        let renewed = (self.now() | Standing::LOST).wrapping_add(1);
        self.0.store(renewed, Ordering::Release);
    }
}

struct Exchange {
    next_id: u32,
    buffer: Vec<u8>,
    reserve: Reserve,
}

/// Numbers of descriptors that are there for what a message brings: above the limit, which is raised for that moment, or,
/// where it cannot be, copies of the connection, which are closed while the message is received.
#[derive(Default)]
struct Reserve {
    copies: Vec<InternalFd>,
    raised: Option<Raised>,
}

impl Reserve {
    /// As many as any reply brings but `Welcome`, or as a pair takes.
    const SIZE: usize = 2;

    /// Takes numbers until there are enough that may be used; false if there are too few.
    fn fill(&mut self, connection: BorrowedFd<'_>) -> bool {
        if limit::may_raise() {
            self.copies.clear();
            return true;
        }
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let is_usable =
            |copy: &InternalFd| u64::from(copy.as_fd().as_raw_fd().unsigned_abs()) < limit;
        self.copies.retain(is_usable);
        while self.copies.len() < Reserve::SIZE {
            match descriptors::hidden_copy(connection, limit) {
                Ok(copy) => self.copies.push(copy),
                Err(_) => return false,
            }
        }
        true
    }

    /// Frees the numbers; [`Reserve::close`] is to follow.
    fn open(&mut self) {
        if self.copies.len() < Reserve::SIZE {
            self.raised = limit::raise();
        }
        self.copies.clear();
    }

    fn close(&mut self, connection: BorrowedFd<'_>) {
        if self.raised.take().is_none() {
            self.fill(connection);
        }
    }
}

/// The server has gone, or said something that is no reply.
#[derive(Debug)]
pub(crate) struct Lost;

impl Control {
    pub(crate) fn connect(path: &Path) -> Result<Control, ConnectError> {
        let connection = Connection::connect(path)?;
        Ok(Control::over(Connection::from(descriptors::hide(
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
                reserve: Reserve::default(),
            }),
            standing: Standing::default(),
        }
    }

    /// Goes on by the connection of `other`, which nobody has used since it was made.
    pub(crate) fn renew(&self, other: &Control) -> Result<(), Errno> {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        descriptors::renumber(other.as_fd(), self.as_fd())?;
        // Copies of the connection that is lost.
        exchange.reserve.copies.clear();
        let others = other.exchange.lock();
        exchange.next_id = others.unwrap_or_else(PoisonError::into_inner).next_id;
        self.standing.renew();
        Ok(())
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.standing.is_lost()
    }

    /// Notices that the server has hung up; costs a system call.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.hangs_up_by(Instant::ZERO)
    }

    /// The same, or that it does so until then.
    pub(crate) fn hangs_up_by(&self, deadline: Instant) -> bool {
        let seen = self.standing.now();
        let mut fds = [pollfd(self.connection.as_fd().as_raw_fd(), 0)];
        let looked = wait::ppoll(&mut fds, Some(deadline), None);
        if looked.is_ok() && fds[0].revents & (libc::POLLHUP | libc::POLLERR) != 0 {
            self.standing.lose(seen);
        }
        self.is_lost()
    }

    /// Is there room for what a reply may bring? Takes it if it is free.
    pub(crate) fn has_room(&self) -> bool {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        exchange.reserve.fill(self.as_fd())
    }

    /// Has `act` find numbers free, as far as there are any.
    pub(crate) fn with_room<T>(&self, act: impl FnOnce() -> T) -> T {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        exchange.reserve.fill(self.as_fd());
        exchange.reserve.open();
        let result = act();
        exchange.reserve.close(self.as_fd());
        result
    }

    /// A pair whose near end is to take a socket's number, and whose far end is closed soon: it takes none.
    pub(crate) fn replacing_pair(&self, kind: PairKind) -> Result<(OwnedFd, OwnedFd), Errno> {
        match socket_pair(kind) {
            Err(Errno::MFILE) => self.with_room(|| socket_pair(kind)),
            pair => pair,
        }
    }

    /// A pair whose far end is closed soon: where numbers are short it takes one for its near end only, the lowest that
    /// is free.
    pub(crate) fn brief_pair(&self, kind: PairKind) -> Result<(OwnedFd, OwnedFd), Errno> {
        match socket_pair(kind) {
            Err(Errno::MFILE) => {
                let mut place = rustix::io::fcntl_dupfd_cloexec(self.as_fd(), 0)?;
                let (near, far) = self.with_room(|| socket_pair(kind))?;
                rustix::io::dup3(&near, &mut place, DupFlags::CLOEXEC)?;
                descriptor::close(near.into_raw_fd());
                Ok((place, far))
            }
            pair => pair,
        }
    }

    /// Sends a request and waits for its reply. `ReplyBody::Error` comes back as `Ok`.
    pub(crate) fn call(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = self.standing.now();
        if self.is_lost() {
            return Err(Lost);
        }
        let answer = self.exchange(&mut exchange, body, fds);
        if answer.is_err() {
            self.standing.lose(seen);
        }
        answer
    }

    fn exchange(
        &self,
        exchange: &mut Exchange,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
        let brings_fds = brings_fds(&body);
        if brings_fds && !exchange.reserve.fill(self.as_fd()) && needs_fds(&body) {
            return Ok(refused(Errno::MFILE));
        }
        let id = exchange.next_id;
        exchange.next_id = exchange.next_id.checked_add(1).unwrap_or(1);
        if let Err(errno) = self.send(&Request { id, body }, fds)? {
            return Ok(refused(errno));
        }
        loop {
            if brings_fds {
                // Others take numbers meanwhile: the reserve is open for a moment only.
                self.wait_until(libc::POLLIN)?;
                exchange.reserve.open();
            }
            let received = self.connection.receive(&mut exchange.buffer);
            if brings_fds {
                exchange.reserve.close(self.as_fd());
            }
            let received = match received {
                Ok(received) => received,
                Err(ReceiveError::Blocked) => {
                    self.wait_until(libc::POLLIN)?;
                    continue;
                }
                Err(_) => return Err(Lost),
            };
            let bytes = exchange.buffer.get(..received.length).ok_or(Lost)?;
            let reply: Reply = portolan_proto::decode(bytes).map_err(|_| Lost)?;
            if reply.id == id && received.is_short {
                return Ok(refused(Errno::MFILE));
            }
            if reply.id == id {
                return Ok((reply.body, received.fds.into_iter().collect()));
            }
        }
    }

    /// Sends a request that wants no reply.
    pub(crate) fn tell(&self, body: RequestBody, fds: &[BorrowedFd<'_>]) -> Result<(), Lost> {
        let seen = self.standing.now();
        if self.is_lost() {
            return Err(Lost);
        }
        let sent = self.send(&Request { id: 0, body }, fds);
        if sent.is_err() {
            self.standing.lose(seen);
        }
        sent.map(drop)
    }

    /// The inner error is of this message alone, as `ETOOMANYREFS` where too many descriptors are on
    /// their way.
    fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Result<(), Errno>, Lost> {
        let bytes = portolan_proto::encode(request);
        loop {
            match self.connection.send(&bytes, fds) {
                Ok(()) => return Ok(Ok(())),
                Err(SendError::Blocked) => self.wait_until(libc::POLLOUT)?,
                Err(SendError::Failed(errno)) => return Ok(Err(errno)),
                Err(SendError::Closed | SendError::TooManyFds) => return Err(Lost),
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

/// May the reply bring descriptors?
fn brings_fds(body: &RequestBody) -> bool {
    needs_fds(body)
        || matches!(
            body,
            RequestBody::Bind { .. }
                | RequestBody::Connect { .. }
                | RequestBody::PeerNotifier { .. }
        )
}

/// Is it worth nothing without them, or does it move what they bring?
fn needs_fds(body: &RequestBody) -> bool {
    matches!(
        body,
        RequestBody::Cache { .. }
            | RequestBody::KernelSocket { .. }
            | RequestBody::PortToken { .. }
            | RequestBody::Direct { .. }
    )
}

fn refused(errno: Errno) -> (ReplyBody, Vec<OwnedFd>) {
    let errno = errno.raw_os_error();
    (ReplyBody::Error { errno }, Vec::new())
}
