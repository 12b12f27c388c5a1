//! Sleeping until something of interest happens: to a session, to a kernel descriptor, or by the
//! clock. All blocking calls of the library come here.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portolan_sys::{clock, probes, wait};
use portolan_types::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::core::Core;
use crate::layers::{self, Layer};
use crate::process::Process;
use crate::table::Hidden;
use crate::watch::Role;
use crate::{cancel, inside};

/// What others signal to wake one sleeping thread.
#[derive(Debug)]
pub(crate) struct Waiter {
    eventfd: Hidden,
    is_asleep: AtomicBool,
    is_signalled: AtomicBool,
}

thread_local! {
    static MINE: RefCell<Option<Arc<Waiter>>> = const { RefCell::new(None) };
}

impl Waiter {
    /// The calling thread's own.
    pub(crate) fn mine() -> Result<Arc<Waiter>, Errno> {
        MINE.with(|mine| {
            let mut mine = mine.borrow_mut();
            if let Some(waiter) = &*mine {
                return Ok(Arc::clone(waiter));
            }
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let waiter = Arc::new(Waiter {
                eventfd: Hidden::new(eventfd(0, flags)?),
                is_asleep: AtomicBool::new(false),
                is_signalled: AtomicBool::new(false),
            });
            cancel::note(&waiter);
            *mine = Some(Arc::clone(&waiter));
            Ok(waiter)
        })
    }

    /// After fork the child shares the parent's eventfd and must not use it.
    pub(crate) fn forget_mine() {
        MINE.with(|mine| mine.borrow_mut().take());
    }

    /// Wakes the thread if it sleeps. The caller holds `Core`, as does the thread between its
    /// last look and [`Waiter::fall_asleep`]: no signal is lost.
    pub(crate) fn signal(&self) {
        if self.is_asleep.load(Ordering::Relaxed)
            && !self.is_signalled.swap(true, Ordering::Relaxed)
        {
            // Fails only if it is signalled already.
            let _ = write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Ends the sleep of a thread that polls it.
    pub(crate) fn pollfd(&self) -> libc::pollfd {
        pollfd(self.eventfd.as_fd().as_raw_fd(), libc::POLLIN)
    }

    pub(crate) fn fall_asleep(&self) {
        self.is_asleep.store(true, Ordering::Relaxed);
    }

    pub(crate) fn wake(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
        if self.is_signalled.swap(false, Ordering::Relaxed) {
            // Fails only if there is nothing to read.
            let _ = read(&self.eventfd, &mut [0; 8]);
        }
    }
}

/// How a wait ended.
#[derive(Debug)]
pub(crate) enum Woken<T> {
    Ready(T),
    /// One of the kernel descriptors has something (see `revents`).
    Kernel,
    TimedOut,
}

/// What a thread waits for besides sessions.
pub(crate) struct Sleep<'a> {
    pub(crate) kernel: &'a mut [libc::pollfd],
    pub(crate) deadline: Option<Instant>,
    pub(crate) mask: Option<&'a libc::sigset_t>,
}

/// What has ended a sleep.
struct Slept {
    /// A kernel descriptor of the caller has something.
    by_kernel: bool,
    /// A peer in a local session.
    was_rung: bool,
}

impl Sleep<'static> {
    pub(crate) fn until(deadline: Option<Instant>) -> Sleep<'static> {
        Sleep {
            kernel: &mut [],
            deadline,
            mask: None,
        }
    }
}

impl Process {
    /// Attends to the channel until `ready` gives something. Whoever makes `ready` true must
    /// signal this thread's [`Waiter`], which the caller has registered where it matters.
    pub(crate) fn wait<T>(
        &self,
        sleep: Sleep<'_>,
        ready: impl FnMut(&mut Core, Instant) -> Option<T>,
    ) -> Result<Woken<T>, Errno> {
        let woken = self.wait_attending(sleep, ready);
        self.rouse_helper();
        woken
    }

    fn wait_attending<T>(
        &self,
        mut sleep: Sleep<'_>,
        mut ready: impl FnMut(&mut Core, Instant) -> Option<T>,
    ) -> Result<Woken<T>, Errno> {
        let waiter = Waiter::mine()?;
        let spin = Duration::from_micros(u64::from(self.spin_us()));
        let mut spin_until = None;
        loop {
            let mut core = self.lock();
            let now = clock::now();
            core.attend(now);
            let news = (core.locals.news(), core.told);
            if let Some(value) = ready(&mut core, now) {
                core.hand_over();
                return Ok(Woken::Ready(value));
            }
            if cancel::is_wanted() {
                core.hand_over();
                return Err(Errno::CANCELED);
            }
            if (core.locals.news(), core.told) != news {
                // It came under the eyes of `ready`, but perhaps behind its back.
                continue;
            }
            if sleep.deadline.is_some_and(|deadline| deadline <= now) {
                core.hand_over();
                return Ok(Woken::TimedOut);
            }
            if now < *spin_until.get_or_insert(now + spin) {
                drop(core);
                std::hint::spin_loop();
                continue;
            }
            let Some(role) = core.fall_asleep(now, &waiter) else {
                continue;
            };
            let timer = if role == Role::Lead {
                core.stack.deadline()
            } else {
                None
            };
            let wake_on = core.wake_fds(&waiter, role);
            let bell = core.locals.pollfd().fd;
            waiter.fall_asleep();
            drop(core);

            let slept = sleep.sleep((&wake_on, bell), earliest(sleep.deadline, timer));

            let mut core = self.lock();
            waiter.wake();
            core.wake(clock::now(), &waiter, role);
            if slept.as_ref().is_ok_and(|slept| slept.was_rung) {
                core.locals.hear();
            }
            match slept {
                Ok(Slept {
                    by_kernel: true, ..
                }) => {
                    core.attend(clock::now());
                    core.hand_over();
                    return Ok(Woken::Kernel);
                }
                Ok(_) => {}
                Err(errno) => {
                    core.hand_over();
                    return Err(errno);
                }
            }
        }
    }
}

impl Core {
    /// Descriptors that end the sleep of a thread in that role.
    fn wake_fds(&self, waiter: &Waiter, role: Role) -> Vec<libc::pollfd> {
        let mut fds = vec![waiter.pollfd()];
        if role == Role::Lead {
            if self.watches_wire() {
                self.channel_fds(&mut fds);
            }
            if !self.locals.is_empty() {
                fds.push(self.locals.pollfd());
            }
        }
        fds
    }

    /// Descriptors by which the channel asks for attention.
    pub(crate) fn channel_fds(&self, fds: &mut Vec<libc::pollfd>) {
        let on_tap = if self.channel.is_main_full() {
            libc::POLLIN | libc::POLLOUT
        } else {
            libc::POLLIN
        };
        fds.push(pollfd(self.channel.tap_fd().as_raw_fd(), on_tap));
        fds.push(pollfd(self.channel.ring_fd().as_raw_fd(), libc::POLLIN));
        let own = self.channel.own_ring_fds();
        fds.extend(own.map(|ring| pollfd(ring.as_raw_fd(), libc::POLLIN)));
        let full = self.channel.full_fds();
        fds.extend(full.map(|tap| pollfd(tap.as_raw_fd(), libc::POLLOUT)));
    }
}

impl Sleep<'_> {
    fn sleep(
        &mut self,
        (own, bell): (&[libc::pollfd], RawFd),
        deadline: Option<Instant>,
    ) -> Result<Slept, Errno> {
        let mut all = Vec::with_capacity(own.len() + self.kernel.len());
        all.extend_from_slice(own);
        all.extend_from_slice(self.kernel);
        let outside = inside::leave();
        let asleep = layers::enter(Layer::Sleep);
        let polled = wait::ppoll(&mut all, deadline, self.mask);
        drop(asleep);
        probes::wake_up();
        drop(outside);
        cancel::hold();
        polled?;
        let (own, theirs) = all.split_at(own.len());
        self.kernel.copy_from_slice(theirs);
        Ok(Slept {
            by_kernel: theirs.iter().any(|fd| fd.revents != 0),
            was_rung: own.iter().any(|fd| fd.fd == bell && fd.revents != 0),
        })
    }
}

pub(crate) fn pollfd(fd: i32, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
