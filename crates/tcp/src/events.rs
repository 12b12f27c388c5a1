//! What happened since the socket layer last called [`Connection::events`](crate::Connection::events).

use core::fmt;
use core::ops::BitOr;

use crate::encoding;

/// A set of events.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Events(u16);

encoding::fields!(Events(_));

impl Events {
    pub const NONE: Events = Events(0);
    pub const CONNECTED: Events = Events(1);
    pub const READABLE: Events = Events(2);
    pub const WRITABLE: Events = Events(4);
    pub const PEER_CLOSED: Events = Events(8);
    pub const ERROR: Events = Events(16);
    pub const CLOSED: Events = Events(32);
    /// The peer announced an urgent byte (`SIGURG`).
    pub const URGENT: Events = Events(64);
    /// The urgent byte has arrived (`POLLPRI`).
    pub const PRIORITY: Events = Events(128);
    /// The final acknowledgement of a handshake was dropped, as the holder requested.
    pub const HELD: Events = Events(256);

    const NAMES: [(Events, &'static str); 9] = [
        (Events::CONNECTED, "CONNECTED"),
        (Events::READABLE, "READABLE"),
        (Events::WRITABLE, "WRITABLE"),
        (Events::PEER_CLOSED, "PEER_CLOSED"),
        (Events::ERROR, "ERROR"),
        (Events::CLOSED, "CLOSED"),
        (Events::URGENT, "URGENT"),
        (Events::PRIORITY, "PRIORITY"),
        (Events::HELD, "HELD"),
    ];

    pub const fn contains(self, other: Events) -> bool {
        self.0 & other.0 == other.0
    }

    pub const fn intersects(self, other: Events) -> bool {
        self.0 & other.0 != 0
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn insert(&mut self, other: Events) {
        self.0 |= other.0;
    }

    pub(crate) fn take(&mut self) -> Events {
        core::mem::take(self)
    }
}

impl BitOr for Events {
    type Output = Events;
    fn bitor(self, other: Events) -> Events {
        Events(self.0 | other.0)
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(
                Events::NAMES
                    .iter()
                    .filter(|(e, _)| self.contains(*e))
                    .map(|(_, n)| n),
            )
            .finish()
    }
}
