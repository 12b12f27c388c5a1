//! The readiness of sockets for asynchronous programs (ADR 37). One thread per process waits for all of them in one of
//! Portolan's epoll sets and wakes the tasks. A member is one-shot, and armed only while a task waits: arming checks the
//! present readiness, so that nothing that arrives between a call that would block and the wait is lost.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;

use portolan_sys::wait::{pollfd, ppoll};
use portolan_sys::{descriptor, thread};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::posix::{self, CallError};
use crate::process::Process;

/// Number of events that are taken at a time.
const BATCH: usize = 256;
/// Name of the notifier in the set; sources count from 1.
const NOTIFIER: u64 = 0;

const NO_EVENTS: [libc::epoll_event; BATCH] = [libc::epoll_event { events: 0, u64: 0 }; BATCH];

/// What readers and writers wait for, as bits of epoll(7).
pub(super) const INPUT: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
pub(super) const OUTPUT: u32 = libc::EPOLLOUT as u32;
/// Events that are reported to all.
const ENDED: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;

/// A task, or another place to notify, that waits for a source.
#[derive(Debug)]
struct Waiting {
    /// Distinguishes those that wait for the same source.
    name: u64,
    /// The events that it waits for, besides `ENDED`.
    events: u32,
    waker: Waker,
}

/// A socket that tasks may wait for. To be dropped before its descriptor is closed.
#[derive(Debug)]
pub(super) struct Source(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    fd: RawFd,
    name: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Waiting>,
    is_member: bool,
}

#[derive(Debug)]
struct Reactor {
    set: RawFd,
    sources: Mutex<HashMap<u64, Weak<Shared>>>,
    /// A member of the set, by which a wait in the kernel alone is ended once there are sockets in the library.
    notifier: OwnedFd,
    is_in_kernel: AtomicBool,
    /// Number of drivers: while there are any, the thread does not wait for sockets.
    drivers: Mutex<usize>,
    drivers_changed: Condvar,
}

static REACTOR: OnceLock<Reactor> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
static NEXT_NAME: AtomicU64 = AtomicU64::new(NOTIFIER + 1);

/// Returns a name that no other waiting task has.
pub(super) fn new_name() -> u64 {
    NEXT_NAME.fetch_add(1, Ordering::Relaxed)
}

impl Source {
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub(super) fn new(fd: RawFd) -> io::Result<Source> {
        let name = new_name();
        let shared = Arc::new(Shared {
            fd,
            name,
            state: Mutex::default(),
        });
        Reactor::running()?
            .sources()
            .insert(name, Arc::downgrade(&shared));
        Ok(Source(shared))
    }

    /// Has `waker` woken once after one of `events`. It replaces the one that `name` left for the same before.
    pub(super) fn wait(&self, events: u32, name: u64, waker: &Waker) -> io::Result<()> {
        let mut state = self.0.state();
        let known = state
            .waiting
            .iter_mut()
            .find(|waiting| waiting.name == name && waiting.events == events);
        match known {
            Some(known) => known.waker.clone_from(waker),
            None => state.waiting.push(Waiting {
                name,
                events,
                waker: waker.clone(),
            }),
        }
        self.0.arm(&mut state)
    }

    /// Removes a task that no longer waits.
    pub(super) fn forget(&self, name: u64) {
        self.0
            .state()
            .waiting
            .retain(|waiting| waiting.name != name);
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let Some(reactor) = REACTOR.get() else { return };
        reactor.sources().remove(&self.0.name);
        if std::mem::take(&mut self.0.state().is_member) {
            // Fails if the socket has left the set by itself.
            let _ = control(reactor.set, libc::EPOLL_CTL_DEL, self.0.fd, None);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the next event reported that a task waits for.
    fn arm(&self, state: &mut State) -> io::Result<()> {
        let reactor = Reactor::running()?;
        let wanted = state.waiting.iter();
        let wanted = wanted.fold(0, |events, waiting| events | waiting.events);
        let event = libc::epoll_event {
            events: wanted | libc::EPOLLONESHOT as u32,
            u64: self.name,
        };
        let (usual, other, unless) = if state.is_member {
            (libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_ADD, Errno::NOENT)
        } else {
            (libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD, Errno::EXIST)
        };
        let mut armed = control(reactor.set, usual, self.fd, Some(event));
        // A session that has become the kernel's, or a relayed one, may have changed its set.
        if armed == Err(unless) {
            armed = control(reactor.set, other, self.fd, Some(event));
        }
        armed?;
        state.is_member = true;
        reactor.leave_kernel();
        Ok(())
    }

    /// Returns those to wake after `events`.
    fn take(&self, events: u32) -> Vec<Waiting> {
        let mut state = self.state();
        let is_meant = |waiting: &mut Waiting| events & (waiting.events | ENDED) != 0;
        let mut taken: Vec<_> = state.waiting.extract_if(.., is_meant).collect();
        // A failure is repeated, and reported, when the tasks that remain are polled.
        if !state.waiting.is_empty() && self.arm(&mut state).is_err() {
            taken.append(&mut state.waiting);
        }
        taken
    }
}

impl Reactor {
    /// Starts the thread for the first socket.
    fn running() -> io::Result<&'static Reactor> {
        if let Some(reactor) = REACTOR.get() {
            return Ok(reactor);
        }
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reactor) = REACTOR.get() {
            return Ok(reactor);
        }
        let reactor = Reactor::new()?;
        thread::spawn_masked("portolan-ready", || REACTOR.wait().run())?;
        Ok(REACTOR.get_or_init(|| reactor))
    }

    fn new() -> io::Result<Reactor> {
        let set = {
            let _inside = posix::enter();
            posix::epoll_create(libc::EPOLL_CLOEXEC)
        };
        let set = set.map_err(|error| error.errno_or(Errno::NOSYS))?;
        let notifier = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: NOTIFIER,
        };
        let fd = notifier.as_fd().as_raw_fd();
        control(set, libc::EPOLL_CTL_ADD, fd, Some(event))?;
        Ok(Reactor {
            set,
            sources: Mutex::default(),
            notifier,
            is_in_kernel: AtomicBool::new(false),
            drivers: Mutex::default(),
            drivers_changed: Condvar::new(),
        })
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<u64, Weak<Shared>>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = NO_EVENTS;
        loop {
            self.give_way();
            let count = self.wait(&mut events);
            let events = &events[..count];
            if events.iter().any(|event| event.u64 == NOTIFIER) {
                self.drain();
            }
            self.wake(events);
        }
    }

    /// Returns when there is no driver.
    fn give_way(&self) {
        let mut drivers = self.drivers();
        while *drivers > 0 {
            // A driver would find it readable for ever.
            self.drain();
            let changed = self.drivers_changed.wait(drivers);
            drivers = changed.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn drain(&self) {
        // Fails only if it is not notified.
        let _ = read(&self.notifier, &mut [0; 8]);
    }

    fn drivers(&self) -> MutexGuard<'_, usize> {
        self.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, events: &mut [libc::epoll_event]) -> usize {
        let waited = {
            let _inside = posix::enter();
            posix::epoll_wait(self.set, events, None, None)
        };
        match waited {
            Ok(count) => count,
            Err(CallError::NotOurs) => self.wait_in_kernel(events),
            // The descriptor is ours, and the buffer is not empty: only an interruption is left.
            Err(_) => 0,
        }
    }

    /// Waits while all sockets are the kernel's.
    fn wait_in_kernel(&self, events: &mut [libc::epoll_event]) -> usize {
        self.is_in_kernel.store(true, Ordering::SeqCst);
        // A socket that was opened before that has not notified.
        if Process::running().is_none() {
            let mut polled = [pollfd(self.set, libc::POLLIN)];
            let _ = ppoll(&mut polled, None, None);
        }
        self.is_in_kernel.store(false, Ordering::SeqCst);
        descriptor::epoll_collect(self.set, events).unwrap_or(0)
    }

    fn leave_kernel(&self) {
        if self.is_in_kernel.load(Ordering::SeqCst) && Process::running().is_some() {
            self.notify();
        }
    }

    /// Ends the thread's sleep.
    fn notify(&self) {
        // Fails only if it is notified already.
        let _ = write(&self.notifier, &1_u64.to_ne_bytes());
    }

    fn wake(&self, events: &[libc::epoll_event]) {
        for event in events {
            let (bits, name) = (event.events, event.u64);
            let source = self.sources().get(&name).and_then(Weak::upgrade);
            for waiting in source.iter().flat_map(|source| source.take(bits)) {
                waiting.waker.wake();
            }
        }
    }
}

/// Waits for the sockets instead of the thread, in an event loop of the program.
#[cfg(feature = "tokio")]
#[derive(Debug)]
pub(super) struct Driver {
    reactor: &'static Reactor,
    wait: posix::EmbeddedWait,
}

/// What a driver has done.
#[cfg(feature = "tokio")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driven {
    /// It has woken tasks.
    Woken,
    /// It sleeps until its descriptor is readable.
    Asleep,
}

#[cfg(feature = "tokio")]
impl Driver {
    pub(super) fn new() -> io::Result<Driver> {
        let reactor = Reactor::running()?;
        let _inside = posix::enter();
        let wait = posix::join_embedded(reactor.set);
        let wait = wait.map_err(|error| error.errno_or(Errno::NOSYS))?;
        let mut drivers = reactor.drivers();
        *drivers += 1;
        if *drivers == 1 {
            // The thread clears it when it has given way.
            reactor.notify();
            reactor.drivers_changed.notify_one();
        }
        drop(drivers);
        Ok(Driver { reactor, wait })
    }

    /// Wakes the tasks of sockets that have become ready; without any, falls asleep.
    pub(super) fn wait(&mut self) -> io::Result<Driven> {
        let mut events = NO_EVENTS;
        let waited = {
            let _inside = posix::enter();
            posix::epoll_wait_embedded(self.reactor.set, &mut events, &mut self.wait)
        };
        match waited {
            Ok(0) => Ok(Driven::Asleep),
            Ok(count) => {
                self.reactor.wake(&events[..count]);
                Ok(Driven::Woken)
            }
            Err(error) => Err(error.errno_or(Errno::NOSYS).into()),
        }
    }
}

#[cfg(feature = "tokio")]
impl AsFd for Driver {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.wait.as_fd()
    }
}

#[cfg(feature = "tokio")]
impl Drop for Driver {
    fn drop(&mut self) {
        let _inside = posix::enter();
        posix::leave_embedded(self.reactor.set, &mut self.wait);
        *self.reactor.drivers() -= 1;
        self.reactor.drivers_changed.notify_one();
    }
}

fn control(
    set: RawFd,
    operation: i32,
    fd: RawFd,
    event: Option<libc::epoll_event>,
) -> Result<(), Errno> {
    let _inside = posix::enter();
    match posix::epoll_control(set, operation, fd, event) {
        Ok(()) => Ok(()),
        Err(CallError::NotOurs) => descriptor::epoll_control(set, operation, fd, event),
        Err(error) => Err(error.errno_or(Errno::INTR)),
    }
}
