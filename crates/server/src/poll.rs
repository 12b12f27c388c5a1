//! The event loop's wait: epoll over every descriptor the server watches, each with a token that
//! is never reused, so that an event for a closed descriptor finds nothing.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use portolan_types::Instant;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Names a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(u64);

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready<S> {
    pub source: S,
    pub flags: EventFlags,
}

/// Watched descriptors of kinds `S`.
#[derive(Debug)]
pub struct Poller<S> {
    epoll: OwnedFd,
    sources: HashMap<u64, S>,
    next: u64,
}

impl<S: Copy> Poller<S> {
    pub fn new() -> Result<Poller<S>, Errno> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            sources: HashMap::new(),
            next: 1,
        })
    }

    pub fn add(&mut self, fd: impl AsFd, source: S, flags: EventFlags) -> Result<Token, Errno> {
        let token = Token(self.next);
        epoll::add(&self.epoll, fd, EventData::new_u64(token.0), flags)?;
        self.next += 1;
        self.sources.insert(token.0, source);
        Ok(token)
    }

    pub fn modify(&self, fd: impl AsFd, token: Token, flags: EventFlags) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(token.0), flags)
    }

    /// To be called before `fd` is closed: a copy elsewhere would keep it in the set.
    pub fn remove(&mut self, fd: impl AsFd, token: Token) {
        self.sources.remove(&token.0);
        // Fails only if it is not in the set, which is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until something is ready or `deadline` has passed.
    pub fn wait(&self, now: Instant, deadline: Option<Instant>) -> Result<Vec<Ready<S>>, Errno> {
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 256];
        let timeout = deadline.map(|deadline| {
            let wait = deadline.since(now);
            Timespec {
                // Durations between instants of one boot fit.
                tv_sec: wait.as_secs() as i64,
                tv_nsec: wait.subsec_nanos().into(),
            }
        });
        let count = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        let ready = events[..count].iter().filter_map(|event| {
            // The field is packed; copied before it is used.
            let (flags, data) = (event.flags, event.data);
            let source = *self.sources.get(&data.u64())?;
            Some(Ready { source, flags })
        });
        Ok(ready.collect())
    }
}
