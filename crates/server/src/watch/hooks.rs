//! Checks that the packet filter stays attached: any network administrator may remove it with a queueing discipline
//! (`tc qdisc del dev eth0 clsact`), and sessions would hang. A thread checks after each change, since the kernel
//! answers under a lock that it may hold for long.

mod serve;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portolan_bpf::{HookEvents, is_attached};
use portolan_sys::wait::EventNotifier;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Pause between checks: bounds how often a filter that is removed repeatedly is restored.
const REST: Duration = Duration::from_millis(100);
/// Interval while the filter is missing somewhere.
const AGAIN: Duration = Duration::from_secs(1);

/// The devices that have the packet filter, and their watching thread.
#[derive(Debug)]
pub(crate) struct HookWatch {
    devices: Arc<Mutex<Devices>>,
    /// Becomes readable when the filter is missing on a device.
    pub news: Arc<EventNotifier>,
}

#[derive(Debug, Default)]
struct Devices {
    filtered: BTreeSet<u32>,
    /// Not fetched yet.
    lost: BTreeSet<u32>,
    /// As of the last check.
    missing: BTreeSet<u32>,
}

impl HookWatch {
    /// Starts a thread that checks until the server ends.
    pub(crate) fn start() -> io::Result<HookWatch> {
        let events = HookEvents::new()?;
        let watch = HookWatch {
            devices: Arc::default(),
            news: Arc::new(EventNotifier::new()?),
        };
        let (devices, news) = (Arc::clone(&watch.devices), Arc::clone(&watch.news));
        std::thread::Builder::new()
            .name("hooks".to_owned())
            .spawn(move || follow(&events, &devices, &news))?;
        Ok(watch)
    }

    pub(crate) fn add(&self, ifindex: u32) {
        lock(&self.devices).filtered.insert(ifindex);
    }

    pub(crate) fn remove(&self, ifindex: u32) {
        lock(&self.devices).filtered.remove(&ifindex);
    }

    /// Returns the devices whose filter was missing at the last check.
    pub(crate) fn missing(&self) -> BTreeSet<u32> {
        lock(&self.devices).missing.clone()
    }

    fn take_lost(&self) -> BTreeSet<u32> {
        self.news.drain();
        std::mem::take(&mut lock(&self.devices).lost)
    }
}

fn lock(devices: &Mutex<Devices>) -> MutexGuard<'_, Devices> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

fn follow(events: &HookEvents, devices: &Mutex<Devices>, news: &EventNotifier) {
    loop {
        let is_missing = look(devices);
        if is_missing {
            news.notify();
        }
        std::thread::sleep(REST);
        let limit = is_missing.then(|| Timespec::try_from(AGAIN).expect("a second"));
        // When interrupted, it checks again.
        let _ = poll(&mut [PollFd::new(events, PollFlags::IN)], limit.as_ref());
        events.drain();
    }
}

/// Returns true if the filter is missing on a device. Where the kernel gives no answer, the next check decides.
fn look(devices: &Mutex<Devices>) -> bool {
    let filtered = lock(devices).filtered.clone();
    let lost: BTreeSet<u32> = filtered
        .into_iter()
        .filter(|ifindex| is_attached(*ifindex).is_ok_and(|is_there| !is_there))
        .collect();
    let is_missing = !lost.is_empty();
    let mut devices = lock(devices);
    devices.missing.clone_from(&lost);
    devices.lost = lost;
    is_missing
}
