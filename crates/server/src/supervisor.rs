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

/// What it keeps for the next server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Of the packet filter.
    Tables,
    /// A socket with the connections that the server itself holds.
    Connections,
}

impl Kept {
    const ALL: [Kept; 2] = [Kept::Tables, Kept::Connections];

    fn name(self) -> &'static str {
        match self {
            Kept::Tables => "tables",
            Kept::Connections => "connections",
        }
    }
}

/// What it has kept for this server.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    pub tables: Vec<OwnedFd>,
    pub connections: Option<OwnedFd>,
}

/// Environment variable with the path of its socket.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// How often the service manager is notified.
#[derive(Debug)]
pub(crate) struct Supervisor {
    /// Half of the service manager's watchdog time-out; none if it does not watch.
    interval: Option<Duration>,
    is_there: bool,
}

impl Supervisor {
    pub(crate) fn new() -> Supervisor {
        Supervisor {
            interval: sd_notify::watchdog_enabled().map(|limit| limit / 2),
            is_there: std::env::var_os(NOTIFY_SOCKET).is_some(),
        }
    }

    pub(crate) fn tell_ready(&self, devices: &str) {
        let status = format!("manages {devices}");
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    /// Is there one that keeps descriptors?
    pub(crate) fn keeps(&self) -> bool {
        self.is_there
    }

    /// Has it keep descriptors for the next server, in place of those that it has.
    pub(crate) fn keep<'a>(
        &self,
        what: Kept,
        descriptors: impl IntoIterator<Item = BorrowedFd<'a>>,
    ) -> io::Result<()> {
        self.drop_kept(what);
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.into_iter().collect();
        // A map is always readable by an error, as is a socket whose other end is closed: it would close them.
        let stored = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}\n", what.name());
        let mut parts = descriptors.chunks(MAX_FDS);
        parts.try_for_each(|some| tell_with(&stored, some))
    }

    pub(crate) fn drop_kept(&self, what: Kept) {
        let removed = format!("FDSTOREREMOVE=1\nFDNAME={}", what.name());
        tell(&[NotifyState::Custom(&removed)]);
    }

    pub(crate) fn keep_nothing(&self) {
        Kept::ALL.into_iter().for_each(|what| self.drop_kept(what));
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
pub(crate) fn take_kept() -> Inherited {
    let mut inherited = Inherited::default();
    let numbers = sd_notify::listen_fds().into_iter().flatten();
    for fd in numbers.filter_map(|fd| descriptor::own(fd).ok()) {
        if rustix::net::sockopt::socket_type(&fd).is_ok() {
            inherited.connections = Some(fd);
        } else {
            inherited.tables.push(fd);
        }
    }
    inherited
}

/// As `sd_pid_notify_with_fds(3)`.
fn tell_with(message: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let Some(path) = std::env::var_os(NOTIFY_SOCKET) else {
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
