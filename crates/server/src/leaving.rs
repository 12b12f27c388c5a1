//! Taps of exited processes. The kernel waits tens of milliseconds after each deletion, and no longer for several devices
//! together: a thread deletes the taps that have gathered during its previous deletion, some at a time. A process stays
//! charged to its user until its tap is deleted, so that programs that start and exit in a loop wait for their own taps.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use portolan_control::{Charge, Exhausted};
use portolan_sys::netlink;
use portolan_sys::tap::Tap;
use portolan_sys::wait::EventNotifier;
use rustix::io::Errno;
use tracing::warn;

use crate::channels::device_turns::DeviceTurns;
use crate::channels::pool::SpareClaim;

/// A user with more taps that are being deleted starts programs in a loop. A shell script has one or two.
const FEW: usize = 6;

/// While the kernel deletes several, no device can be made: it waits for RCU readers once for each, with the lock held,
/// which takes tens of milliseconds each on a busy machine.
const AT_ONCE: usize = 4;

pub struct LeavingTaps {
    /// By interface index.
    charges: HashMap<u32, Charge>,
    to_delete: Sender<Tap>,
    deleted: Receiver<Vec<u32>>,
    pub notifier: Arc<EventNotifier>,
}

impl LeavingTaps {
    /// Starts the thread that deletes them.
    pub fn new(turns: Arc<DeviceTurns>) -> Result<LeavingTaps, Errno> {
        let notifier = Arc::new(EventNotifier::new()?);
        let (to_delete, taps) = mpsc::channel();
        let (done, deleted) = mpsc::channel();
        let ring = Arc::clone(&notifier);
        std::thread::spawn(move || {
            while let Some(devices) = delete_next(&taps, &turns) {
                // Fails only when the server ends, and this thread with it.
                let _ = done.send(devices);
                ring.notify();
            }
        });
        Ok(LeavingTaps {
            charges: HashMap::new(),
            to_delete,
            deleted,
            notifier,
        })
    }

    /// Deletes a tap, even if others have its descriptor. `charge` is released once it is deleted.
    pub fn delete(&mut self, tap: Tap, charge: Option<Charge>) {
        if let Some(charge) = charge {
            self.charges.insert(tap.ifindex, charge);
        }
        // The thread ends only with the server, and devices with their descriptors.
        let _ = self.to_delete.send(tap);
    }

    /// Returns the number of the user's taps that are being deleted.
    fn count_of(&self, uid: u32) -> usize {
        let its = |charge: &&Charge| charge.uid() == uid;
        self.charges.values().filter(its).count()
    }

    /// Users whose programs come and go in a loop leave some channels to others.
    pub fn claim_of(&self, uid: u32) -> SpareClaim {
        if self.count_of(uid) > FEW {
            SpareClaim::NotReserve
        } else {
            SpareClaim::Any
        }
    }

    /// Returns whether more of what was refused becomes free soon.
    pub fn relieves(&self, uid: u32, exhausted: Exhausted) -> bool {
        match exhausted {
            Exhausted::User => self.count_of(uid) > 0,
            Exhausted::Total => !self.charges.is_empty(),
        }
    }

    pub fn give_back(&mut self) {
        self.notifier.drain();
        for device in self.deleted.try_iter().flatten() {
            self.charges.remove(&device);
        }
    }
}

/// Deletes the gathered taps; returns none if the server has ended.
fn delete_next(taps: &Receiver<Tap>, turns: &DeviceTurns) -> Option<Vec<u32>> {
    let first = taps.recv().ok()?;
    turns.await_deletion();
    let others = taps.try_iter().take(AT_ONCE - 1);
    let taps: Vec<Tap> = std::iter::once(first).chain(others).collect();
    let devices: Vec<u32> = taps.iter().map(|tap| tap.ifindex).collect();
    if netlink::delete_devices(&devices).is_err() {
        for &device in &devices {
            if let Err(failure) = netlink::delete_devices(&[device]) {
                warn!(%failure, "a tap stays");
            }
        }
    }
    // Closed after the deletion: closing an existing tap would delete it by itself.
    drop(taps);
    Some(devices)
}
