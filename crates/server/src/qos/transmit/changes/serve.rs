//! Changes classes, each completely or not at all.

use std::time::Duration;

use portolan_control::Timer;
use portolan_control::qos::transmit::{ClassId, LEAST_RATE, Link as Ledger};
use portolan_proto::qos::text::show_rate;
use portolan_sys::device;
use portolan_sys::traffic::{self, Traffic, TrafficError};
use tracing::{error, info, warn};

use super::super::links::{Link, Presence, rest_of, whole_of};
use super::super::serve::of_kernel;
use super::super::{RESERVED_FIRST, class};
use super::Change;
use crate::qos::request::{Outcome, Requester, refuse};
use crate::server::Server;

/// Changes of a device's speed are not reported.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Server {
    /// Sets a link's rate by the administrator's request; `None` returns to the rate that the device reports.
    pub(in crate::qos) fn set_link_rate(
        &mut self,
        requester: Requester,
        name: &str,
        bits: Option<u64>,
    ) -> Outcome {
        if requester.credentials.uid != 0 {
            return refuse(libc::EPERM, "links are root's");
        }
        let transmit = &mut self.qos.transmit;
        let mut links = transmit.links.iter();
        let known = links.find(|(_, link)| link.config.device == name);
        let Some((&ifindex, _)) = known else {
            return refuse(libc::ENODEV, format!("{name:?} is not a managed device"));
        };
        let rate = match bits {
            Some(bits) => Some(bits),
            None => transmit.rate_of(name).map_err(|error| of_kernel(&error))?,
        };
        let rate = match rate {
            None => return refuse(libc::ENODEV, format!("{name} does not tell its rate")),
            Some(rate) if rate < LEAST_RATE => {
                let least = show_rate(LEAST_RATE);
                return refuse(libc::EINVAL, format!("a link has {least} at least"));
            }
            Some(rate) => rate,
        };
        if let Some(link) = transmit.links.get_mut(&ifindex) {
            link.config.rate = bits;
            let portions = link.config.portions();
            link.ledger
                .get_or_insert_with(|| Ledger::new(rate, portions));
        }
        self.change_rate(ifindex, rate);
        Ok(())
    }

    /// Checks whether links have changed, while there are promises on any.
    pub(crate) fn look_at_links_again(&mut self) {
        if !self.qos.transmit.held.is_empty() || self.qos.groups.count() > 0 {
            self.look_at_links();
            self.look_at_leaving_classes_soon();
            self.control.timers.arm(Timer::Links, self.now + LOOK_EVERY);
        }
    }

    /// Starts the checks, since there is a promise on a link.
    pub(in crate::qos) fn watch_links(&mut self) {
        self.control.timers.arm_once(Timer::Links, self.now);
    }

    fn look_at_links(&mut self) {
        let links = self.qos.transmit.links.iter();
        let names: Vec<_> = links
            .map(|(ifindex, link)| (*ifindex, link.config.device.clone()))
            .collect();
        for (ifindex, name) in names {
            let found = device::by_name(&name).ok().map(|device| device.index);
            if found != Some(ifindex) {
                self.lose_link(ifindex);
            }
            if let Some(found) = found {
                self.find_link(ifindex, found);
            }
        }
    }

    /// Handles changes of the network's devices, of which only missing and returned ones matter here.
    pub(crate) fn on_devices(&mut self, there: &[u32]) {
        let mut links = self.qos.transmit.links.iter();
        let differs = |(ifindex, link): (&u32, &Link)| {
            link.presence == Presence::Gone || !there.contains(ifindex)
        };
        if links.any(differs) {
            self.look_at_links();
        }
    }

    /// Handles the disappearance of a device, with its scheduler and all classes.
    fn lose_link(&mut self, ifindex: u32) {
        let Some(link) = self.qos.transmit.links.get_mut(&ifindex) else {
            return;
        };
        if link.presence == Presence::Gone {
            return;
        }
        (link.presence, link.scheduler) = (Presence::Gone, None);
        let suspended = self.promises_of(ifindex).len();
        warn!(
            device = self.qos.transmit.device(ifindex),
            suspended, "a link has gone"
        );
        self.control.counters.links_lost += 1;
        self.control.counters.guarantees_suspended += suspended as u64;
        self.qos.transmit.forget_leaving(ifindex);
        self.hooks.remove(ifindex);
        if let Err(failure) = self.filter.detach_interface(ifindex) {
            info!(%failure, "the packet filter went with the device");
        }
    }

    /// Handles a device that exists, perhaps again under another index, and takes the rate that it reports.
    fn find_link(&mut self, before: u32, ifindex: u32) {
        let Some(link) = self.qos.transmit.links.get(&before) else {
            return;
        };
        if link.presence == Presence::Gone {
            self.take_back(before, ifindex);
        }
        let Some(link) = self.qos.transmit.links.get(&ifindex) else {
            return;
        };
        let known = link.ledger.as_ref().map(Ledger::rate);
        // A device without a carrier reports nothing, and has its former speed when it comes up again.
        let asked =
            (link.config.rate.is_none() && known.is_some()).then(|| link.config.device.clone());
        let told = asked.and_then(|device| self.qos.transmit.rate_of(&device).ok()?);
        if let Some(told) = told.filter(|told| Some(*told) != known) {
            self.change_rate(ifindex, told);
        } else {
            self.raise_classes(ifindex);
        }
    }

    /// Manages a device that has returned, as at the start.
    fn take_back(&mut self, before: u32, ifindex: u32) {
        let transmit = &mut self.qos.transmit;
        let Some(mut link) = transmit.links.remove(&before) else {
            return;
        };
        info!(device = link.config.device, "a link has come back");
        link.presence = Presence::There;
        transmit.links.insert(ifindex, link);
        let of_it = |held: &&mut super::super::ClassEntry| held.ifindex == before;
        transmit
            .held
            .values_mut()
            .filter(of_it)
            .for_each(|held| held.ifindex = ifindex);
        self.qos.groups.follow(before, ifindex);
        self.managed.remove(&before);
        self.managed.insert(ifindex);
        if let Err(failure) = self.filter_device(ifindex) {
            error!(%failure, "a device that has come back is not filtered");
        }
        self.publish();
    }

    fn change_rate(&mut self, ifindex: u32, rate: u64) {
        let Some(ledger) = self.qos.transmit.ledger_mut(ifindex) else {
            return;
        };
        if ledger.rate() == rate {
            return;
        }
        ledger.set_rate(rate);
        let (device, rate) = (self.qos.transmit.device(ifindex), show_rate(rate));
        info!(device, rate, "a link has another rate");
        self.control.counters.links_changed += 1;
        self.raise_classes(ifindex);
        if self.qos.transmit.is_scheduled(ifindex) {
            self.settle_whole(ifindex);
            self.tell_all_channels();
        }
    }

    /// Has the kernel give the link its rate, and its classes what they can have of it.
    fn settle_whole(&mut self, ifindex: u32) {
        let Ok(ledger) = self.ledger(ifindex) else {
            return;
        };
        let whole = whole_of(ledger);
        let set = move |traffic: &mut Traffic| traffic.set_class(ifindex, &whole);
        if let Err(error) = self.qos.transmit.traffic.ask(set) {
            warn!(%error, "a link's scheduler has its former rate");
        }
        self.settle_link(ifindex);
        self.settle_rest(ifindex);
    }

    /// Does what was left out while somebody had the lock of the network's configuration. Returns false if somebody has
    /// it still.
    pub(in crate::qos) fn catch_up(&mut self) -> bool {
        match self.qos.transmit.traffic.was_behind() {
            None => false,
            Some(false) => true,
            Some(true) => {
                let links = self.qos.transmit.links.keys();
                let scheduled = links.filter(|&&link| self.qos.transmit.is_scheduled(link));
                for ifindex in scheduled.copied().collect::<Vec<_>>() {
                    self.put_late(ifindex);
                    self.settle_whole(ifindex);
                }
                !self.qos.transmit.traffic.is_late()
            }
        }
    }

    /// Restores the scheduler and all classes on a device that has lost them.
    fn raise_classes(&mut self, ifindex: u32) {
        let promises = self.promises_of(ifindex);
        let link = self.qos.transmit.links.get(&ifindex);
        let is_wanted = !promises.is_empty() || link.is_some_and(|link| link.config.rate.is_some());
        if !is_wanted || self.qos.transmit.is_scheduled(ifindex) {
            return;
        }
        if let Err(error) = self.put_scheduler(ifindex) {
            warn!(%error, "a link has no scheduler");
        }
        if !self.qos.transmit.is_scheduled(ifindex) {
            return;
        }
        for change in &promises {
            self.put_class(ifindex, change);
            self.put_queue(ifindex, change.id);
        }
        self.control.counters.guarantees_restored += promises.len() as u64;
        self.settle_rest(ifindex);
        self.tell_holders(&promises);
    }

    /// Has the kernel keep what the link can of all its promises.
    pub(in crate::qos) fn settle_link(&mut self, ifindex: u32) {
        if !self.qos.transmit.is_scheduled(ifindex) {
            return;
        }
        let mut changes = self.promises_of(ifindex);
        changes.retain(|change| change.before != change.after);
        if changes.is_empty() {
            return;
        }
        let count = |is_it: fn(&Change) -> bool| changes.iter().filter(|one| is_it(one)).count();
        let scaled = count(|one| one.after.rate < one.before.rate);
        let restored = count(|one| one.after.rate > one.before.rate);
        self.control.counters.guarantees_scaled += scaled as u64;
        self.control.counters.guarantees_restored += restored as u64;
        let device = self.qos.transmit.device(ifindex);
        if scaled > 0 {
            warn!(
                device,
                scaled, "guarantees exceed their link, and are kept in proportion"
            );
        }
        if restored > 0 {
            info!(device, restored, "guarantees are kept better again");
        }
        for change in &changes {
            self.put_class(ifindex, change);
        }
        self.settle_rest(ifindex);
        self.tell_holders(&changes);
    }

    /// Gives best effort what is left.
    pub(crate) fn settle_rest(&mut self, ifindex: u32) {
        let Ok(ledger) = self.ledger(ifindex) else {
            return;
        };
        let rest = rest_of(ledger);
        let set = move |traffic: &mut Traffic| traffic.set_class(ifindex, &rest);
        if let Err(error) = self.qos.transmit.traffic.ask(set) {
            warn!(%error, "best effort has another rate than is left");
        }
    }

    fn tell_holders(&mut self, changes: &[Change]) {
        let held = &self.qos.transmit.held;
        let of_change = |change: &Change| Some(held.get(&change.id)?.scope.clone());
        let scopes: Vec<_> = changes.iter().filter_map(of_change).collect();
        scopes.iter().for_each(|scope| self.tell_covered(scope));
    }

    fn put_class(&mut self, ifindex: u32, change: &Change) {
        let wanted = class(change.id.0, change.parent, &change.after, RESERVED_FIRST);
        let set = move |traffic: &mut Traffic| traffic.set_class(ifindex, &wanted);
        match self.qos.transmit.traffic.ask(set) {
            Ok(()) => {
                self.qos.transmit.set_kept(change.id, change.after);
                self.qos.groups.set_kept(change.id, change.after);
            }
            Err(error) => {
                if matches!(error, TrafficError::Held) {
                    self.qos.transmit.late_classes.insert(change.id);
                }
                warn!(%error, class = change.id.0, "a guarantee is not kept")
            }
        }
    }

    fn put_queue(&mut self, ifindex: u32, id: ClassId) {
        let queue = move |traffic: &mut Traffic| traffic.set_queue(ifindex, id.0);
        if let Err(error) = self.qos.transmit.traffic.ask(queue) {
            if matches!(error, TrafficError::Held) {
                self.qos.transmit.late_queues.insert(id);
            }
            warn!(%error, class = id.0, "a class has a short queue");
        }
    }

    /// Sets what could not be set before.
    fn put_late(&mut self, ifindex: u32) {
        for change in self.promises_of(ifindex) {
            if self.qos.transmit.late_classes.remove(&change.id) {
                self.put_class(ifindex, &change);
            }
            if self.qos.transmit.late_queues.remove(&change.id) {
                self.put_queue(ifindex, change.id);
            }
        }
    }

    /// Returns a class of the link as the kernel has it; none if it has not.
    pub(in crate::qos) fn class_as_kept(
        &self,
        ifindex: u32,
        id: ClassId,
    ) -> Option<traffic::Class> {
        let mut promises = self.promises_of(ifindex).into_iter();
        let known = promises.find(|promise| promise.id == id)?;
        Some(class(id.0, known.parent, &known.before, RESERVED_FIRST))
    }

    /// Returns all promises of a link, groups before their members, and what the link can keep of each.
    fn promises_of(&self, ifindex: u32) -> Vec<Change> {
        let Ok(ledger) = self.ledger(ifindex) else {
            return Vec::new();
        };
        let groups = self.qos.groups.on(ifindex);
        let groups = groups.map(|(id, promised, before)| Change {
            id,
            parent: traffic::WHOLE,
            before,
            after: ledger.kept(promised),
        });
        let held = self.qos.transmit.held.iter();
        let held = held.filter(|(_, held)| held.ifindex == ifindex);
        let held = held.map(|(id, held)| Change {
            id: *id,
            parent: held.group.map_or(traffic::WHOLE, |(_, group)| group.0),
            before: held.kept,
            after: ledger.kept(held.terms),
        });
        groups.chain(held).collect()
    }
}
