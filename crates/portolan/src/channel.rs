//! The channel of this process: frames in by the receive ring (or the tap, while asleep on it),
//! frames out by the tap. Nothing that was handed to [`Channel::transmit`] is lost: what the tap
//! does not take at once waits in the backlog, and the channel is full until it is gone.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_proto::filter::RecordHeader;
use portolan_stack::{Frame, Wire};
use portolan_sys::inlet::Inlet;
use portolan_sys::tap::{TapIo, WriteError};
use portolan_types::Instant;

pub(crate) struct Channel {
    tap: TapIo<OwnedFd>,
    inlet: Inlet,
    ring_fd: OwnedFd,
    backlog: VecDeque<Vec<u8>>,
    /// Frames the tap refused for another reason than being full.
    pub(crate) refused: u64,
    /// The tap takes a UDP payload whole that is to become several datagrams.
    pub(crate) cuts_datagrams: bool,
}

impl Channel {
    pub(crate) fn new(tap: TapIo<OwnedFd>, inlet: Inlet, ring_fd: OwnedFd) -> Channel {
        Channel {
            tap,
            inlet,
            ring_fd,
            backlog: VecDeque::new(),
            refused: 0,
            cuts_datagrams: false,
        }
    }

    /// Hands the next received frames, at most `most` of them, to `deliver`.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        most: usize,
        mut deliver: impl FnMut(&RecordHeader, &[u8]),
    ) {
        for _ in 0..most {
            let Some(record) = self.inlet.next(&self.tap, now) else {
                break;
            };
            deliver(&record.header, record.frame);
        }
        self.inlet.release();
    }

    /// Are there frames to take, or may some be on their way by the tap?
    pub(crate) fn may_have_received(&self) -> bool {
        self.inlet.is_settling() || self.inlet.has_received()
    }

    /// From now on frames come by the tap. False if there are frames to take first.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.inlet.fall_asleep()
    }

    /// Frames come by the ring again.
    pub(crate) fn wake_up(&mut self, now: Instant) {
        self.inlet.wake_up(now);
    }

    /// Readable when an ICMP error, or a frame that just missed the tap, has come while asleep.
    pub(crate) fn ring_fd(&self) -> BorrowedFd<'_> {
        self.ring_fd.as_fd()
    }

    /// Readable when frames have come while asleep, writable when the tap takes frames again.
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

    fn cuts_datagrams(&self) -> bool {
        self.cuts_datagrams
    }
}
