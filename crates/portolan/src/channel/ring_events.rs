//! Notifications by a channel's rings, edge-triggered. A ring's descriptor is readable as long as a frame in it has not
//! been released; the owner may be about to read that frame, or has lent it to the program.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use portolan_sys::descriptor;
use portolan_sys::wait::pollfd;

use crate::descriptors::InternalFd;

pub(crate) struct RingEvents {
    /// An epoll set; `None` if no descriptor was available.
    set: Option<InternalFd>,
    rings: usize,
    /// The renewal of the channel that the rings belong to.
    renewals: u32,
}

impl RingEvents {
    pub(crate) fn new() -> RingEvents {
        RingEvents {
            set: descriptor::epoll_create(true).ok().map(InternalFd::new),
            rings: 0,
            renewals: 0,
        }
    }

    /// Adds those of `rings` that are new. None is removed from a channel before all are, with their server: `renewals`
    /// counts that. Returns how many were added.
    pub(crate) fn add<'a>(
        &mut self,
        renewals: u32,
        rings: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> usize {
        if renewals != self.renewals {
            *self = RingEvents {
                renewals,
                ..RingEvents::new()
            };
        }
        let Some(set) = &self.set else { return 0 };
        let before = self.rings;
        for ring in rings.skip(before) {
            let event = libc::epoll_event {
                events: (libc::EPOLLIN | libc::EPOLLET) as u32,
                u64: 0,
            };
            let set = set.as_fd().as_raw_fd();
            // A ring that cannot be added is checked at ticks of the background thread.
            let _ =
                descriptor::epoll_control(set, libc::EPOLL_CTL_ADD, ring.as_raw_fd(), Some(event));
            self.rings += 1;
        }
        self.rings - before
    }

    /// Readable when a ring has notified since the last [`RingEvents::take`].
    pub(crate) fn pollfd(&self) -> Option<libc::pollfd> {
        let set = self.set.as_ref()?;
        Some(pollfd(set.as_fd().as_raw_fd(), libc::POLLIN))
    }

    /// Has a ring notified since the last call?
    pub(crate) fn take(&self) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let set = self.set.as_ref().map(|set| set.as_fd().as_raw_fd());
        let mut is_any = false;
        // Each call returns, and consumes, some of them.
        while let Some(set) = set
            && let Ok(count) = descriptor::epoll_collect(set, &mut events)
        {
            is_any |= count > 0;
            if count < events.len() {
                break;
            }
        }
        is_any
    }
}
