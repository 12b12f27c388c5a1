//! What the server has lost and cannot, or could not yet, restore: devices, the packet filter on them, its own taps.

use portolan_sys::device;

use crate::server::Server;

impl Server {
    /// Returns a sentence for each fault.
    pub(crate) fn faults(&self) -> Vec<String> {
        let gone = self.qos.gone_devices().map(|device| {
            format!("device {device} is gone: connections by it wait until it is back")
        });
        let unfiltered = self.hooks.missing().into_iter().map(|ifindex| {
            let device = self.qos.device(ifindex);
            format!(
                "the packet filter is not on device {device}: what comes there is not Portolan's"
            )
        });
        let taps = [(&self.wire, "answers"), (&self.inject, "hands on")];
        let lost = taps
            .into_iter()
            .filter(|(tap, _)| !device::exists(tap.ifindex()));
        let lost = lost.map(|(_, what)| {
            format!("the device by which the server {what} was deleted: restart portoland")
        });
        gone.chain(unfiltered).chain(lost).collect()
    }
}
