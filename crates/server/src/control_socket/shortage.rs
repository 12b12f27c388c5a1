//! Lack of descriptors. Each session takes one or two in the server; when few are left, requests for
//! new sessions fail with `EMFILE` or wait, so that messages for existing sessions can always be
//! received.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use portolan_control::{Errno, Timer};
use portolan_types::SessionId;
use rustix::event::epoll::EventFlags;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};
use tracing::warn;

use crate::server::Server;

/// Numbers that must be free for a new session: its own, and those of the next message.
const ROOM: usize = 16;

/// If the highest number in use is so far below the limit, there is room.
const MARGIN: u64 = 128;

/// When to check again.
const RETRY: Duration = Duration::from_millis(50);

impl Server {
    /// Notes a descriptor that stays open.
    pub(crate) fn note_descriptor(&mut self, fd: impl AsFd) {
        let number = u64::from(fd.as_fd().as_raw_fd().unsigned_abs());
        self.shortage.highest = self.shortage.highest.max(number);
    }

    /// Returns whether there are descriptors for one more session.
    pub(crate) fn has_descriptors(&mut self) -> bool {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        if self.shortage.highest + MARGIN < limit {
            return true;
        }
        let probe: Vec<OwnedFd> = (0..ROOM)
            .map_while(|_| fcntl_dupfd_cloexec(&self.listener, 0).ok())
            .collect();
        let has_room = probe.len() == ROOM;
        if !has_room {
            self.control.counters.descriptors_short += 1;
            if !self.shortage.has_warned {
                self.shortage.has_warned = true;
                warn!(limit, "descriptors are short: no new sessions");
            }
        }
        has_room
    }

    /// Likewise, for a request that opens one.
    pub(crate) fn check_descriptors(&mut self) -> Result<(), Errno> {
        if self.has_descriptors() {
            Ok(())
        } else {
            Err(Errno::MFILE)
        }
    }

    /// Defers the offers of a listener until there are descriptors again.
    pub(crate) fn offer_later(&mut self, listener: SessionId) {
        self.shortage.listeners.insert(listener);
        self.look_for_descriptors_later();
    }

    /// Defers accepting control connections until there are descriptors again.
    pub(crate) fn accept_clients_later(&mut self) {
        if !self.shortage.is_closed {
            self.shortage.is_closed = true;
            self.watch_control(EventFlags::empty());
        }
        self.look_for_descriptors_later();
    }

    fn look_for_descriptors_later(&mut self) {
        self.control
            .timers
            .arm_once(Timer::Descriptors, self.now + RETRY);
    }

    fn watch_control(&self, interest: EventFlags) {
        if let Err(errno) = self
            .poll
            .modify(&self.listener, self.control_token, interest)
        {
            warn!(%errno, "cannot watch the control socket");
        }
    }

    /// Resumes what waited for descriptors.
    pub(crate) fn look_for_descriptors(&mut self) {
        if !self.has_descriptors() {
            return self.look_for_descriptors_later();
        }
        if std::mem::take(&mut self.shortage.is_closed) {
            self.watch_control(EventFlags::IN);
        }
        for listener in std::mem::take(&mut self.shortage.listeners) {
            self.announce(listener);
        }
    }
}
