//! Sessions of the previous server: processes that reopen them keep their numbers. Several processes may share the
//! descriptor of one listener, as forked workers do, and all find it dead. The first one reopens the listener, and the
//! others get its new descriptor from the server, which keeps a copy as long as one of these processes has it.

mod serve;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use portolan_types::ChannelId;

/// The descriptor of a reopened session, for other processes that had it under the previous server.
#[derive(Debug)]
pub(crate) struct Rejoining {
    near: OwnedFd,
    processes: BTreeSet<ChannelId>,
}

impl Rejoining {
    pub(crate) fn new(near: OwnedFd, first: ChannelId) -> Rejoining {
        Rejoining {
            near,
            processes: BTreeSet::from([first]),
        }
    }

    pub(crate) fn into_near(self) -> OwnedFd {
        self.near
    }
}
