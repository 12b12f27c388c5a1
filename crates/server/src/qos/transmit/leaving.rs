//! Classes that were released while frames are queued in them: accepted data is sent, not dropped. The link's
//! scheduler is removed with its last class, unless the configuration gives the link a rate.

mod serve;

use std::collections::HashMap;
use std::time::Duration;

use portolan_control::qos::transmit::ClassId;
use portolan_sys::traffic::{Counts, Traffic, TrafficError};
use portolan_types::Instant;
use rustix::io::Errno;
use tracing::warn;

use super::Reservations;
use super::links::Link;

/// Frames that have not left by then are dropped.
const LINGER: Duration = Duration::from_millis(500);

/// A link without classes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    ifindex: u32,
    /// When it gets its former queueing discipline back, even if frames are still queued.
    until: Instant,
}

/// A class without an owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    ifindex: u32,
    id: ClassId,
    until: Instant,
}

impl Reservations {
    /// Forgets classes that have disappeared with their device.
    pub(super) fn forget_leaving(&mut self, ifindex: u32) {
        self.leaving.retain(|class| class.ifindex != ifindex);
    }

    /// Returns whether the link has an unused scheduler.
    fn is_unused(&self, ifindex: u32) -> bool {
        let has_left = self.leaving.iter().all(|class| class.ifindex != ifindex);
        has_left && self.link(ifindex).is_some_and(Link::is_unused)
    }

    fn unused_links(&self) -> Vec<u32> {
        let all = self.links.keys().copied();
        all.filter(|&ifindex| self.is_unused(ifindex)).collect()
    }

    /// Until the kernel says that there is none.
    fn has_backlog(&mut self, ifindex: u32) -> bool {
        let counts = self.counts(ifindex);
        counts.is_none_or(|counts| counts.values().any(|counts| counts.backlog > 0))
    }

    pub(super) fn is_leaving(&self, id: ClassId) -> bool {
        self.leaving.iter().any(|class| class.id == id)
    }

    fn has_left(&mut self, class: Leaving, now: Instant) -> bool {
        let Leaving { ifindex, id, until } = class;
        let waits = |counts: HashMap<u16, Counts>| {
            let of_it = counts.get(&id.0);
            of_it.is_some_and(|counts| counts.backlog > 0)
        };
        if now < until && self.counts(ifindex).is_none_or(waits) {
            return false;
        }
        let delete = move |traffic: &mut Traffic| traffic.delete_class(ifindex, id.0);
        let deleted = self.traffic.ask(delete);
        match deleted {
            Ok(()) => true,
            Err(TrafficError::Held) => false,
            // A group's class, whose members have not left.
            Err(TrafficError::Kernel {
                errno: Errno::BUSY, ..
            }) if now < until + LINGER => false,
            Err(error) => {
                warn!(%error, class = id.0, "a class stays");
                true
            }
        }
    }
}
