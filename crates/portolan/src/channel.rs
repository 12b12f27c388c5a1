//! The channel of this process: frames in by the receive ring (or the tap, while asleep on it),
//! frames out by the tap. Nothing that was handed to [`Channel::transmit`] is lost: what the tap
//! does not take at once waits in the backlog, and the channel is full until it is gone.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Frame, Wire};
use portolan_sys::doorbell::{Doorbell, State};
use portolan_sys::ring::Ring;
use portolan_sys::tap::{TapIo, WriteError};

pub(crate) struct Channel {
    tap: TapIo<OwnedFd>,
    ring: Ring,
    ring_fd: OwnedFd,
    doorbell: Doorbell,
    backlog: VecDeque<Vec<u8>>,
    /// Frames the tap refused for another reason than being full.
    pub(crate) refused: u64,
}

impl Channel {
    pub(crate) fn new(
        tap: TapIo<OwnedFd>,
        ring: Ring,
        ring_fd: OwnedFd,
        doorbell: Doorbell,
    ) -> Channel {
        Channel {
            tap,
            ring,
            ring_fd,
            doorbell,
            backlog: VecDeque::new(),
            refused: 0,
        }
    }

    /// Hands the next received frames, at most `most` of them, to `deliver`.
    pub(crate) fn receive(&mut self, most: usize, mut deliver: impl FnMut(&RecordHeader, &[u8])) {
        for _ in 0..most {
            let Some(record) = self.ring.next() else {
                break;
            };
            deliver(&record.header, record.frame);
        }
        self.ring.release();
    }

    pub(crate) fn has_received(&self) -> bool {
        !self.ring.is_empty()
    }

    /// From now on the filter wakes whoever waits for [`Channel::wake_fd`]. Look at
    /// [`Channel::has_received`] afterwards: what came before rings no bell.
    pub(crate) fn fall_asleep(&self) {
        self.doorbell.set(State::Asleep);
    }

    pub(crate) fn wake_up(&self) {
        self.doorbell.set(State::Awake);
    }

    /// Readable when frames have come while asleep.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.ring_fd.as_fd()
    }

    /// Writable when the tap takes frames again.
    pub(crate) fn tap_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }

    /// Tries the frames that the tap did not take.
    pub(crate) fn flush(&mut self) {
        while let Some(frame) = self.backlog.front() {
            match self.tap.write(&[IoSlice::new(frame)]) {
                Ok(()) => {}
                Err(WriteError::Blocked) => return,
                Err(WriteError::Refused(_)) => self.refused += 1,
            }
            self.backlog.pop_front();
        }
    }
}

impl Wire for Channel {
    fn transmit(&mut self, frame: &Frame<'_>) {
        if self.backlog.is_empty() {
            let [first, second] = frame.payload;
            let pieces = [
                IoSlice::new(frame.head),
                IoSlice::new(first),
                IoSlice::new(second),
            ];
            match self.tap.write(&pieces) {
                Ok(()) => return,
                Err(WriteError::Blocked) => {}
                Err(WriteError::Refused(_)) => {
                    self.refused += 1;
                    return;
                }
            }
        }
        self.backlog
            .push_back([frame.head, frame.payload[0], frame.payload[1]].concat());
    }

    fn is_full(&self) -> bool {
        !self.backlog.is_empty()
    }
}
