//! The service manager (systemd): it hears when the server is ready or stops, and that its loop turns
//! (`sd_notify(3)`). Without one nothing is sent.

use std::time::Duration;

use portolan_types::Instant;
use sd_notify::NotifyState;
use tracing::warn;

/// What the service manager was told, and when it hears the next time.
#[derive(Debug)]
pub struct Supervisor {
    /// Half of the time after which the service manager would take the server for hung; none if it does not watch.
    interval: Option<Duration>,
    next: Instant,
}

impl Supervisor {
    pub fn new(now: Instant) -> Supervisor {
        Supervisor {
            interval: sd_notify::watchdog_enabled().map(|limit| limit / 2),
            next: now,
        }
    }

    pub fn tell_ready(&self, devices: &str) {
        let status = format!("manages {devices}");
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    pub fn tell_stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// The loop turns. Returns when to say so again.
    pub fn drive(&mut self, now: Instant) -> Option<Instant> {
        let interval = self.interval?;
        if now >= self.next {
            tell(&[NotifyState::Watchdog]);
            self.next = now + interval;
        }
        Some(self.next)
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "cannot notify the service manager");
    }
}
