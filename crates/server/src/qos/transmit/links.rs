//! Managed devices as links: their rates, their schedulers, and what was there before.

use std::collections::HashMap;

use portolan_control::qos::transmit::{ClassRates, Link as Ledger};
use portolan_proto::qos::{ClassTraffic, LinkReport};
use portolan_sys::device;
use portolan_sys::traffic::{self, Before, Counts, Foreign, Traffic, TrafficError};
use tracing::{info, warn};

use super::{RESERVED_FIRST, Reservations, class};
use crate::config::LinkConfig;
use crate::instance::Instance;
use crate::qos::{Outcome, refuse};
use crate::server::Server;

/// Best effort goes after what is reserved.
const BEST_EFFORT_LAST: u32 = 1;

/// A managed device.
#[derive(Debug)]
pub(in crate::qos) struct Link {
    pub(super) config: LinkConfig,
    /// None while its rate is not known.
    pub(super) ledger: Option<Ledger>,
    /// What was there before our scheduler, if that is there.
    pub(super) scheduler: Option<Before>,
    pub(super) presence: Presence,
}

/// Is there a device of the link's name?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    There,
    /// Its number may be another device's by now.
    Gone,
}

const NO_RATE: &str =
    "its rate is not known: set `rate` of its `[[qos.link]]` in the configuration";

/// What all have that nothing is reserved for.
pub(super) fn rest_of(ledger: &Ledger) -> traffic::Class {
    class(
        traffic::BEST_EFFORT,
        traffic::WHOLE,
        &ledger.best_effort(),
        BEST_EFFORT_LAST,
    )
}

pub(super) fn whole_of(ledger: &Ledger) -> traffic::Class {
    class(traffic::WHOLE, 0, &ledger.whole(), RESERVED_FIRST)
}

/// What the classes of each link have sent.
#[derive(Debug, Default)]
pub(in crate::qos) struct LinkCounts(HashMap<(u32, u16), Counts>);

impl LinkCounts {
    pub(in crate::qos) fn of(&self, ifindex: u32, minor: u16) -> ClassTraffic {
        let counts = self.0.get(&(ifindex, minor));
        counts.map_or_else(ClassTraffic::default, |counts| ClassTraffic {
            bytes: counts.bytes,
            packets: counts.packets,
            drops: u64::from(counts.drops),
            backlog: counts.backlog,
        })
    }
}

impl Server {
    /// Knows the managed devices as links; takes away what a server that died has left on them.
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
    }

    fn undo_leftover(&mut self, ifindex: u32, before: Option<&str>) {
        let before = before.map(Before::parse).unwrap_or_default();
        let undone =
            self.qos
                .transmit
                .traffic()
                .and_then(|traffic| match traffic.is_ours(ifindex)? {
                    true => traffic.restore(ifindex, &before),
                    false => Ok(()),
                });
        if let Err(error) = undone {
            warn!(%error, "what a server before this one has left stays on a device");
        }
    }

    /// Leaves the devices as they were.
    pub(crate) fn stop_links(&mut self) {
        let links: Vec<(u32, Before)> = self
            .qos
            .transmit
            .links
            .iter_mut()
            .filter_map(|(ifindex, link)| Some((*ifindex, link.scheduler.take()?)))
            .collect();
        for (ifindex, before) in links {
            let restored = self
                .qos
                .transmit
                .traffic()
                .and_then(|traffic| traffic.restore(ifindex, &before));
            if let Err(error) = restored {
                warn!(%error, "a device is not left as it was");
            }
        }
    }

    /// Has the link's scheduler take over the device, if it has not.
    pub(super) fn put_scheduler(&mut self, ifindex: u32) -> Result<(), TrafficError> {
        let transmit = &mut self.qos.transmit;
        let Some(link) = transmit.links.get(&ifindex) else {
            return Ok(());
        };
        let (Some(ledger), None, Presence::There) = (&link.ledger, &link.scheduler, link.presence)
        else {
            return Ok(());
        };
        let foreign = match link.config.replace {
            true => Foreign::Replace,
            false => Foreign::Keep,
        };
        let classes = [whole_of(ledger), rest_of(ledger)];
        let device = link.config.device.clone();
        let traffic = transmit.traffic()?;
        let before = traffic.look(ifindex, foreign)?;
        // Said before it is done: a server that dies in between leaves too much word, not too little.
        transmit.note(&device, &before);
        let traffic = transmit.traffic()?;
        let put = traffic
            .put(ifindex)
            .and_then(|()| {
                classes
                    .iter()
                    .try_for_each(|class| traffic.set_class(ifindex, class))
            })
            .and_then(|()| traffic.set_queue(ifindex, traffic::BEST_EFFORT));
        if let Err(error) = put {
            let _ = traffic.restore(ifindex, &before);
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

    /// The device is as it was before its first reservation.
    pub(super) fn take_scheduler_away(&mut self, ifindex: u32) {
        let transmit = &mut self.qos.transmit;
        let Some(link) = transmit.links.get_mut(&ifindex) else {
            return;
        };
        let Some(before) = link.scheduler.take() else {
            return;
        };
        let device = link.config.device.clone();
        let restored = transmit
            .traffic()
            .and_then(|traffic| traffic.restore(ifindex, &before));
        match restored {
            Ok(()) => info!(device, "the link has its former queueing discipline"),
            Err(error) => warn!(%error, device, "a device is not left as it was"),
        }
        if self.qos.transmit.best_effort().is_none() {
            self.declassify_channels();
        }
    }

    /// The link that is meant: by name, or the only one whose rate is known.
    pub(in crate::qos) fn link_for(&mut self, device: Option<&str>) -> Outcome<u32> {
        let links = &mut self.qos.transmit.links;
        for link in links.values_mut() {
            link.detect();
        }
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

impl Reservations {
    pub(super) fn ledger_mut(&mut self, ifindex: u32) -> Option<&mut Ledger> {
        self.links.get_mut(&ifindex)?.ledger.as_mut()
    }

    /// Of all links, each asked once.
    pub(in crate::qos) fn count_links(&mut self) -> LinkCounts {
        let ifindices: Vec<u32> = self.links.keys().copied().collect();
        let mut all = LinkCounts::default();
        for ifindex in ifindices {
            let counts = self.counts(ifindex).into_iter();
            all.0
                .extend(counts.map(|(minor, counts)| ((ifindex, minor), counts)));
        }
        all
    }

    pub(in crate::qos) fn report_links(&mut self, counts: &LinkCounts) -> Vec<LinkReport> {
        let links = self.links.iter_mut().map(|(ifindex, link)| {
            link.detect();
            let ledger = link.ledger.as_ref();
            LinkReport {
                device: link.config.device.clone(),
                gone: link.presence == Presence::Gone,
                rate: ledger.map(Ledger::rate),
                reservable: ledger.map_or(0, Ledger::reservable),
                reserved: ledger.map_or(0, Ledger::reserved),
                best_effort: counts.of(*ifindex, traffic::BEST_EFFORT),
                replaced: link.scheduler.as_ref().and_then(Before::name),
            }
        });
        links.collect()
    }

    pub(super) fn traffic(&mut self) -> Result<&mut Traffic, TrafficError> {
        match &mut self.traffic {
            Some(traffic) => Ok(traffic),
            none => Ok(none.insert(Traffic::open()?)),
        }
    }

    fn note(&self, device: &str, before: &Before) {
        let noted = self
            .journal
            .as_ref()
            .map(|journal| journal.record_link(device, &before.record()));
        if let Some(Err(error)) = noted {
            warn!(%error, "a scheduler would stay if this server died");
        }
    }

    /// The narrowest best effort of all links with a scheduler; none if there is none.
    pub(super) fn best_effort(&self) -> Option<ClassRates> {
        let scheduled = self.links.values().filter(|link| link.scheduler.is_some());
        let terms = scheduled.filter_map(|link| link.ledger.as_ref().map(Ledger::best_effort));
        terms.min_by_key(|terms| terms.rate)
    }

    pub(in crate::qos) fn device(&self, ifindex: u32) -> String {
        let link = self.links.get(&ifindex);
        link.map(|link| link.config.device.clone())
            .unwrap_or_default()
    }

    pub(super) fn is_scheduled(&self, ifindex: u32) -> bool {
        let link = self.links.get(&ifindex);
        link.is_some_and(|link| link.scheduler.is_some())
    }

    pub(in crate::qos) fn link(&self, ifindex: u32) -> Option<&Link> {
        self.links.get(&ifindex)
    }

    pub(super) fn counts(&mut self, ifindex: u32) -> HashMap<u16, Counts> {
        if !self.is_scheduled(ifindex) {
            return HashMap::new();
        }
        match self.traffic().and_then(|traffic| traffic.counts(ifindex)) {
            Ok(counts) => counts.into_iter().collect(),
            Err(error) => {
                warn!(%error, "cannot count what classes have sent");
                HashMap::new()
            }
        }
    }
}

impl Link {
    /// A scheduler that no rate of the configuration asks for, without a reservation.
    pub(super) fn is_unused(&self) -> bool {
        let is_idle = self
            .ledger
            .as_ref()
            .is_some_and(|ledger| ledger.reserved() == 0);
        is_idle && self.scheduler.is_some() && self.config.rate.is_none()
    }

    /// Asks the device for its rate if that is not known.
    fn detect(&mut self) {
        if self.ledger.is_none() {
            let rate = device::rate(&self.config.device);
            self.ledger = rate.map(|rate| Ledger::new(rate, self.config.portions()));
        }
    }
}
