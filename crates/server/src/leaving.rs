//! Taps of exited processes. The kernel waits tens of milliseconds after each deletion, and no longer for several devices
//! together: a thread deletes the taps that have gathered during its previous deletion, some at a time. A process stays
//! charged to its user until its tap is deleted, so that programs that start and exit in a loop wait for their own taps.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
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

/// A user with more taps that are being deleted, and at least as many as others have on average, starts programs in a
/// loop. A shell script has one or two, and on a machine that others keep busy some more.
const FEW: usize = 6;

/// While the kernel deletes several, no device can be made: it waits for RCU readers once for each, with the lock held,
/// which takes tens of milliseconds each on a busy machine.
const AT_ONCE: usize = 4;

pub(crate) struct LeavingTaps {
    /// By interface index.
    charges: HashMap<u32, Charge>,
    /// How many of them each user has.
    counts: HashMap<u32, usize>,
    to_delete: Sender<Tap>,
    deleted: Receiver<Vec<u32>>,
    pub notifier: Arc<EventNotifier>,
}

impl LeavingTaps {
    /// Starts the thread that deletes them.
    pub(crate) fn new(turns: Arc<DeviceTurns>) -> Result<LeavingTaps, Errno> {
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
            counts: HashMap::new(),
            to_delete,
            deleted,
            notifier,
        })
    }

    /// Deletes a tap, even if others have its descriptor. `charge` is released once it is deleted.
    pub(crate) fn delete(&mut self, tap: Tap, charge: Option<Charge>) {
        if let Some(charge) = charge {
            *self.counts.entry(charge.uid()).or_default() += 1;
            self.charges.insert(tap.ifindex, charge);
        }
        // The thread ends only with the server, and devices with their descriptors.
        let _ = self.to_delete.send(tap);
    }

    /// Returns the number of the user's taps that are being deleted.
    fn count_of(&self, uid: u32) -> usize {
        self.counts.get(&uid).copied().unwrap_or_default()
    }

    /// Users whose programs come and go in a loop leave some channels to others.
    pub(crate) fn claim_of(&self, uid: u32) -> SpareClaim {
        claim_with(self.count_of(uid), self.counts.len(), self.charges.len())
    }

    /// Returns whether more of what was refused becomes free soon.
    pub(crate) fn relieves(&self, uid: u32, exhausted: Exhausted) -> bool {
        match exhausted {
            Exhausted::User => self.count_of(uid) > 0,
            Exhausted::Total => !self.charges.is_empty(),
        }
    }

    pub(crate) fn give_back(&mut self) {
        self.notifier.drain();
        for device in self.deleted.try_iter().flatten() {
            let Some(charge) = self.charges.remove(&device) else {
                continue;
            };
            if let Entry::Occupied(mut count) = self.counts.entry(charge.uid()) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

/// The claim of a user with `its` taps of `all`, which `users` have together.
fn claim_with(its: usize, users: usize, all: usize) -> SpareClaim {
    if its > FEW && its * users >= all {
        SpareClaim::NotReserve
    } else {
        SpareClaim::Any
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_for_users_with_few_taps_or_fewer_than_others() {
        let (any, not_reserve) = (SpareClaim::Any, SpareClaim::NotReserve);
        assert_eq!(claim_with(0, 0, 0), any);
        assert_eq!(claim_with(FEW, 1, FEW), any);
        assert_eq!(claim_with(FEW + 1, 1, FEW + 1), not_reserve);
        // Beside another one with many.
        assert_eq!(claim_with(FEW + 1, 2, FEW + 48), any);
        assert_eq!(claim_with(41, 2, FEW + 48), not_reserve);
    }
}
