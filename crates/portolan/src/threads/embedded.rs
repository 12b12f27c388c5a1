//! Sleeping in another event loop: the program's own loop polls one descriptor for the library, the set that has all that
//! a sleeping thread of the library polls (`docs/design/waiting.md`). So the thread that runs the program's loop wakes
//! for a frame itself, and no other one has to wake it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use portolan_local::WakeBy;
use portolan_sys::wait::pollfd;
use portolan_sys::{clock, descriptor};
use portolan_types::Instant;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::descriptors::InternalFd;
use crate::process::Process;
use crate::runtime::Core;
use crate::threads::sleep::WatchSet;
use crate::wait::waiter::Waiter;
use crate::wait::watch::Role;

/// What another loop polls while the library sleeps there.
#[derive(Debug)]
pub struct EmbeddedWait {
    waiter: Arc<Waiter>,
    /// The kernel's set that the other loop polls.
    set: InternalFd,
    timer: InternalFd,
    /// When the timer expires, or has expired.
    expires: Option<Instant>,
    members: Vec<libc::pollfd>,
    /// `Some` while the library sleeps there.
    role: Option<Role>,
}

impl EmbeddedWait {
    pub(crate) fn new() -> Result<EmbeddedWait, Errno> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = InternalFd::new(timerfd_create(TimerfdClockId::Monotonic, flags)?);
        Ok(EmbeddedWait {
            waiter: Arc::new(Waiter::new()),
            set: InternalFd::new(descriptor::epoll_create(true)?),
            timer,
            expires: None,
            members: Vec::new(),
            role: None,
        })
    }

    pub(crate) fn waiter(&self) -> &Arc<Waiter> {
        &self.waiter
    }

    /// Watches exactly `wanted`. Each member is set anew: its number may have come to name another file.
    fn watch(&mut self, wanted: Vec<libc::pollfd>) -> Result<(), Errno> {
        for member in &self.members {
            if !wanted.iter().any(|wanted| wanted.fd == member.fd) {
                // It has left the set if it is closed.
                let _ = self.control(libc::EPOLL_CTL_DEL, member);
            }
        }
        for member in &wanted {
            match self.control(libc::EPOLL_CTL_MOD, member) {
                Err(Errno::NOENT) => self.control(libc::EPOLL_CTL_ADD, member)?,
                other => other?,
            }
        }
        self.members = wanted;
        Ok(())
    }

    fn control(&self, operation: i32, member: &libc::pollfd) -> Result<(), Errno> {
        let event = libc::epoll_event {
            // The bits of poll and epoll are the same.
            events: u32::from(member.events.cast_unsigned()),
            u64: 0,
        };
        let set = self.set.as_fd().as_raw_fd();
        descriptor::epoll_control(set, operation, member.fd, Some(event))
    }

    /// Sets the timer. One that has expired stays readable until it is set again.
    fn expire_at(&mut self, now: Instant, deadline: Option<Instant>) -> Result<(), Errno> {
        let has_expired = self.expires.is_some_and(|expires| expires <= now);
        if deadline == self.expires && !has_expired {
            return Ok(());
        }
        // Zero would disarm it.
        let left = deadline.map(|deadline| deadline.since(now).as_nanos().max(1));
        let left = left.unwrap_or(0);
        let setting = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: (left / 1_000_000_000) as i64,
                tv_nsec: (left % 1_000_000_000) as i64,
            },
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)?;
        self.expires = deadline;
        Ok(())
    }
}

impl AsFd for EmbeddedWait {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

/// The outcome of an attempt to fall asleep.
pub(crate) enum Begun<T> {
    Ready(T),
    /// Something has arrived in the meantime: the caller has to check again.
    Again,
    Asleep,
}

impl Process {
    /// Falls asleep in the other loop, unless `ready` returns a value. The other loop must poll the set, whose readiness ends the
    /// sleep, with [`Process::end_embedded`]. `also` is polled, too.
    pub(crate) fn begin_embedded<T>(
        &'static self,
        wait: &mut EmbeddedWait,
        also: Option<libc::pollfd>,
        ready: impl FnOnce(&mut Core) -> Option<T>,
    ) -> Result<Begun<T>, Errno> {
        self.take_outcomes();
        let mut core = self.lock();
        let now = clock::now();
        core.poll_idle(now);
        let news = (core.locals.news(), core.notify_seq);
        if let Some(value) = ready(&mut core) {
            core.leave_wait(now);
            return Ok(Begun::Ready(value));
        }
        if (core.locals.news(), core.notify_seq) != news {
            return Ok(Begun::Again);
        }
        let Some(role) = core.fall_asleep(now, &wait.waiter, WakeBy::Notifier) else {
            return Ok(Begun::Again);
        };
        wait.waiter.fall_asleep();
        wait.role = Some(role);
        core.leader_computes = role == Role::Lead;
        let mut set = WatchSet::new(&wait.waiter);
        let mut timer = None;
        if role == Role::Lead {
            let (wire, local) = (core.watches_wire(), !core.locals.is_empty());
            core.watch_as_leader(&mut set, wire, local);
            timer = core.deadline();
        }
        drop(core);
        let mut wanted = set.fds().to_vec();
        wanted.extend(also);
        wanted.push(pollfd(wait.timer.as_fd().as_raw_fd(), libc::POLLIN));
        wait.watch(wanted)?;
        wait.expire_at(now, timer)?;
        Ok(Begun::Asleep)
    }

    /// Ends the sleep in the other loop, if the library sleeps there.
    pub(crate) fn end_embedded(&self, wait: &mut EmbeddedWait) {
        let Some(role) = wait.role.take() else { return };
        let mut core = self.lock();
        wait.waiter.wake();
        let now = clock::now();
        core.wake(now, &wait.waiter, role);
        core.leader_computes = false;
        if !core.locals.is_empty() {
            core.locals.hear(now, WakeBy::Notifier);
        }
        drop(core);
        self.wake_helper();
    }
}
