//! The connection to the server: one request and its reply at a time.
//!
//! Replies carry descriptors, and a descriptor that arrives when no number is free is lost. Therefore a few
//! numbers are reserved (`Reserve`), and a request whose reply could not be received is not sent: a program
//! that is short of descriptors gets `EMFILE` for that call, and loses nothing.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portolan_proto::MAX_MESSAGE;
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_sys::unix::{
    self, ConnectError, Connection, PairKind, ReceiveError, SendError, socket_pair,
};
use portolan_sys::wait::pollfd;
use portolan_sys::{clock, descriptor, wait};
use rustix::io::{DupFlags, Errno};
use rustix::process::{Resource, getrlimit};

use crate::descriptors::limit::{self, Raised};
use crate::descriptors::{self, InternalFd};

/// A socket is the kernel's if the server had hung up that long ago.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

pub(crate) struct Control {
    /// Its descriptor number is constant; after a restart of the server it refers to another connection.
    connection: Connection,
    exchange: Mutex<Exchange>,
    state: ConnectionState,
    /// When it was last checked whether the server has hung up, in nanoseconds.
    looked_at: AtomicU64,
}

/// Number of the current connection, and whether it is lost: a failed call on an earlier connection
/// must not mark its successor as lost.
#[derive(Debug, Default)]
struct ConnectionState(AtomicU32);

impl ConnectionState {
    const LOST: u32 = 1;

    fn is_lost(&self) -> bool {
        self.0.load(Ordering::Acquire) & ConnectionState::LOST != 0
    }

    fn now(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Marks the connection that was current at `seen` as lost.
    fn lose(&self, seen: u32) {
        let lost = seen | ConnectionState::LOST;
        // Lost the race to another thread, or the connection was replaced.
        let _ = self
            .0
            .compare_exchange(seen, lost, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Notes a new connection.
    fn renew(&self) {
        let renewed = (self.now() | ConnectionState::LOST).wrapping_add(1);
        self.0.store(renewed, Ordering::Release);
    }
}

struct Exchange {
    next_id: u32,
    buffer: Vec<u8>,
    reserve: Reserve,
}

/// Reserved descriptor numbers for received descriptors: those above the limit, which is raised for that
/// moment, or, where it cannot be, copies of the connection, which are closed while the message is received.
#[derive(Default)]
struct Reserve {
    copies: Vec<InternalFd>,
    raised: Option<Raised>,
}

impl Reserve {
    /// The most descriptors of any reply but `Welcome`, and of a socket pair.
    const SIZE: usize = 2;

    /// Reserves enough usable numbers. Returns false if there are too few.
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

    /// Frees the numbers; [`Reserve::close`] must follow.
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

/// The server is gone, or sent something that is not a reply.
#[derive(Debug)]
pub(crate) struct Lost;

impl Control {
    pub(crate) fn connect(path: &Path) -> Result<Control, ConnectError> {
        let connection = Connection::connect(path)?;
        Ok(Control::over(Connection::from(descriptors::hide(
            connection.into(),
        ))))
    }

    /// Opens a connection for a short time, without hiding its descriptor.
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
            state: ConnectionState::default(),
            looked_at: AtomicU64::new(0),
        }
    }

    /// Switches to the connection of `other`, which must be unused so far.
    pub(crate) fn renew(&self, other: &Control) -> Result<(), Errno> {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        descriptors::renumber(other.as_fd(), self.as_fd())?;
        // Copies of the connection that is lost.
        exchange.reserve.copies.clear();
        let others = other.exchange.lock();
        exchange.next_id = others.unwrap_or_else(PoisonError::into_inner).next_id;
        self.state.renew();
        Ok(())
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.state.is_lost()
    }

    /// Checks whether the server has hung up; costs a system call.
    pub(crate) fn has_hung_up(&self) -> bool {
        let seen = self.state.now();
        if unix::has_hung_up(self.connection.as_fd()) {
            self.state.lose(seen);
        }
        self.is_lost()
    }

    /// As [`Control::has_hung_up`], or what was found less than [`LOOK_AGAIN`] ago.
    pub(crate) fn has_hung_up_lately(&self) -> bool {
        let now = clock::now().as_nanos();
        let last = self.looked_at.load(Ordering::Relaxed);
        if now.wrapping_sub(last) < LOOK_AGAIN.as_nanos() as u64 {
            return self.is_lost();
        }
        self.looked_at.store(now, Ordering::Relaxed);
        self.has_hung_up()
    }

    /// Does the server answer? One that is ending does not: this waits until it has hung up.
    pub(crate) fn is_answered(&self) -> bool {
        self.call(RequestBody::ReadStatus, &[]).is_ok()
    }

    /// As [`Control::is_answered`]; false also while another thread waits for a reply, perhaps in vain.
    pub(crate) fn is_answered_now(&self) -> bool {
        self.exchange.try_lock().is_ok() && self.is_answered()
    }

    /// Is there room for the descriptors of a reply? Reserves it if possible.
    pub(crate) fn has_room(&self) -> bool {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        exchange.reserve.fill(self.as_fd())
    }

    /// Calls `act` with the reserved numbers freed, as far as there are any.
    pub(crate) fn with_room<T>(&self, act: impl FnOnce() -> T) -> T {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        exchange.reserve.fill(self.as_fd());
        exchange.reserve.open();
        let result = act();
        exchange.reserve.close(self.as_fd());
        result
    }

    /// Opens a socket pair whose near end will replace a socket's descriptor, and whose far end is closed soon: it
    /// takes no number.
    pub(crate) fn replacing_pair(&self, kind: PairKind) -> Result<(OwnedFd, OwnedFd), Errno> {
        match socket_pair(kind) {
            Err(Errno::MFILE) => self.with_room(|| socket_pair(kind)),
            pair => pair,
        }
    }

    /// Opens a socket pair whose far end is closed soon. If numbers are short, only its near end
    /// takes one, the lowest free one.
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

    /// Sends a request and waits for its reply. `ReplyBody::Error` is returned as `Ok`.
    pub(crate) fn call(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Lost> {
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = self.state.now();
        if self.is_lost() {
            return Err(Lost);
        }
        let answer = self.exchange(&mut exchange, body, fds);
        if answer.is_err() {
            self.state.lose(seen);
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
                // Other threads may take freed numbers: the reserve is open for a moment only.
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

    /// Sends a request that has no reply.
    pub(crate) fn tell(&self, body: RequestBody, fds: &[BorrowedFd<'_>]) -> Result<(), Lost> {
        self.tell_or_return(body, fds).map_err(|_| Lost)
    }

    /// As [`Control::tell`], but returns the request if there is no server.
    pub(crate) fn tell_or_return(
        &self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Box<RequestBody>> {
        let seen = self.state.now();
        let request = Request { id: 0, body };
        if !self.is_lost() {
            if self.send(&request, fds).is_ok() {
                return Ok(());
            }
            self.state.lose(seen);
        }
        Err(Box::new(request.body))
    }

    /// The inner error concerns this message alone, such as `ETOOMANYREFS` if too many descriptors
    /// are in flight.
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

    /// The server answers at once or is gone, so that signals need not end this wait.
    fn wait_until(&self, events: i16) -> Result<(), Lost> {
        let mut fds = [pollfd(self.connection.as_fd().as_raw_fd(), events)];
        match wait::ppoll(&mut fds, None, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(_) => Err(Lost),
        }
    }
}

/// May the reply carry descriptors?
fn brings_fds(body: &RequestBody) -> bool {
    needs_fds(body)
        || matches!(
            body,
            RequestBody::Bind { .. }
                | RequestBody::Connect { .. }
                | RequestBody::PeerNotifier { .. }
        )
}

/// Is the reply useless without its descriptors, or does it move what they refer to?
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
