//! How packets reach the sessions that processes hold: by the choice of the session or its listener, else by the
//! configuration.

use portolan_bpf::{AttachError, DriverError};
use portolan_control::{Holder, SessionEntry};
use portolan_proto::control::Delivery;
use portolan_proto::filter::FlowRow;
use portolan_proto::report::{DeliveryReport, DriverHookReport};
use portolan_types::SessionId;
use tracing::{info, warn};

use crate::server::Server;

impl Server {
    /// Returns the delivery flags of the session's row. The server's own packets are always delivered the same way.
    pub(crate) fn delivery_flags(&self, session: &SessionEntry) -> u16 {
        if !matches!(session.holder, Holder::Process(..)) {
            return 0;
        }
        match self.form_of(session.id) {
            Delivery::Ipc => FlowRow::BY_TAP,
            Delivery::ShmIpf => FlowRow::IN_DRIVER,
            Delivery::Shm | Delivery::Server => 0,
        }
    }

    pub(crate) fn form_of(&self, id: SessionId) -> Delivery {
        let session = self.control.registry.session(id);
        let chosen = session.and_then(|session| session.delivery);
        chosen.unwrap_or(self.config.delivery.form)
    }

    /// Returns the form that `portolan ss` shows: one that needs the driver hook is reported differently where no
    /// device has it.
    pub(crate) fn delivery_of(&self, id: SessionId) -> DeliveryReport {
        match self.form_of(id) {
            Delivery::ShmIpf if self.has_driver_hook() => DeliveryReport::As(Delivery::ShmIpf),
            Delivery::ShmIpf => DeliveryReport::NotInDriver,
            form => DeliveryReport::As(form),
        }
    }

    fn has_driver_hook(&self) -> bool {
        let managed = self.managed.iter();
        managed
            .map(|ifindex| self.filter.driver_hook(*ifindex))
            .any(|hook| hook.is_some())
    }

    /// Attaches the packet filter to a device and, where requested, to its driver. Without the latter, frames are
    /// delivered as in `shm`.
    pub(crate) fn filter_device(&mut self, ifindex: u32) -> Result<(), AttachError> {
        self.filter.attach_interface(ifindex)?;
        self.hooks.add(ifindex);
        let spec = self.config.delivery.xdp();
        self.driver_refusals.remove(&ifindex);
        if spec.is_empty() {
            return Ok(());
        }
        match self.filter.attach_driver(ifindex, spec) {
            Ok(hook) => info!(
                ifindex,
                hook = hook.name(),
                "the packet filter is in the driver, too"
            ),
            Err(refusal) => {
                warn!(ifindex, %refusal, "no packet filter in the driver: shm-ipf is as shm there");
                self.control.counters.driver_hooks_refused += 1;
                self.driver_refusals.insert(ifindex, refusal.to_string());
            }
        }
        Ok(())
    }

    /// Detaches the filter from drivers of devices that have got VLAN devices: frames tagged for those belong to no
    /// session.
    pub(crate) fn review_driver_hooks(&mut self) {
        for ifindex in self.filter.leave_drivers_with_vlans() {
            let refusal = DriverError::Vlan;
            warn!(ifindex, %refusal, "the packet filter has left the driver");
            self.control.counters.driver_hooks_refused += 1;
            self.driver_refusals.insert(ifindex, refusal.to_string());
        }
    }

    /// Returns the driver hooks for `portolan status`, for each device if any is requested.
    pub(crate) fn report_driver_hooks(&self) -> Vec<DriverHookReport> {
        let links = self.managed.iter().filter_map(|&ifindex| {
            let state = match (
                self.filter.driver_hook(ifindex),
                self.driver_refusals.get(&ifindex),
            ) {
                (Some(hook), _) => hook.name().to_owned(),
                (None, Some(refusal)) => format!("none: {refusal}"),
                (None, None) => return None,
            };
            let interface = self.qos.device(ifindex);
            Some(DriverHookReport { interface, state })
        });
        links.collect()
    }
}
