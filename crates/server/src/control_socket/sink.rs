//! Descriptors that came from others are closed here, by threads: the last close of a socket may wait for its peer
//! (`SO_LINGER`), and each close of a file for whoever serves its file system. So may the end of a UNIX socket in whose
//! queue such descriptors lie.
//!
//! One thread closes what does not wait. What may is closed by threads of the user whom it is from: a few of them, so that
//! closes that never end take nothing from others, and do not become more and more threads.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use portolan_sys::unix::{self, PairKind};

/// Of each user, for what may wait.
const THREADS: usize = 4;

/// A user of whom more wait to be closed is not served until they are: each message could bring more.
const MOST_WAITING: usize = 64;

/// Whose the server's own ends of descriptors are.
const SESSIONS: Option<u32> = None;

/// A descriptor, and the user whom it is from.
type Doomed = (Option<u32>, Closing);

/// A descriptor, and what says that it is not closed yet.
#[derive(Debug)]
struct Closing {
    fd: OwnedFd,
    // Fields are dropped in this order.
    _shown: Option<ShownSocket>,
}

impl From<OwnedFd> for Closing {
    fn from(fd: OwnedFd) -> Closing {
        Closing { fd, _shown: None }
    }
}

/// How many descriptors of which sockets that programs have shown are not closed yet.
type ShownSockets = Arc<Mutex<HashMap<u64, usize>>>;

/// One of them.
#[derive(Debug)]
struct ShownSocket {
    cookie: u64,
    all: ShownSockets,
}

impl ShownSocket {
    fn of(fd: &OwnedFd, all: &ShownSockets) -> Option<ShownSocket> {
        let cookie = unix::cookie(fd).ok()?;
        *lock(all).entry(cookie).or_default() += 1;
        let all = Arc::clone(all);
        Some(ShownSocket { cookie, all })
    }
}

impl Drop for ShownSocket {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        if let Some(count) = all.get_mut(&self.cookie) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.cookie);
            }
        }
    }
}

/// No thread panics with it in hand.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub struct Sink {
    /// Gathered until the turn ends.
    doomed: Vec<Doomed>,
    /// Of what came with messages, and its user.
    copies: Vec<(u32, Closing)>,
    shown: ShownSockets,
    /// The kernel refuses what would lie in the server's end of a session's descriptor.
    ends_are_empty: bool,
    thread: Sender<Vec<Doomed>>,
    waiting: Arc<Waiting>,
}

impl Sink {
    pub fn new() -> Sink {
        let (thread, doomed) = mpsc::channel();
        let waiting = Arc::new(Waiting::default());
        let theirs = Arc::clone(&waiting);
        // Ends when the server does.
        thread::spawn(move || {
            let doomed = doomed.iter().flatten();
            doomed.for_each(|(whose, closing)| theirs.close(whose, closing));
        });
        Sink {
            doomed: Vec::new(),
            copies: Vec::new(),
            shown: ShownSockets::default(),
            ends_are_empty: unix::socket_pair(PairKind::Stream)
                .is_ok_and(|(end, _)| unix::refuse_descriptors(end)),
            thread,
            waiting,
        }
    }

    /// Has the server's end of a session's descriptor closed, which takes no descriptors.
    pub fn close(&mut self, end: OwnedFd) {
        if self.ends_are_empty {
            drop(end)
        } else {
            self.doomed.push((SESSIONS, end.into()))
        }
    }

    /// Has a descriptor closed that is a user's, or that his messages may lie in.
    pub fn close_of(&mut self, uid: u32, fd: impl Into<OwnedFd>) {
        let fd: OwnedFd = fd.into();
        self.doomed.push((Some(uid), fd.into()));
    }

    /// The same of a socket whose descriptors are counted: [`Sink::is_closing`] until it is closed.
    pub fn close_shown(&mut self, uid: u32, fd: OwnedFd) {
        let shown = ShownSocket::of(&fd, &self.shown);
        let closing = Closing { fd, _shown: shown };
        self.doomed.push((Some(uid), closing));
    }

    /// Are there descriptors of the socket here that wait to be closed?
    pub fn is_closing(&self, socket: impl AsFd) -> bool {
        unix::cookie(socket).is_ok_and(|cookie| lock(&self.shown).contains_key(&cookie))
    }

    /// Sorts out what came with a message: what no request carries is closed. Of the others copies are, so that the
    /// server's own close is never the last.
    pub fn screen(&mut self, uid: u32, fds: &mut Vec<OwnedFd>) {
        self.close_copies();
        for fd in std::mem::take(fds) {
            if unix::closes_at_once(&fd) {
                fds.push(fd);
                continue;
            }
            if !unix::is_socket_or_memory(&fd) {
                self.waiting.add(Some(uid), fd.into());
                continue;
            }
            // Without a copy, for want of descriptors, the server's close may be the last.
            let copy = rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 0).ok();
            let shown = |copy: &OwnedFd| ShownSocket::of(copy, &self.shown);
            self.copies.extend(copy.map(|copy| {
                let shown = shown(&copy);
                let closing = Closing {
                    fd: copy,
                    _shown: shown,
                };
                (uid, closing)
            }));
            fds.push(fd);
        }
    }

    /// Closes the copies of what came with the message at hand, which is counted now and is to be given to `close` later.
    pub fn drop_copies(&mut self) {
        self.copies.clear();
    }

    /// Do so many descriptors of the user wait to be closed that no more are taken?
    pub fn is_clogged(&self, uid: u32) -> bool {
        self.waiting.is_clogged(uid)
    }

    /// Called at the end of a turn, when the server has closed its own.
    pub fn flush(&mut self) {
        self.close_copies();
        if !self.doomed.is_empty() {
            // The thread ends with the server only.
            let _ = self.thread.send(std::mem::take(&mut self.doomed));
        }
    }

    fn close_copies(&mut self) {
        for (uid, copy) in self.copies.drain(..) {
            self.waiting.add(Some(uid), copy);
        }
    }
}

/// Descriptors whose close may take as long as somebody likes.
#[derive(Debug, Default)]
struct Waiting {
    users: Mutex<HashMap<Option<u32>, User>>,
    /// Of all users, those that are being closed included.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct User {
    queue: VecDeque<Closing>,
    threads: usize,
}

impl Waiting {
    /// What the server itself had: its close does not wait but for what a program may have done to it.
    fn close(self: &Arc<Waiting>, whose: Option<u32>, closing: Closing) {
        let fd = &closing.fd;
        if unix::may_wait_when_closed(fd) || !unix::closes_at_once(fd) {
            self.add(whose, closing);
        } else {
            drop(closing);
        }
    }

    fn add(self: &Arc<Waiting>, whose: Option<u32>, closing: Closing) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut users = self.users();
        let user = users.entry(whose).or_default();
        user.queue.push_back(closing);
        if user.threads == THREADS {
            return;
        }
        let theirs = Arc::clone(self);
        // Where the kernel has no thread, the next descriptor tries again.
        let started = thread::Builder::new().spawn(move || while theirs.close_next(whose) {});
        user.threads += usize::from(started.is_ok());
    }

    /// False when there is none, and the thread has ended.
    fn close_next(&self, whose: Option<u32>) -> bool {
        let mut users = self.users();
        let Some(user) = users.get_mut(&whose) else {
            return false;
        };
        let Some(closing) = user.queue.pop_front() else {
            user.threads -= 1;
            if user.threads == 0 {
                users.remove(&whose);
            }
            return false;
        };
        drop(users);
        drop(closing);
        self.count.fetch_sub(1, Ordering::Relaxed);
        true
    }

    fn is_clogged(&self, uid: u32) -> bool {
        if self.count.load(Ordering::Relaxed) <= MOST_WAITING {
            return false;
        }
        let users = self.users();
        users
            .get(&Some(uid))
            .is_some_and(|user| user.queue.len() > MOST_WAITING)
    }

    fn users(&self) -> MutexGuard<'_, HashMap<Option<u32>, User>> {
        lock(&self.users)
    }
}
