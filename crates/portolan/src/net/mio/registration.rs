//! A socket's place in a `mio::Poll`: one eventfd per direction is a member of the kernel's set behind it.
//!
//! Readable is notified by adding to a counter. Writable is an eventfd, too: it is full, and notifies when it is
//! emptied. So each direction is reported as itself, and only when it is meant.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};

use mio::event::Source as _;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::net::reactor::{INPUT, OUTPUT, Source};

/// The only name that waits for these sources.
const POLL: u64 = 0;

/// An eventfd with this count is not writable (eventfd(2)).
const FULL: u64 = u64::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Direction {
    fn events(self) -> u32 {
        match self {
            Direction::Read => INPUT,
            Direction::Write => OUTPUT,
        }
    }
}

#[derive(Debug)]
pub(super) struct Registration {
    source: Source,
    notifiers: Vec<(Direction, Arc<Notifier>, Waker)>,
}

#[derive(Debug)]
enum Notifier {
    Readable(OwnedFd),
    Writable(OwnedFd),
}

impl Registration {
    pub(super) fn of(socket: &impl AsRawFd) -> io::Result<Registration> {
        Ok(Registration {
            source: Source::new(socket.as_raw_fd())?,
            notifiers: Vec::new(),
        })
    }

    /// # Errors
    /// `AlreadyExists`: it is registered. The process has no free descriptor.
    pub(super) fn register(
        &mut self,
        registry: &Registry,
        token: Token,
        interests: Interest,
    ) -> io::Result<()> {
        if !self.notifiers.is_empty() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let wanted = [
            (interests.is_readable(), Direction::Read),
            (interests.is_writable(), Direction::Write),
        ];
        for (is_wanted, direction) in wanted {
            if is_wanted {
                self.add(registry, token, direction)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, registry: &Registry, token: Token, direction: Direction) -> io::Result<()> {
        let notifier = Arc::new(Notifier::new(direction)?);
        let fd = notifier.fd().as_fd().as_raw_fd();
        let interest = match direction {
            Direction::Read => Interest::READABLE,
            Direction::Write => Interest::WRITABLE,
        };
        SourceFd(&fd).register(registry, token, interest)?;
        let waker = Waker::from(Arc::clone(&notifier));
        self.source.wait(direction.events(), POLL, &waker)?;
        self.notifiers.push((direction, notifier, waker));
        Ok(())
    }

    /// # Errors
    /// `NotFound`: it is not registered.
    pub(super) fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        if self.notifiers.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.source.forget(POLL);
        for (_, notifier, _) in self.notifiers.drain(..) {
            SourceFd(&notifier.fd().as_fd().as_raw_fd()).deregister(registry)?;
        }
        Ok(())
    }

    /// Makes a call. If it would block, the next readiness is reported.
    pub(super) fn call<T>(
        &self,
        direction: Direction,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let result = call();
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::WouldBlock
        {
            let its = self.notifiers.iter().find(|(its, ..)| *its == direction);
            if let Some((_, _, waker)) = its {
                self.source.wait(direction.events(), POLL, waker)?;
            }
        }
        result
    }
}

impl Notifier {
    fn new(direction: Direction) -> io::Result<Notifier> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(match direction {
            Direction::Read => Notifier::Readable(fd),
            Direction::Write => {
                write(&fd, &FULL.to_ne_bytes())?;
                Notifier::Writable(fd)
            }
        })
    }

    fn fd(&self) -> &OwnedFd {
        match self {
            Notifier::Readable(fd) | Notifier::Writable(fd) => fd,
        }
    }
}

impl Wake for Notifier {
    fn wake(self: Arc<Notifier>) {
        // Writing fails only if the count is at its maximum, and reading if it is zero, which it is not here.
        match &*self {
            Notifier::Readable(fd) => {
                let _ = write(fd, &1_u64.to_ne_bytes());
            }
            Notifier::Writable(fd) => {
                let _ = write(fd, &FULL.to_ne_bytes());
                let _ = read(fd, &mut [0; 8]);
            }
        }
    }
}
