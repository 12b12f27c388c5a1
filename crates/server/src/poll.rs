//! The event loop's wait: epoll over every descriptor that the server watches, each with a token that is never
//! reused, so that an event for a closed descriptor finds nothing.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use portolan_types::Instant;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Identifies a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Token(u64);

/// An event and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ready<S> {
    pub source: S,
    pub flags: EventFlags,
}

/// Watched descriptors with sources `S`. The kernel reports ready ones in turn: sessions' descriptors and sockets, of
/// which there may be thousands, are in an epoll set of their own, which the main set reports as one. So a client
/// with many ready descriptors does not delay the requests of others.
#[derive(Debug)]
pub(crate) struct Poller<S> {
    epoll: OwnedFd,
    crowd: OwnedFd,
    sources: HashMap<u64, (S, Set)>,
    next: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Main,
    Crowd,
}

/// Token of the crowd in the main set; no other token is 0.
const CROWD: u64 = 0;

/// Maximum number of events reported by one call.
const READY_MAX: usize = 256;

impl<S: Copy> Poller<S> {
    pub(crate) fn new() -> Result<Poller<S>, Errno> {
        let main = epoll::create(CreateFlags::CLOEXEC)?;
        let crowd = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&main, &crowd, EventData::new_u64(CROWD), EventFlags::IN)?;
        Ok(Poller {
            epoll: main,
            crowd,
            sources: HashMap::new(),
            next: 1,
        })
    }

    pub(crate) fn add(
        &mut self,
        fd: impl AsFd,
        source: S,
        flags: EventFlags,
    ) -> Result<Token, Errno> {
        self.add_to(Set::Main, fd, source, flags)
    }

    /// Likewise for one of thousands.
    pub(crate) fn add_to_crowd(
        &mut self,
        fd: impl AsFd,
        source: S,
        flags: EventFlags,
    ) -> Result<Token, Errno> {
        self.add_to(Set::Crowd, fd, source, flags)
    }

    fn add_to(
        &mut self,
        set: Set,
        fd: impl AsFd,
        source: S,
        flags: EventFlags,
    ) -> Result<Token, Errno> {
        let token = Token(self.next);
        epoll::add(self.epoll_of(set), fd, EventData::new_u64(token.0), flags)?;
        self.next += 1;
        self.sources.insert(token.0, (source, set));
        Ok(token)
    }

    pub(crate) fn modify(
        &self,
        fd: impl AsFd,
        token: Token,
        flags: EventFlags,
    ) -> Result<(), Errno> {
        let (_, set) = self.sources.get(&token.0).ok_or(Errno::NOENT)?;
        epoll::modify(self.epoll_of(*set), fd, EventData::new_u64(token.0), flags)
    }

    fn epoll_of(&self, set: Set) -> &OwnedFd {
        match set {
            Set::Main => &self.epoll,
            Set::Crowd => &self.crowd,
        }
    }

    /// Must be called before `fd` is closed: a copy elsewhere would keep it in the set.
    pub(crate) fn remove(&mut self, fd: impl AsFd, token: Token) {
        let Some((_, set)) = self.sources.remove(&token.0) else {
            return;
        };
        // Fails only if it is not in the set, which is the goal.
        let _ = epoll::delete(self.epoll_of(set), fd);
    }

    /// Waits until a descriptor is ready or `deadline` has passed.
    pub(crate) fn wait(
        &self,
        now: Instant,
        deadline: Option<Instant>,
    ) -> Result<Vec<Ready<S>>, Errno> {
        let timeout = deadline.map(|deadline| {
            let wait = deadline.since(now);
            Timespec {
                // Durations between instants of one boot fit.
                tv_sec: wait.as_secs() as i64,
                tv_nsec: wait.subsec_nanos().into(),
            }
        });
        let mut ready = Vec::new();
        if self.look(Set::Main, timeout.as_ref(), &mut ready)? {
            self.look(Set::Crowd, Some(&Timespec::default()), &mut ready)?;
        }
        Ok(ready)
    }

    /// Adds the ready descriptors of a set. Returns whether the crowd is among them.
    fn look(
        &self,
        set: Set,
        timeout: Option<&Timespec>,
        ready: &mut Vec<Ready<S>>,
    ) -> Result<bool, Errno> {
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; READY_MAX];
        let count = match epoll::wait(self.epoll_of(set), &mut events[..], timeout) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        let mut has_crowd = false;
        for event in &events[..count] {
            // The field is packed, so it is copied before use.
            let (flags, data) = (event.flags, event.data);
            has_crowd |= data.u64() == CROWD;
            if let Some(&(source, _)) = self.sources.get(&data.u64()) {
                ready.push(Ready { source, flags });
            }
        }
        Ok(has_crowd)
    }
}
