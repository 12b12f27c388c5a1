//! Rings of directly mapped sessions (ADR 20): each serves one session at a time and has its own notifier. Only the
//! server needs to know which session uses which ring: a frame names its slot, as on the channel's ring.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_proto::filter::RecordHeader;
use portolan_sys::doorbell::{Doorbell, State};
use portolan_sys::ring::Ring;
use portolan_types::{Instant, Slot};

use crate::channel::Lend;
use crate::channel::accounts::Accounts;
use crate::channel::captures::Captures;
use crate::descriptors::InternalFd;

#[derive(Debug, Default)]
pub(crate) struct Rings(Vec<OwnRing>);

#[derive(Debug)]
pub(crate) struct OwnRing {
    ring: Ring,
    doorbell: Doorbell,
    fd: InternalFd,
}

impl OwnRing {
    /// Maps a ring that the server sent; `None` if there is not enough memory.
    pub(crate) fn map(ring: OwnedFd, doorbell: &OwnedFd, size: u32) -> Option<OwnRing> {
        let fd = InternalFd::new(ring);
        Some(OwnRing {
            ring: Ring::map(&fd, size as usize).ok()?,
            doorbell: Doorbell::map(doorbell).ok()?,
            fd,
        })
    }
}

impl Rings {
    pub(crate) fn add(&mut self, ring: OwnRing) {
        self.0.push(ring);
    }

    /// Passes received frames to `deliver`, at most `most` from each ring.
    pub(crate) fn receive(&mut self, most: usize, mut deliver: impl FnMut(&RecordHeader, &[u8])) {
        for own in &mut self.0 {
            for _ in 0..most {
                let Some(record) = own.ring.next() else {
                    break;
                };
                deliver(&record.header, record.frame);
            }
            own.ring.release();
        }
    }

    /// As [`Rings::receive`], but some frames may stay in their ring.
    pub(crate) fn receive_lending(
        &mut self,
        most: usize,
        (accounts, captures): (&mut Accounts, &mut Captures),
        lend: &mut impl Lend,
    ) {
        for own in &mut self.0 {
            for _ in 0..most {
                let may_lend = own.ring.may_lend();
                let Some(record) = own.ring.next() else {
                    break;
                };
                accounts.begin(Slot(record.header.slot));
                captures.note_received(&record.header, record.frame);
                if let Some(range) = lend.deliver(&record.header, record.frame, may_lend) {
                    lend.keep(own.ring.lend(&own.fd, range));
                }
            }
            own.ring.release();
        }
    }

    pub(crate) fn detach_loans(&mut self) {
        for own in &mut self.0 {
            own.ring.detach_loans();
        }
    }

    /// Are frames of a ring lent?
    pub(crate) fn is_any_withheld(&self) -> bool {
        self.0.iter().any(|own| own.ring.is_withheld())
    }

    pub(crate) fn has_received(&self) -> bool {
        self.0.iter().any(|own| !own.ring.is_empty())
    }

    /// Has the next frame of each ring notify. Returns false if frames are pending, and then leaves
    /// the rings behind that one unchanged.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.0.iter().all(|own| {
            own.doorbell.set(State::Asleep);
            own.ring.is_empty()
        })
    }

    /// Marks all rings as being read.
    pub(crate) fn wake_up(&mut self, now: Instant) {
        for own in &self.0 {
            own.doorbell.note_look(now);
            own.doorbell.set(State::Awake);
        }
    }

    pub(crate) fn doorbells(&self) -> impl Iterator<Item = &Doorbell> {
        self.0.iter().map(|own| &own.doorbell)
    }

    /// Readable when frames have arrived during sleep.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|own| own.fd.as_fd())
    }
}
