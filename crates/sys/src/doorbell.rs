//! The page on which a channel's owner tells the packet filter whether it sleeps, and in which the
//! filter keeps counters. See [`portolan_proto::filter::Doorbell`] for the layout.

use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use portolan_proto::filter::Doorbell as Layout;
use portolan_types::Instant;
use rustix::io::Errno;

use crate::mapping::{Mapping, page_size};

/// How the owner of a channel notices new frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It polls the ring.
    Awake,
    /// It sleeps on the ring's descriptor.
    Asleep,
    /// It sleeps on the tap: the filter sends frames there until the owner changes the state.
    AsleepOnTap,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot map the doorbell: {0}")]
pub struct MapError(Errno);

#[derive(Debug)]
pub struct Doorbell {
    page: Mapping,
}

impl Doorbell {
    /// Maps the first page of the doorbell map.
    pub fn map(fd: impl AsFd) -> Result<Doorbell, MapError> {
        let page = Mapping::read_write(fd.as_fd(), 0, page_size()).map_err(MapError)?;
        Ok(Doorbell { page })
    }

    /// Sets `state`, with a full barrier: if the owner checks the ring afterwards, either it sees a
    /// frame or the filter sees the new state. (The filter must order its side, too: it reads the
    /// state after an atomic add that follows the reservation of the record.)
    pub fn set(&self, state: State) {
        let value = match state {
            State::Awake => Layout::AWAKE,
            State::Asleep => Layout::ASLEEP,
            State::AsleepOnTap => Layout::ASLEEP_ON_TAP,
        };
        self.page
            .u32_at(offset_of!(Layout, state))
            .swap(value, SeqCst);
    }

    /// Sets whether the filter must wake the waiter on the ring's descriptor if frames have not been polled for a while
    /// although the owner is awake. A full barrier: if the owner checks the ring afterwards, either it sees a frame or
    /// the filter sees the new value.
    pub fn want_attention(&self, is_wanted: bool) {
        let wanted = self.page.u32_at(offset_of!(Layout, wants_attention));
        wanted.swap(is_wanted.into(), SeqCst);
    }

    /// Records that the owner polls the ring now.
    pub fn note_look(&self, now: Instant) {
        let attended_at = self.page.u64_at(offset_of!(Layout, attended_at));
        attended_at.store(now.as_nanos(), Relaxed);
    }

    /// Records that the owner polls the ring continuously, without reading a clock.
    pub fn note_looks(&self) {
        let attended_at = self.page.u64_at(offset_of!(Layout, attended_at));
        if attended_at.load(Relaxed) != 0 {
            attended_at.store(0, Relaxed);
        }
    }

    /// Records whether the owner could not send all its data because of a window.
    pub fn note_awaited_window(&self, is_awaited: bool) {
        let awaits_window = self.page.u32_at(offset_of!(Layout, awaits_window));
        if awaits_window.load(Relaxed) != u32::from(is_awaited) {
            awaits_window.store(is_awaited.into(), Relaxed);
        }
    }

    /// The current state; the filter resets it to `Awake` when it has notified.
    pub fn state(&self) -> State {
        match self.page.u32_at(offset_of!(Layout, state)).load(SeqCst) {
            Layout::ASLEEP => State::Asleep,
            Layout::ASLEEP_ON_TAP => State::AsleepOnTap,
            _ => State::Awake,
        }
    }

    /// Number of frames that the filter sent to the tap; wraps.
    pub fn by_tap(&self) -> u32 {
        self.page.u32_at(offset_of!(Layout, by_tap)).load(SeqCst)
    }

    /// Number of frames that the filter put into the ring.
    pub fn delivered(&self) -> u64 {
        self.page
            .u64_at(offset_of!(Layout, delivered))
            .load(Relaxed)
    }

    /// Number of frames that the filter lost because the ring was full.
    pub fn overflow(&self) -> u64 {
        self.page.u64_at(offset_of!(Layout, overflow)).load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BpfMap, bpf_map};

    #[test]
    fn both_sides_see_one_page() {
        let fd = bpf_map(BpfMap::Array, page_size());
        let owner = Doorbell::map(&fd).unwrap();
        let filter = Mapping::read_write(fd.as_fd(), 0, page_size()).unwrap();

        owner.set(State::Asleep);
        assert_eq!(filter.u32_at(0).load(SeqCst), Layout::ASLEEP);
        filter.u32_at(0).store(Layout::AWAKE, SeqCst);
        assert_eq!(owner.state(), State::Awake);

        filter.u64_at(8).store(7, SeqCst);
        filter.u64_at(16).store(9, SeqCst);
        assert_eq!((owner.delivered(), owner.overflow()), (7, 9));
    }
}
