//! The service manager (systemd): it is told when the server is ready or stops, and that its loop is running
//! (`sd_notify(3)`). Without one nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

/// How often the service manager is notified.
#[derive(Debug)]
pub struct Supervisor {
    /// Half of the service manager's watchdog time-out; none if it does not watch.
    interval: Option<Duration>,
}

impl Supervisor {
    pub fn new() -> Supervisor {
        Supervisor {
            interval: sd_notify::watchdog_enabled().map(|limit| limit / 2),
        }
    }

    pub fn tell_ready(&self, devices: &str) {
        let status = format!("manages {devices}");
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    pub fn tell_stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Reports that the loop is running. Returns when to report again, if the service manager watches.
    pub fn feed(&self) -> Option<Duration> {
        let interval = self.interval?;
        tell(&[NotifyState::Watchdog]);
        Some(interval)
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "cannot notify the service manager");
    }
}
