//! The readiness of a socket: calls that tasks repeat until they no longer block, and waiting without a call.
//!
//! As with tokio's own sockets, readiness is remembered until a call would block: waiting for it once more then returns
//! at once, and the call tells. Otherwise the library is asked, so that nothing depends on an event that is still to come.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use ::tokio::io::{Interest, Ready};
use ::tokio::task::coop::poll_proceed;
use portolan_sys::clock;
use portolan_sys::wait::{pollfd, ppoll};
use rustix::io::Errno;

use crate::net::reactor::{INPUT, OUTPUT, Source, new_name};
use crate::posix::{self, CallError};

/// Name of the one task per direction that uses the `poll_` functions.
const POLLING: u64 = 0;

const READ: u32 = libc::EPOLLIN as u32;
const WRITE: u32 = libc::EPOLLOUT as u32;
const PRIORITY: u32 = libc::EPOLLPRI as u32;
const READ_END: u32 = libc::EPOLLRDHUP as u32;
const ERROR: u32 = libc::EPOLLERR as u32;
const END: u32 = libc::EPOLLHUP as u32;

/// A socket that tasks may wait for. To be dropped before its descriptor is closed.
#[derive(Debug)]
pub(super) struct Readiness {
    source: Source,
    fd: RawFd,
    /// `READ` and `WRITE`: the socket was ready, and no call has found that it is not.
    remembered: AtomicU32,
    /// A read of a stream has taken all that there was.
    is_drained: AtomicBool,
}

impl Readiness {
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub(super) fn new(socket: &impl AsRawFd) -> io::Result<Readiness> {
        let fd = socket.as_raw_fd();
        Ok(Readiness {
            source: Source::new(fd)?,
            fd,
            remembered: AtomicU32::new(0),
            is_drained: AtomicBool::new(false),
        })
    }

    /// Has the socket considered ready until a call would block.
    pub(super) fn assume(&self) {
        self.remembered.store(READ | WRITE, Ordering::Relaxed);
    }

    /// A read has filled a part of its buffer only: the next one would find nothing, most likely, and need not try before
    /// it waits, which notices what has come.
    pub(super) fn note_drained(&self) {
        self.remembered.fetch_and(!READ, Ordering::Relaxed);
        self.is_drained.store(true, Ordering::Relaxed);
    }

    /// True once after [`Readiness::note_drained`].
    pub(super) fn take_drained(&self) -> bool {
        self.is_drained.load(Ordering::Relaxed) && self.is_drained.swap(false, Ordering::Relaxed)
    }

    /// Makes a call as `poll_` functions do: the last caller's task is woken.
    pub(super) fn poll<T>(
        &self,
        interest: Interest,
        context: &mut Context<'_>,
        call: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        self.poll_as(POLLING, interest, context, call)
    }

    /// Repeats a call until it does not block. Any number of tasks may do so at once.
    pub(super) async fn run<T>(
        &self,
        interest: Interest,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let waiting = Waiting::new(self);
        poll_fn(|context| self.poll_as(waiting.name, interest, context, &mut call)).await
    }

    /// Makes a call within the task's budget. If it would block, the task is woken once that may have changed.
    fn poll_as<T>(
        &self,
        name: u64,
        interest: Interest,
        context: &mut Context<'_>,
        call: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        let budget = ready!(poll_proceed(context));
        let polled = self.call_or_wait(name, interest, context.waker(), call);
        if polled.is_ready() {
            budget.made_progress();
        }
        polled
    }

    fn call_or_wait<T>(
        &self,
        name: u64,
        interest: Interest,
        waker: &Waker,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            match self.attempt(interest, &mut call) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return Poll::Ready(result),
            }
        }
        match self.source.wait(events(interest), name, waker) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// Makes a call once.
    pub(super) fn attempt<T>(
        &self,
        interest: Interest,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let result = call();
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::WouldBlock
        {
            self.remembered
                .fetch_and(!events(interest), Ordering::Relaxed);
        }
        result
    }

    /// Makes a call once if the socket is ready for it; fails with `WouldBlock` otherwise.
    pub(super) fn attempt_if_ready<T>(
        &self,
        interest: Interest,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.check(interest)?;
        self.attempt(interest, call)
    }

    /// Waits until the socket is ready, and returns for what.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        self.wait_for(interest, || self.ask(interest)).await
    }

    /// As [`Readiness::ready`], without asking for what.
    pub(super) async fn wait(&self, interest: Interest) -> io::Result<()> {
        self.wait_for(interest, || self.check(interest)).await
    }

    /// As [`Readiness::run`], but waiting alone costs nothing of the task's budget, as in tokio.
    async fn wait_for<T>(
        &self,
        interest: Interest,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let waiting = Waiting::new(self);
        let poll = |context: &mut Context<'_>| {
            self.call_or_wait(waiting.name, interest, context.waker(), &mut call)
        };
        poll_fn(poll).await
    }

    /// As [`Readiness::wait`], for one task per interest.
    pub(super) fn poll_wait(
        &self,
        interest: Interest,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(interest, context, || self.check(interest))
    }

    fn check(&self, interest: Interest) -> io::Result<()> {
        if self.remembered.load(Ordering::Relaxed) & events(interest) != 0 {
            return Ok(());
        }
        self.ask(interest).map(drop)
    }

    /// Returns the present readiness and what is remembered; `WouldBlock` if there is none.
    fn ask(&self, interest: Interest) -> io::Result<Ready> {
        let present = self.present(events(interest))?;
        let news = present & (READ | WRITE);
        let remembered = self.remembered.fetch_or(news, Ordering::Relaxed);
        let ready = readiness(present | remembered) & meaning(interest);
        if ready.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(ready)
    }

    /// Returns those of `events` that the socket has now, and its end or an error.
    fn present(&self, events: u32) -> io::Result<u32> {
        // The bits are those of poll(2), whose events are bits 0 to 13.
        let mut polled = [pollfd(self.fd, events as i16)];
        let asked = {
            let _inside = posix::enter();
            posix::poll(&mut polled, Some(Duration::ZERO), None)
        };
        match asked {
            Ok(_) => {}
            Err(CallError::NotOurs) => {
                ppoll(&mut polled, Some(clock::now()), None)?;
            }
            Err(error) => return Err(error.errno_or(Errno::INTR).into()),
        }
        Ok(u32::from(polled[0].revents as u16))
    }
}

/// A task that may wait. Dropping it, when it is cancelled, for example, removes the task.
struct Waiting<'a> {
    source: &'a Source,
    name: u64,
}

impl Waiting<'_> {
    fn new(readiness: &Readiness) -> Waiting<'_> {
        Waiting {
            source: &readiness.source,
            name: new_name(),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.source.forget(self.name);
    }
}

/// The events that an interest waits for, besides errors and the end.
fn events(interest: Interest) -> u32 {
    let wanted = [
        (interest.is_readable(), INPUT),
        (interest.is_writable(), OUTPUT),
        (interest.is_priority(), PRIORITY),
    ];
    let wanted = wanted.iter().filter(|(is_wanted, _)| *is_wanted);
    wanted.fold(0, |all, (_, events)| all | events)
}

/// The readiness that an interest asks for. An end and an error, which are always reported, satisfy each: a wait that they
/// did not end would be woken again at once.
fn meaning(interest: Interest) -> Ready {
    let closed = Ready::READ_CLOSED | Ready::WRITE_CLOSED;
    let wanted = [
        (interest.is_readable(), Ready::READABLE | Ready::READ_CLOSED),
        (
            interest.is_writable(),
            Ready::WRITABLE | Ready::WRITE_CLOSED,
        ),
        (
            interest.is_priority(),
            Ready::PRIORITY | Ready::ERROR | Ready::READ_CLOSED,
        ),
        (interest.is_error(), Ready::ERROR | closed),
    ];
    all_of(wanted)
}

/// What events mean. A call returns a pending error, whether it reads or writes.
fn readiness(events: u32) -> Ready {
    let has = |bits| events & bits != 0;
    let has_failed = has(END) || events & (WRITE | ERROR) == WRITE | ERROR || events == ERROR;
    all_of([
        (has(READ | PRIORITY | ERROR), Ready::READABLE),
        (has(WRITE | ERROR), Ready::WRITABLE),
        (has(END | READ_END), Ready::READ_CLOSED),
        (has_failed, Ready::WRITE_CLOSED),
        (has(PRIORITY), Ready::PRIORITY),
        (has(ERROR), Ready::ERROR),
    ])
}

/// Combines what is true.
fn all_of(parts: impl IntoIterator<Item = (bool, Ready)>) -> Ready {
    let parts = parts.into_iter().filter(|(is_true, _)| *is_true);
    parts.fold(Ready::EMPTY, |all, (_, ready)| all | ready)
}

/// Methods of sockets that wait for readiness, by a field `readiness`.
macro_rules! readiness_methods {
    () => {
        /// Waits until the socket is ready for `interest`, and returns for what, which includes the ends of a
        /// connection. Readiness is remembered until a call through this type would block, so that a call may still
        /// find nothing to do. Any number of tasks can wait at once, and a wait can be cancelled.
        ///
        /// # Errors
        /// The process has no free descriptor.
        pub async fn ready(
            &self,
            interest: ::tokio::io::Interest,
        ) -> ::std::io::Result<::tokio::io::Ready> {
            self.readiness.ready(interest).await
        }

        /// Waits until there is something to receive, or the peer has ended; as `ready(Interest::READABLE)`.
        ///
        /// # Errors
        /// The process has no free descriptor.
        pub async fn readable(&self) -> ::std::io::Result<()> {
            self.readiness.wait(::tokio::io::Interest::READABLE).await
        }

        /// Waits until something can be sent; as `ready(Interest::WRITABLE)`.
        ///
        /// # Errors
        /// The process has no free descriptor.
        pub async fn writable(&self) -> ::std::io::Result<()> {
            self.readiness.wait(::tokio::io::Interest::WRITABLE).await
        }

        /// Makes a call of the program's own if the socket is ready for `interest`. If it returns `WouldBlock`, the
        /// socket is no longer considered ready. The call must not be one of this type's methods; those of
        /// [`get_ref`](Self::get_ref) are suitable.
        ///
        /// # Errors
        /// `WouldBlock`: the socket is not ready. An error of the call.
        pub fn try_io<R>(
            &self,
            interest: ::tokio::io::Interest,
            call: impl FnOnce() -> ::std::io::Result<R>,
        ) -> ::std::io::Result<R> {
            self.readiness.attempt_if_ready(interest, call)
        }

        /// Repeats a call of the program's own, as [`try_io`](Self::try_io), until it does not return `WouldBlock`.
        /// Waits for `interest` before each repetition.
        ///
        /// # Errors
        /// An error of the call.
        pub async fn async_io<R>(
            &self,
            interest: ::tokio::io::Interest,
            call: impl FnMut() -> ::std::io::Result<R>,
        ) -> ::std::io::Result<R> {
            self.readiness.run(interest, call).await
        }
    };
}
pub(super) use readiness_methods;

#[cfg(test)]
mod tests;
