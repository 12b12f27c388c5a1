//! The server's transmit queue: its tap, and a few frames that wait while the tap is full.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_stack::{Frame, Wire};
use portolan_sys::tap::{Tap, TapIo, VNET_HEADER, WriteError};

/// Frames kept for a full tap. The stack stops at the first; more can only be segments without a session
/// and re-injected frames, which may be lost like any packet.
const WAITING_MAX: usize = 1024;

/// A tap with its waiting frames.
#[derive(Debug)]
pub(crate) struct TapWire {
    io: TapIo<OwnedFd>,
    ifindex: u32,
    waiting: VecDeque<Vec<u8>>,
    /// Frames lost because too many waited, or refused by the device.
    pub lost: u64,
}

impl TapWire {
    pub(crate) fn new(tap: Tap) -> TapWire {
        TapWire {
            ifindex: tap.ifindex,
            io: TapIo::new(tap.fd),
            waiting: VecDeque::new(),
            lost: 0,
        }
    }

    /// Returns the tap itself, which also receives frames.
    pub(crate) fn io(&self) -> &TapIo<OwnedFd> {
        &self.io
    }

    pub(crate) fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Sends a bare Ethernet frame as it was received. A `gso_size` other than 0 marks one that the
    /// kernel had coalesced.
    pub(crate) fn resend(&mut self, header: [u8; VNET_HEADER], frame: &[u8]) {
        self.send(&[IoSlice::new(&header), IoSlice::new(frame)]);
    }

    /// Retries the waiting frames.
    pub(crate) fn flush(&mut self) {
        while let Some(frame) = self.waiting.front() {
            match self.io.write(&[IoSlice::new(frame)]) {
                Ok(()) => {}
                Err(WriteError::Blocked) => return,
                Err(WriteError::Refused(_)) => self.lost += 1,
            }
            self.waiting.pop_front();
        }
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) {
        if self.waiting.is_empty() {
            match self.io.write(parts) {
                Ok(()) => return,
                Err(WriteError::Blocked) => {}
                Err(WriteError::Refused(_)) => {
                    self.lost += 1;
                    return;
                }
            }
        }
        if self.waiting.len() == WAITING_MAX {
            self.lost += 1;
            return;
        }
        self.waiting
            .push_back(parts.iter().flat_map(|part| part.iter().copied()).collect());
    }
}

impl Wire for TapWire {
    fn transmit(&mut self, frame: &Frame<'_>) {
        self.send(&[
            IoSlice::new(frame.head),
            IoSlice::new(frame.payload[0]),
            IoSlice::new(frame.payload[1]),
        ]);
    }

    fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl AsFd for TapWire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.as_fd()
    }
}
