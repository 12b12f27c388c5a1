//! Closes descriptors received from others, in threads: the last close of a socket may wait for its peer (`SO_LINGER`),
//! and each close of a file for the server of its file system. The same applies to the end of a UNIX socket that has
//! such descriptors queued.
//!
//! One thread closes what does not wait. What may is closed by threads of the user whom it is from.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use portolan_bpf::{is_extension_map, map_id};
use portolan_sys::unix::{self, Connection, PairKind};

use crate::control_socket::client::PendingReply;
use crate::user_threads::{UserThreads, WaitsFor};

/// Above this many pending closes a user's requests wait until some have ended: each could bring more.
const MOST_PENDING: usize = 64;

/// Above this many, which requests before a hang-up can bring, its connections are closed.
const MOST_LAGGING: usize = 1024;

/// The same if none has begun for so long.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// How the closes of what a user has sent proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closes {
    Proceed,
    /// Many are pending.
    Lag,
    /// Too many are, or those do not end.
    Stick,
}

/// Owner of the server's own ends of descriptors.
const SESSIONS: Option<u32> = None;

/// A descriptor, and the user that it is from.
type Doomed = (Option<u32>, Closing);

/// A descriptor, and its entry among those not closed yet.
#[derive(Debug)]
struct Closing {
    fd: OwnedFd,
    // Fields are dropped in this order.
    counted: Option<Counted>,
}

impl From<OwnedFd> for Closing {
    fn from(fd: OwnedFd) -> Closing {
        Closing { fd, counted: None }
    }
}

/// What others wait for the end of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Awaited {
    /// A socket that a program has shown, by what the kernel calls it.
    Shown(u64),
    /// What holds a UDP port.
    Port(u16),
}

/// How many descriptors of each are not closed yet.
type Counts = Arc<Mutex<HashMap<Awaited, usize>>>;

/// The entry of one descriptor.
#[derive(Debug)]
struct Counted {
    what: Awaited,
    all: Counts,
}

impl Counted {
    fn new(what: Awaited, all: &Counts) -> Counted {
        *lock(all).entry(what).or_default() += 1;
        let all = Arc::clone(all);
        Counted { what, all }
    }

    fn shown(fd: &OwnedFd, all: &Counts) -> Option<Counted> {
        let cookie = unix::cookie(fd).ok()?;
        Some(Counted::new(Awaited::Shown(cookie), all))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        if let Some(count) = all.get_mut(&self.what) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.what);
            }
        }
    }
}

/// No thread panics while it holds the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(crate) struct Sink {
    /// Collected until the turn ends.
    doomed: Vec<Doomed>,
    /// Copies of descriptors received with messages, and their user.
    copies: Vec<(u32, Closing)>,
    awaited: Counts,
    /// The kernel refuses what would lie in the server's end of a session's descriptor.
    ends_are_empty: bool,
    thread: Sender<Vec<Doomed>>,
    threads: Arc<UserThreads>,
}

impl Sink {
    pub(crate) fn new(threads: Arc<UserThreads>) -> Sink {
        let (thread, doomed) = mpsc::channel();
        let theirs = Arc::clone(&threads);
        // Ends when the server does.
        thread::spawn(move || {
            let doomed = doomed.iter().flatten();
            doomed.for_each(|(whose, closing)| close(&theirs, whose, closing));
        });
        Sink {
            doomed: Vec::new(),
            copies: Vec::new(),
            awaited: Counts::default(),
            ends_are_empty: unix::socket_pair(PairKind::Stream)
                .is_ok_and(|(end, _)| unix::refuse_descriptors(end)),
            thread,
            threads,
        }
    }

    /// Closes the server's end of a session's descriptor, which accepts no descriptors.
    pub(crate) fn close(&mut self, end: OwnedFd) {
        if self.ends_are_empty {
            drop(end)
        } else {
            self.doomed.push((SESSIONS, end.into()))
        }
    }

    /// Closes a descriptor that is from a user, or that may have the user's messages queued.
    pub(crate) fn close_of(&mut self, uid: u32, fd: impl Into<OwnedFd>) {
        let fd: OwnedFd = fd.into();
        self.doomed.push((Some(uid), fd.into()));
    }

    /// Closes a control connection, whose peer may have sent what nobody has received.
    pub(crate) fn close_connection(&mut self, uid: u32, connection: Connection) {
        if connection.discard_unread() {
            drop(connection);
        } else {
            let fd: OwnedFd = connection.into();
            add(&self.threads, Some(uid), fd.into());
        }
    }

    /// Replies with their descriptors: of a kernel socket the program may have closed its copy already.
    pub(crate) fn drop_replies(
        &mut self,
        uid: u32,
        replies: impl IntoIterator<Item = PendingReply>,
    ) {
        for fd in replies.into_iter().flat_map(|reply| reply.fds) {
            if unix::is_datagram_socket(&fd) {
                self.close_of(uid, fd);
            }
        }
    }

    /// The same of a socket whose descriptors are counted: [`Sink::is_closing`] until it is closed.
    pub(crate) fn close_shown(&mut self, uid: u32, fd: OwnedFd) {
        let counted = Counted::shown(&fd, &self.awaited);
        self.doomed.push((Some(uid), Closing { fd, counted }));
    }

    /// Has a kernel socket closed that may be a member of groups, which it leaves then: [`Sink::is_closing_port`] until it is
    /// closed.
    pub(crate) fn close_port(&mut self, uid: u32, fd: OwnedFd, port: u16) {
        let counted = Some(Counted::new(Awaited::Port(port), &self.awaited));
        let closing = Closing { fd, counted };
        let close = Box::new(move || drop(closing));
        self.threads.add(Some(uid), WaitsFor::Network, close);
    }

    /// Does a kernel socket still hold the UDP port that is to be closed?
    pub(crate) fn is_closing_port(&self, port: u16) -> bool {
        lock(&self.awaited).contains_key(&Awaited::Port(port))
    }

    /// Returns whether the server has descriptors of the socket that are still to be closed.
    pub(crate) fn is_closing(&self, socket: impl AsFd) -> bool {
        let is_awaited = |cookie| lock(&self.awaited).contains_key(&Awaited::Shown(cookie));
        unix::cookie(socket).is_ok_and(is_awaited)
    }

    /// Screens the descriptors of a message: those that no request carries are closed. The others are copied, so that
    /// the server's own close is never the last.
    pub(crate) fn screen(&mut self, uid: u32, fds: &mut Vec<OwnedFd>) {
        self.close_copies();
        for fd in std::mem::take(fds) {
            if unix::closes_at_once(&fd) {
                fds.push(fd);
                continue;
            }
            if !unix::is_socket_or_memory(&fd) {
                // The kernel frees maps by itself.
                if map_id(fd.as_fd()).is_some() || is_extension_map(fd.as_fd()) {
                    fds.push(fd);
                    continue;
                }
                add(&self.threads, Some(uid), fd.into());
                continue;
            }
            // Without a copy, for lack of descriptors, the server's close may be the last.
            let copy = rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 0).ok();
            self.copies.extend(copy.map(|fd| {
                let counted = Counted::shown(&fd, &self.awaited);
                (uid, Closing { fd, counted })
            }));
            fds.push(fd);
        }
    }

    /// Closes the copies of what came with the message at hand, which is counted now, or asked, and is to be given to `close`
    /// later.
    pub(crate) fn drop_copies_of(&mut self, fd: &OwnedFd) {
        let Ok(cookie) = unix::cookie(fd) else {
            return;
        };
        let is_other = |closing: &Closing| {
            let counted = closing.counted.as_ref().map(|counted| counted.what);
            counted != Some(Awaited::Shown(cookie))
        };
        self.copies.retain(|(_, closing)| is_other(closing));
    }

    pub(crate) fn closes_of(&self, uid: u32) -> Closes {
        let (threads, uid) = (&self.threads, Some(uid));
        let pending = threads.waiting(uid, WaitsFor::Close);
        if pending <= MOST_PENDING {
            return Closes::Proceed;
        }
        let is_stuck = threads.stands_still_for(uid, WaitsFor::Close) >= STUCK_AFTER;
        if is_stuck || pending > MOST_LAGGING {
            Closes::Stick
        } else {
            Closes::Lag
        }
    }

    /// Called at the end of a turn, when the server has closed its own descriptors.
    pub(crate) fn flush(&mut self) {
        self.close_copies();
        self.threads.try_again();
        if !self.doomed.is_empty() {
            // The thread ends only with the server.
            let _ = self.thread.send(std::mem::take(&mut self.doomed));
        }
    }

    fn close_copies(&mut self) {
        for (uid, copy) in self.copies.drain(..) {
            add(&self.threads, Some(uid), copy);
        }
    }
}

/// What the server itself had: its close does not wait but for what a program may have done to it.
fn close(threads: &Arc<UserThreads>, whose: Option<u32>, closing: Closing) {
    let fd = &closing.fd;
    if unix::may_wait_when_closed(fd) || !unix::closes_at_once(fd) {
        add(threads, whose, closing);
    }
}

fn add(threads: &Arc<UserThreads>, whose: Option<u32>, closing: Closing) {
    threads.add(whose, WaitsFor::Close, Box::new(move || drop(closing)));
}
