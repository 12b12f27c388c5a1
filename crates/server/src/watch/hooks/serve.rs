//! What the server does when the packet filter is missing on a device.

use portolan_bpf::Restored;
use tracing::{error, warn};

use crate::server::Server;

impl Server {
    /// Restores the packet filter where it is missing.
    pub(crate) fn on_lost_hooks(&mut self) {
        for ifindex in self.hooks.take_lost() {
            match self.filter.restore_interface(ifindex) {
                Ok(Restored::Back) => {
                    self.control.counters.hooks_restored += 1;
                    warn!(ifindex, "somebody took the packet filter off; it is back");
                }
                Ok(Restored::NotOurs) => {}
                Err(failure) => error!(ifindex, %failure, "the packet filter is off"),
            }
        }
    }
}
