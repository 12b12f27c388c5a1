//! Removes empty classes.

use std::time::Duration;

use portolan_control::Timer;
use portolan_control::qos::transmit::ClassId;

use super::{Idle, LINGER, Leaving};
use crate::server::Server;

const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// While somebody takes the lock of the network's configuration again and again: each try makes the main thread wait.
const NOT_AGAIN_BEFORE: Duration = Duration::from_millis(200);

impl Server {
    /// Removes a class, at once or, if frames are queued, soon.
    pub(crate) fn remove_class(&mut self, ifindex: u32, id: ClassId) {
        let until = self.now + LINGER;
        self.qos
            .transmit
            .leaving
            .push(Leaving { ifindex, id, until });
        self.look_at_leaving_classes();
    }

    /// Schedules a check for classes and schedulers to remove.
    pub(in crate::qos) fn look_at_leaving_classes_soon(&mut self) {
        self.control.timers.defer(Timer::LeavingClasses);
    }

    pub(crate) fn look_at_leaving_classes(&mut self) {
        let now = self.now;
        if !self.catch_up() {
            return self
                .control
                .timers
                .arm(Timer::LeavingClasses, now + NOT_AGAIN_BEFORE);
        }
        let transmit = &mut self.qos.transmit;
        let leaving = std::mem::take(&mut transmit.leaving);
        for class in leaving {
            if !transmit.has_left(class, now) {
                transmit.leaving.push(class);
            }
        }
        self.restore_idle_links();
        let transmit = &self.qos.transmit;
        if !transmit.leaving.is_empty() || !transmit.idle.is_empty() {
            self.look_at_leaving_classes_again();
        }
    }

    fn look_at_leaving_classes_again(&mut self) {
        let again = self.now + LOOK_AGAIN;
        self.control.timers.arm(Timer::LeavingClasses, again);
    }

    /// Restores the former queueing disciplines of devices without classes.
    fn restore_idle_links(&mut self) {
        let now = self.now;
        let mut idle = std::mem::take(&mut self.qos.transmit.idle);
        idle.retain(|link| self.qos.transmit.is_unused(link.ifindex));
        for ifindex in self.qos.transmit.unused_links() {
            if !idle.iter().any(|link| link.ifindex == ifindex) {
                let until = now + LINGER;
                idle.push(Idle { ifindex, until });
            }
        }
        idle.retain(|link| {
            let waits = now < link.until && self.qos.transmit.has_backlog(link.ifindex);
            if !waits {
                self.take_scheduler_away(link.ifindex);
            }
            waits
        });
        self.qos.transmit.idle = idle;
    }
}
