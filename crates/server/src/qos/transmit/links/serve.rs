//! Links as devices appear and disappear.

use portolan_control::qos::transmit::Link as Ledger;
use portolan_sys::traffic::{Before, Foreign, TrafficError};
use portolan_sys::{device, traffic};
use tracing::{info, warn};

use super::{Link, Presence, rest_of, whole_of};
use crate::config::LinkConfig;
use crate::instance::Instance;
use crate::qos::request::{Outcome, refuse};
use crate::server::Server;

const NO_RATE: &str =
    "its rate is not known: set `rate` of its `[[qos.link]]` in the configuration";

impl Server {
    /// Records the managed devices as links, and removes what a dead server has left on them.
    pub(crate) fn start_links(&mut self, instance: &Instance) {
        self.qos.transmit.journal = Some(instance.journal());
        for name in self.config.interfaces.clone() {
            let Ok(device) = device::by_name(&name) else {
                continue;
            };
            let configured = self.config.qos.link.iter().find(|link| link.device == name);
            let config = configured
                .cloned()
                .unwrap_or_else(|| LinkConfig::usual(&name));
            let leftover = instance
                .leftover_links()
                .iter()
                .find(|(device, _)| *device == name);
            self.undo_leftover(device.index, leftover.map(|(_, before)| before.as_str()));
            let is_configured = config.rate.is_some();
            let ledger = config.rate.map(|rate| Ledger::new(rate, config.portions()));
            let link = Link {
                config,
                ledger,
                scheduler: None,
                presence: Presence::There,
            };
            self.qos.transmit.links.insert(device.index, link);
            if is_configured && let Err(error) = self.put_scheduler(device.index) {
                warn!(%error, device = name, "the link's rate is not kept yet");
            }
        }
        self.qos.transmit.traffic.begin_service();
    }

    fn undo_leftover(&mut self, ifindex: u32, before: Option<&str>) {
        let before = before.map(Before::parse).unwrap_or_default();
        let undone = self.qos.transmit.traffic.ask(move |traffic| {
            if traffic.is_ours(ifindex)? {
                traffic.restore(ifindex, &before)
            } else {
                Ok(())
            }
        });
        if let Err(error) = undone {
            warn!(%error, "what a server before this one has left stays on a device");
        }
    }

    /// Restores the devices' former state.
    pub(crate) fn stop_links(&mut self) {
        self.qos.transmit.traffic.end_service();
        let links: Vec<(u32, Before)> = self
            .qos
            .transmit
            .links
            .iter_mut()
            .filter_map(|(ifindex, link)| Some((*ifindex, link.scheduler.take()?)))
            .collect();
        for (ifindex, before) in links {
            let traffic = &mut self.qos.transmit.traffic;
            let restored = traffic.ensure(move |traffic| traffic.restore(ifindex, &before));
            if let Err(error) = restored {
                warn!(%error, "a device is not left as it was");
            }
        }
    }

    /// Installs the link's scheduler on the device, if it is not installed.
    pub(crate) fn put_scheduler(&mut self, ifindex: u32) -> Result<(), TrafficError> {
        let transmit = &mut self.qos.transmit;
        let Some(link) = transmit.links.get(&ifindex) else {
            return Ok(());
        };
        let (Some(ledger), None, Presence::There) = (&link.ledger, &link.scheduler, link.presence)
        else {
            return Ok(());
        };
        let foreign = if link.config.replace {
            Foreign::Replace
        } else {
            Foreign::Keep
        };
        let classes = [whole_of(ledger), rest_of(ledger)];
        let device = link.config.device.clone();
        let looked = transmit
            .traffic
            .ask(move |traffic| traffic.look(ifindex, foreign));
        let before = looked?;
        // Recorded before it is done: if the server dies in between, the record claims too much rather than too little.
        transmit.note(&device, &before);
        let put = transmit.traffic.ask(move |traffic| {
            traffic.put(ifindex)?;
            for class in &classes {
                traffic.set_class(ifindex, class)?;
            }
            traffic.set_queue(ifindex, traffic::BEST_EFFORT)
        });
        if let Err(error) = put {
            // The first error says more.
            let _ = transmit
                .traffic
                .ensure(move |traffic| traffic.restore(ifindex, &before));
            return Err(error);
        }
        info!(device, "the link has a scheduler");
        self.look_at_leaving_classes_soon();
        let transmit = &mut self.qos.transmit;
        if let Some(link) = transmit.links.get_mut(&ifindex) {
            link.scheduler = Some(before);
        }
        self.tell_all_channels();
        Ok(())
    }

    /// Restores the device's state before its first reservation.
    pub(crate) fn take_scheduler_away(&mut self, ifindex: u32) {
        let transmit = &mut self.qos.transmit;
        let Some(link) = transmit.links.get_mut(&ifindex) else {
            return;
        };
        let Some(before) = link.scheduler.take() else {
            return;
        };
        let device = link.config.device.clone();
        let restored = transmit
            .traffic
            .ensure(move |traffic| traffic.restore(ifindex, &before));
        match restored {
            Ok(()) => info!(device, "the link has its former queueing discipline"),
            Err(TrafficError::Held) => {
                info!(device, "the link is to have its former queueing discipline")
            }
            Err(error) => warn!(%error, device, "a device is not left as it was"),
        }
        if self.qos.transmit.best_effort().is_none() {
            self.declassify_channels();
        }
    }

    /// Returns the link that is meant: by name, or the only one with a known rate.
    pub(in crate::qos) fn link_for(&mut self, device: Option<&str>) -> Outcome<u32> {
        let links = &self.qos.transmit.links;
        let Some(device) = device else {
            let mut known = links.iter().filter(|(_, link)| link.ledger.is_some());
            return match (known.next(), known.next()) {
                (Some((_, link)), None) if link.presence == Presence::Gone => {
                    refuse(libc::ENODEV, "the only link has gone")
                }
                (Some((ifindex, _)), None) => Ok(*ifindex),
                (None, _) => refuse(libc::ENODEV, NO_RATE),
                _ => refuse(libc::ENODEV, "there are several links: name the device"),
            };
        };
        match links.iter().find(|(_, link)| link.config.device == device) {
            Some((_, link)) if link.presence == Presence::Gone => {
                refuse(libc::ENODEV, format!("{device} has gone"))
            }
            None => refuse(libc::ENODEV, format!("{device:?} is not a managed device")),
            Some((_, Link { ledger: None, .. })) => {
                refuse(libc::ENODEV, format!("{device}: {NO_RATE}"))
            }
            Some((ifindex, _)) => Ok(*ifindex),
        }
    }

    pub(in crate::qos) fn ledger(&self, ifindex: u32) -> Outcome<&Ledger> {
        let link = self.qos.transmit.links.get(&ifindex);
        match link.and_then(|link| link.ledger.as_ref()) {
            Some(ledger) => Ok(ledger),
            None => refuse(libc::ENODEV, NO_RATE),
        }
    }
}
