//! The background thread (helper) as the other threads see it: they start, wake and stop it, and let it rest. What it
//! does is in `threads/helper.rs`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use portolan_sys::thread;
use portolan_sys::wait::EventNotifier;
use rustix::io::Errno;

use crate::channel::ring_events::RingEvents;
use crate::descriptors;
use crate::process::Process;
use crate::process::inside;
use crate::wait::turns::Turns;
use crate::wait::waiter::Waiter;

/// State shared by application threads and the helper.
pub(crate) struct BackgroundThread {
    /// No other thread may start it. Also set while it is stopped for a call.
    is_started: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) is_resting: AtomicBool,
    is_stopping: AtomicBool,
    /// Sessions of an earlier server are here that this one has not adopted.
    has_unadopted: AtomicBool,
    /// Ends its sleep.
    pub(crate) notifier: EventNotifier,
    pub(crate) turns: Turns,
    /// The descriptors that it needs, until it starts: by then the program may be short of them.
    equipment: Mutex<Option<(Waiter, RingEvents)>>,
    /// What it does until it is stopped.
    work: fn(&'static Process, RingEvents),
}

impl BackgroundThread {
    pub(crate) fn new(work: fn(&'static Process, RingEvents)) -> Result<BackgroundThread, Errno> {
        Ok(BackgroundThread {
            is_started: AtomicBool::new(false),
            thread: Mutex::new(None),
            is_resting: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            has_unadopted: AtomicBool::new(false),
            notifier: EventNotifier::from_fd(descriptors::hide(EventNotifier::new()?.into())),
            turns: Turns::default(),
            equipment: Mutex::new(Some((Waiter::new(), RingEvents::new()))),
            work,
        })
    }

    pub(crate) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Returns whether sessions have come that are to be adopted.
    pub(crate) fn takes_unadopted(&self) -> bool {
        self.has_unadopted.swap(false, Ordering::AcqRel)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Process {
    /// A session of an earlier server has come, or was to be opened by that: the helper sees to it.
    pub(crate) fn note_unadopted(&'static self) {
        self.helper.has_unadopted.store(true, Ordering::Release);
        self.ensure_helper();
        self.helper.notifier.notify();
    }

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
        let (waiter, unattended) = equipment.unwrap_or_else(|| (Waiter::new(), RingEvents::new()));
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
