//! The service manager (systemd): it is told when the server is ready or stops, and that its loop is running
//! (`sd_notify(3)`). Without one nothing is sent.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use portolan_sys::descriptor;
use portolan_sys::unix::{self, MAX_FDS};
use sd_notify::NotifyState;
use tracing::warn;

/// Name of what it keeps.
const KEPT: &str = "tables";

/// How often the service manager is notified.
#[derive(Debug)]
pub(crate) struct Supervisor {
    /// Half of the service manager's watchdog time-out; none if it does not watch.
    interval: Option<Duration>,
}

impl Supervisor {
    pub(crate) fn new() -> Supervisor {
        Supervisor {
            interval: sd_notify::watchdog_enabled().map(|limit| limit / 2),
        }
    }

    pub(crate) fn tell_ready(&self, devices: &str) {
        let status = format!("manages {devices}");
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    /// Has it keep descriptors for the next server, in place of those that it has.
    pub(crate) fn keep<'a>(&self, descriptors: impl Iterator<Item = BorrowedFd<'a>>) {
        self.keep_nothing();
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.collect();
        // A map is always readable by an error, and would be closed.
        let stored = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={KEPT}\n");
        for some in descriptors.chunks(MAX_FDS) {
            if let Err(error) = tell_with(&stored, some) {
                warn!(%error, "the service manager does not keep the tables");
            }
        }
    }

    pub(crate) fn keep_nothing(&self) {
        tell(&[NotifyState::Custom(&format!(
            "FDSTOREREMOVE=1\nFDNAME={KEPT}"
        ))]);
    }

    pub(crate) fn tell_stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Reports that the loop is running. Returns when to report again, if the service manager watches.
    pub(crate) fn feed(&self) -> Option<Duration> {
        let interval = self.interval?;
        tell(&[NotifyState::Watchdog]);
        Some(interval)
    }
}

/// Takes the descriptors that it has kept. Called once, at the start.
pub(crate) fn take_kept() -> Vec<OwnedFd> {
    let numbers = sd_notify::listen_fds().into_iter().flatten();
    numbers.filter_map(|fd| descriptor::own(fd).ok()).collect()
}

/// As `sd_pid_notify_with_fds(3)`.
fn tell_with(message: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&path)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    unix::send(&socket, message.as_bytes(), descriptors).map_err(io::Error::other)
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(%error, "cannot notify the service manager");
    }
}
