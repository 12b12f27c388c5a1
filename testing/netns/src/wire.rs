//! The thread that implements an impaired link: reads each host's tap, passes the frames through a [`Link`],
//! and writes those that leave it to the other tap.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use portolan_sys::clock;
use portolan_sys::tap::{Tap, TapIo};
use portolan_sys::wait::{EventNotifier, ppoll};
use rustix::process::setpriority_process;
use rustix::thread::gettid;

use crate::bundle::Bundle;
use crate::link::{Counters, Impairment};
use crate::segment::{VNET_HEADER, wire_frames};

/// Largest frame that a tap delivers, with headers.
const LARGEST: usize = VNET_HEADER + 14 + 65_536;

/// The highest priority without real-time scheduling.
const URGENT: i32 = -20;

/// Maximum number of frames read from one tap before due frames are delivered.
const BATCH: usize = 64;

/// The thread of a link, which runs until this is dropped.
#[derive(Debug)]
pub(crate) struct Wire {
    stop: Arc<EventNotifier>,
    counters: Arc<Mutex<Counters>>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    pub(crate) fn start(taps: [Tap; 2], impairment: Impairment) -> Wire {
        let stop = Arc::new(EventNotifier::new().expect("the kernel has eventfd"));
        let counters = Arc::new(Mutex::new(Counters::default()));
        let forwarder = Forwarder {
            taps: taps.map(|tap| TapIo::new(tap.fd)),
            links: [Bundle::new(impairment, 0), Bundle::new(impairment, 1)],
            buffer: vec![0; LARGEST],
        };
        let thread = std::thread::spawn({
            let (stop, counters) = (stop.clone(), counters.clone());
            move || {
                // Keeps the link's timing exact; without the permission it is only less exact.
                let _ = setpriority_process(Some(gettid()), URGENT);
                forwarder.run(&stop, &counters)
            }
        });
        Wire {
            stop,
            counters,
            thread: Some(thread),
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already.
            let _ = thread.join();
        }
    }
}

struct Forwarder {
    taps: [TapIo<std::os::fd::OwnedFd>; 2],
    /// `links[n]` carries the frames that tap `n` sends.
    links: [Bundle; 2],
    buffer: Vec<u8>,
}

impl Forwarder {
    fn run(mut self, stop: &EventNotifier, counters: &Mutex<Counters>) {
        while !self.wait(stop) {
            for side in 0..2 {
                self.take(side);
            }
            for side in 0..2 {
                self.give(side);
            }
            let [a, b] = &self.links;
            let sum = a.counters().plus(b.counters());
            *counters.lock().unwrap_or_else(PoisonError::into_inner) = sum;
        }
    }

    /// Sleeps until a tap has a frame or one is due. Returns true if the link is to stop.
    fn wait(&self, stop: &EventNotifier) -> bool {
        let [a, b] = &self.taps;
        let mut fds = [a.as_fd(), b.as_fd(), stop.as_fd()].map(|fd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        let deadline = self.links.iter().filter_map(Bundle::deadline).min();
        // An interruption does no harm: the caller checks everything.
        let _ = ppoll(&mut fds, deadline, None);
        fds[2].revents != 0
    }

    fn take(&mut self, side: usize) {
        for _ in 0..BATCH {
            let Some(length) = self.taps[side].read(&mut self.buffer) else {
                return;
            };
            let now = clock::now();
            for frame in wire_frames(&self.buffer[..length]) {
                self.links[side].offer(now, frame);
            }
        }
    }

    fn give(&mut self, side: usize) {
        let now = clock::now();
        while let Some(frame) = self.links[side].due(now) {
            let parts = [IoSlice::new(&[0; VNET_HEADER]), IoSlice::new(&frame)];
            // A host that is down loses its frames.
            let _ = self.taps[1 - side].write(&parts);
        }
    }
}
