//! The background thread (helper) as the other threads see it: they start, wake and stop it, and let it rest. What it
//! does is in `threads/helper.rs`.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use portolan_sys::wait::{EventNotifier, pollfd};
use portolan_sys::{descriptor, thread};
use rustix::io::Errno;

use crate::descriptors::{self, InternalFd};
use crate::process::Process;
use crate::process::inside;
use crate::runtime::Core;
use crate::wait::turns::Turns;
use crate::wait::waiter::Waiter;

/// State shared by application threads and the helper.
pub(crate) struct BackgroundThread {
    /// No other thread may start it. Also set while it is stopped for a call.
    is_started: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) is_resting: AtomicBool,
    is_stopping: AtomicBool,
    /// Ends its sleep.
    pub(crate) notifier: EventNotifier,
    pub(crate) turns: Turns,
    /// The descriptors that it needs, until it starts: by then the program may be short of them.
    equipment: Mutex<Option<(Waiter, Unattended)>>,
    /// What it does until it is stopped.
    work: fn(&'static Process, Unattended),
}

impl BackgroundThread {
    pub(crate) fn new(work: fn(&'static Process, Unattended)) -> Result<BackgroundThread, Errno> {
        Ok(BackgroundThread {
            is_started: AtomicBool::new(false),
            thread: Mutex::new(None),
            is_resting: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            notifier: EventNotifier::from_fd(descriptors::hide(EventNotifier::new()?.into())),
            turns: Turns::default(),
            equipment: Mutex::new(Some((Waiter::new(), Unattended::new()))),
            work,
        })
    }

    pub(crate) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Process {
    /// Starts the helper with the first session.
    pub(crate) fn ensure_helper(&'static self) {
        if self.helper.is_started.swap(true, Ordering::AcqRel) {
            return;
        }
        self.start_helper();
    }

    pub(crate) fn start_helper(&'static self) {
        let equipment = self.helper.equipment.lock();
        let equipment = equipment.unwrap_or_else(PoisonError::into_inner).take();
        let (waiter, unattended) = equipment.unwrap_or_else(|| (Waiter::new(), Unattended::new()));
        let work = move || {
            waiter.adopt();
            (self.helper.work)(self, unattended);
        };
        let thread = thread::spawn_masked("portolan", work).ok();
        if thread.is_none() {
            // Retried with the next session; until then only application threads attend to the channel.
            self.helper.is_started.store(false, Ordering::Release);
        }
        *self.helper.thread() = thread;
    }

    /// Ends the helper. Returns when neither libc nor the kernel knows of it; true if it ran: then
    /// [`Process::start_helper`] must follow. Must be called without locks held.
    pub(crate) fn stop_helper(&self) -> bool {
        let Some(thread) = self.helper.thread().take() else {
            return false;
        };
        self.helper.is_stopping.store(true, Ordering::Release);
        self.helper.notifier.notify();
        // The thread may wait for a fork, which waits for threads that are inside.
        let outside = inside::leave();
        // A thread that has panicked has ended, too.
        let _ = thread.join();
        drop(outside);
        self.helper.notifier.drain();
        self.helper.is_stopping.store(false, Ordering::Release);
        true
    }

    /// Called by a leader that returns to its application.
    pub(crate) fn wake_helper(&self) {
        self.helper.turns.leave_to_program();
        if self.helper.is_resting.load(Ordering::Relaxed)
            && self.helper.is_resting.swap(false, Ordering::AcqRel)
        {
            self.helper.notifier.notify();
        }
    }
}

/// The rings, for which the filter wakes the helper if they are not read: edge-triggered, since
/// frames are often pending while their owner is about to read them.
pub(crate) struct Unattended {
    /// An epoll set; `None` if no descriptor was available: then only ticks are used.
    set: Option<InternalFd>,
    rings: usize,
    /// The renewal of the channel that the rings belong to.
    renewals: u32,
}

impl Unattended {
    fn new() -> Unattended {
        Unattended {
            set: descriptor::epoll_create(true).ok().map(InternalFd::new),
            rings: 0,
            renewals: 0,
        }
    }

    /// Watches new rings. None is removed from a channel before all are, with their server.
    pub(crate) fn watch(&mut self, core: &Core) {
        let channel = &core.channel;
        if channel.renewals() != self.renewals {
            *self = Unattended {
                renewals: channel.renewals(),
                ..Unattended::new()
            };
        }
        let Some(set) = &self.set else { return };
        let rings = std::iter::once(channel.ring_fd()).chain(channel.own_ring_fds());
        for ring in rings.skip(self.rings) {
            let event = libc::epoll_event {
                events: (libc::EPOLLIN | libc::EPOLLET) as u32,
                u64: 0,
            };
            let set = set.as_fd().as_raw_fd();
            // A ring that cannot be watched is checked at ticks.
            let _ =
                descriptor::epoll_control(set, libc::EPOLL_CTL_ADD, ring.as_raw_fd(), Some(event));
            self.rings += 1;
            channel.want_attention(true);
        }
    }

    pub(crate) fn pollfd(&self) -> Option<libc::pollfd> {
        let set = self.set.as_ref()?;
        Some(pollfd(set.as_fd().as_raw_fd(), libc::POLLIN))
    }

    /// Has the filter woken the helper since the last call?
    pub(crate) fn take(&self) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let set = self.set.as_ref().map(|set| set.as_fd().as_raw_fd());
        set.is_some_and(|set| {
            descriptor::epoll_collect(set, &mut events).is_ok_and(|count| count > 0)
        })
    }
}
