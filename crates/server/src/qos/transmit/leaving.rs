//! Classes that are free again while something still waits in them: what was taken from a writer is sent, not dropped.

use std::time::Duration;

use portolan_control::qos::transmit::ClassId;
use portolan_sys::traffic::TrafficError;
use portolan_types::Instant;
use rustix::io::Errno;
use tracing::warn;

use super::Reservations;
use crate::server::Server;

/// What has not left by then is dropped.
const LINGER: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// A class without an owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    ifindex: u32,
    id: ClassId,
    until: Instant,
}

impl Server {
    /// Removes a class now or, if frames wait there, soon.
    pub(super) fn remove_class(&mut self, ifindex: u32, id: ClassId) {
        let until = self.now + LINGER;
        self.qos
            .transmit
            .leaving
            .push(Leaving { ifindex, id, until });
        self.drive_leaving_classes();
    }

    /// Returns when to come back.
    pub(crate) fn drive_leaving_classes(&mut self) -> Option<Instant> {
        let now = self.now;
        let transmit = &mut self.qos.transmit;
        let leaving = std::mem::take(&mut transmit.leaving);
        for class in leaving {
            if !transmit.has_left(class, now) {
                transmit.leaving.push(class);
            }
        }
        (!transmit.leaving.is_empty()).then_some(now + LOOK_AGAIN)
    }
}

impl Reservations {
    /// They have gone with their device.
    pub(super) fn forget_leaving(&mut self, ifindex: u32) {
        self.leaving.retain(|class| class.ifindex != ifindex);
    }

    pub(super) fn is_leaving(&self, id: ClassId) -> bool {
        self.leaving.iter().any(|class| class.id == id)
    }

    fn has_left(&mut self, class: Leaving, now: Instant) -> bool {
        let Leaving { ifindex, id, until } = class;
        let waits = |counts: &portolan_sys::traffic::Counts| counts.backlog > 0;
        if now < until && self.counts(ifindex).get(&id.0).is_some_and(waits) {
            return false;
        }
        let deleted = self
            .traffic()
            .and_then(|traffic| traffic.delete_class(ifindex, id.0));
        match deleted {
            Ok(()) => true,
            // A group's, whose members have not left.
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
