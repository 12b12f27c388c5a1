//! Requests for transmit rates.

use std::os::fd::OwnedFd;

use portolan_control::SessionEntry;
use portolan_control::qos::transmit::{ClassId, ClassRates, Link as Ledger};
use portolan_proto::qos::text::show_rate;
use portolan_proto::qos::{QosReport, RateKept, Scope, Transmit, TransmitReport};
use portolan_sys::traffic;
use portolan_sys::traffic::{Traffic, TrafficError};
use portolan_types::{ChannelId, SessionId};
use rustix::event::epoll::EventFlags;
use tracing::{info, warn};

use super::super::scope::{breadth, covers, covers_process};
use super::links::rest_of;
use super::{Class, ClassEntry, LinkCounts, RESERVED_FIRST, class, kept, open_life};
use crate::channels::pool::TAP_SEND_BUFFER;
use crate::poll::Token;
use crate::qos::request::{Outcome, Requester, refusal, refuse};
use crate::server::{Server, Source};

/// Lower classes are the scheduler's own.
const FIRST_CLASS: u16 = portolan_proto::filter::FIRST_CLASS;
/// Each costs the kernel a few hundred bytes and an entry in its trees.
const CLASSES_MAX: usize = 4096;

/// Limit of one user other than root.
const CLASSES_PER_USER: usize = 64;

impl Server {
    pub(crate) fn reserve_transmit(
        &mut self,
        requester: Requester,
        scope: Scope,
        spec: Transmit,
    ) -> Outcome {
        let life = open_life(&scope)?;
        self.may_decide(requester, &scope)?;
        let uid = requester.credentials.uid;
        let known = self.qos.transmit.by_scope.get(&scope).copied();
        self.may_change(requester, known)?;
        let ifindex = self.link_for(spec.device.as_deref())?;
        let terms = self.ledger(ifindex)?.terms(&spec).map_err(refusal)?;
        let class = match known {
            Some(class)
                if self
                    .qos
                    .transmit
                    .held
                    .get(&class)
                    .is_some_and(|held| held.ifindex == ifindex) =>
            {
                class
            }
            _ => self.free_class(requester)?,
        };
        let mut ledger = self.ledger(ifindex)?.clone();
        requester.reserve(&mut ledger, class, terms.rate)?;
        let held = ClassEntry::new(scope, ifindex, uid, terms);
        self.install(class, held, ledger, life)?;
        if let Some(other) = known.filter(|known| *known != class) {
            // It was on another link.
            self.drop_class(other);
        }
        self.control.counters.reservations += 1;
        Ok(())
    }

    /// Installs what was admitted, or changes nothing.
    pub(in crate::qos) fn install(
        &mut self,
        id: ClassId,
        mut held: ClassEntry,
        ledger: Ledger,
        life: Option<OwnedFd>,
    ) -> Outcome {
        let parent = held.group.map_or(traffic::WHOLE, |(_, group)| group.0);
        held.life = match self.qos.transmit.held.get_mut(&id) {
            Some(old) => old.life.take(),
            None => self.watch_life(id, life)?,
        };
        held.kept = ledger.kept(held.terms);
        if let Err(refusal) = self.realise(held.ifindex, ledger, (id, parent), &held.kept) {
            match (self.qos.transmit.held.get_mut(&id), held.life) {
                (Some(old), life) => old.life = life,
                (None, Some((fd, token))) => self.poll.remove(&fd, token),
                (None, None) => {}
            }
            return Err(refusal);
        }
        let scope = held.scope.clone();
        info!(%scope, class = id.0, rate = show_rate(held.terms.rate), "transmit rate reserved");
        self.qos.transmit.by_scope.insert(scope.clone(), id);
        let ifindex = held.ifindex;
        self.qos.transmit.held.insert(id, held);
        self.watch_links();
        self.tell_covered(&scope);
        self.settle_link(ifindex);
        Ok(())
    }

    /// Installs a class within its parent, and gives best effort what `ledger` leaves. On failure everything is
    /// as before.
    pub(crate) fn realise(
        &mut self,
        ifindex: u32,
        ledger: Ledger,
        (id, parent): (ClassId, u16),
        terms: &ClassRates,
    ) -> Outcome {
        self.put_scheduler(ifindex)
            .map_err(|error| of_kernel(&error))?;
        let before = rest_of(self.ledger(ifindex)?);
        let after = rest_of(&ledger);
        let is_new = !self.ledger(ifindex)?.has(id);
        let wanted = class(id.0, parent, terms, RESERVED_FIRST);
        let traffic = &mut self.qos.transmit.traffic;
        let done = traffic.ask(move |traffic| {
            traffic.set_class(ifindex, &after)?;
            traffic.set_class(ifindex, &wanted)?;
            if is_new {
                traffic.set_queue(ifindex, id.0)?;
            }
            Ok(())
        });
        if let Err(error) = done {
            let former = self.class_as_kept(ifindex, id);
            let undo = move |traffic: &mut Traffic| {
                let rest = traffic.set_class(ifindex, &before);
                match former {
                    Some(former) => traffic.set_class(ifindex, &former)?,
                    None => traffic.delete_class(ifindex, id.0)?,
                }
                rest
            };
            // The first error says more.
            let _ = self.qos.transmit.traffic.ensure(undo);
            return Err(of_kernel(&error));
        }
        if let Some(known) = self.qos.transmit.ledger_mut(ifindex) {
            *known = ledger;
        }
        Ok(())
    }

    fn watch_life(
        &mut self,
        id: ClassId,
        life: Option<OwnedFd>,
    ) -> Outcome<Option<(OwnedFd, Token)>> {
        let Some(fd) = life else { return Ok(None) };
        match self.poll.add(&fd, Source::Holder(id), EventFlags::IN) {
            Ok(token) => Ok(Some((fd, token))),
            Err(errno) => refuse(
                errno.raw_os_error(),
                format!("cannot watch the process: {errno}"),
            ),
        }
    }

    /// Handles the end of a reservation's process.
    pub(crate) fn on_holder_gone(&mut self, id: ClassId) {
        self.control.counters.reservations_orphaned += 1;
        self.drop_class(id);
    }

    pub(crate) fn end_transmit(&mut self, requester: Requester, scope: &Scope) -> Outcome {
        let Some(&id) = self.qos.transmit.by_scope.get(scope) else {
            return refuse(libc::ENOENT, format!("{scope} has no transmit reservation"));
        };
        self.may_decide(requester, scope)?;
        self.may_change(requester, Some(id))?;
        self.drop_class(id);
        Ok(())
    }

    /// Checks that the requester may change the reservation: root's only root may; a group's flow must leave the
    /// group first.
    fn may_change(&self, requester: Requester, known: Option<ClassId>) -> Outcome {
        let held = known.and_then(|id| self.qos.transmit.held.get(&id));
        match held {
            Some(ClassEntry {
                group: Some((key, _)),
                scope,
                ..
            }) => refuse(
                libc::EBUSY,
                format!("{scope} is in group {key}: it must leave that first"),
            ),
            Some(ClassEntry { uid, scope, .. })
                if requester.credentials.uid != 0 && requester.credentials.uid != *uid =>
            {
                refuse(
                    libc::EPERM,
                    format!("{scope} was given its rate by another user"),
                )
            }
            _ => Ok(()),
        }
    }

    /// Releases a reservation, and the class with the frames queued in it.
    pub(crate) fn drop_class(&mut self, id: ClassId) {
        let Some(held) = self.qos.transmit.held.remove(&id) else {
            return;
        };
        // Otherwise the scope has another class by now, on another link.
        if self.qos.transmit.by_scope.get(&held.scope) == Some(&id) {
            self.qos.transmit.by_scope.remove(&held.scope);
        }
        if let Some((fd, token)) = held.life {
            self.poll.remove(&fd, token);
        }
        // Sessions that continue are moved before their class is removed.
        self.tell_covered(&held.scope);
        self.release_rate(held.ifindex, id);
        info!(
            scope = %held.scope,
            class = id.0,
            "transmit rate free again"
        );
    }

    /// Returns the rate of a class to best effort.
    pub(crate) fn release_rate(&mut self, ifindex: u32, id: ClassId) {
        let transmit = &mut self.qos.transmit;
        let Some(ledger) = transmit.ledger_mut(ifindex) else {
            return;
        };
        ledger.release(id);
        self.look_at_leaving_classes_soon();
        let transmit = &self.qos.transmit;
        if transmit.is_scheduled(ifindex) {
            // Others may keep more of their promises now, and best effort gets the rest.
            self.settle_link(ifindex);
            self.settle_rest(ifindex);
            self.remove_class(ifindex, id);
        }
    }

    /// Returns a free class for the requester: the one that it had under the previous server, if possible.
    pub(in crate::qos) fn free_class(&self, requester: Requester) -> Outcome<ClassId> {
        let uid = requester.credentials.uid;
        let held = self.qos.transmit.held.values();
        let own = held.filter(|held| held.uid == uid).count() + self.qos.groups.count_of(uid);
        if uid != 0 && own >= CLASSES_PER_USER {
            return refuse(
                libc::EDQUOT,
                format!("you have {CLASSES_PER_USER} reservations and groups, the most of a user"),
            );
        }
        let is_free = |id: &ClassId| {
            !self.qos.transmit.is_leaving(*id)
                && !self.qos.transmit.held.contains_key(id)
                && !self.qos.groups.has_class(*id)
        };
        let count = self.qos.transmit.held.len() + self.qos.groups.count();
        let former = requester.former_class().filter(is_free);
        let free = former.or_else(|| (FIRST_CLASS..u16::MAX).map(ClassId).find(is_free));
        match free.filter(|_| count < CLASSES_MAX) {
            Some(id) => Ok(id),
            None => refuse(
                libc::ENOSPC,
                format!("there are {CLASSES_MAX} reservations, the most there can be"),
            ),
        }
    }

    /// Moves what a scope covers to its present class.
    pub(crate) fn tell_covered(&mut self, scope: &Scope) {
        self.scope_has_changed(scope);
        // Done first: sessions to be moved to a transmit queue must not enter its class before.
        if let Scope::Flow(_) | Scope::Port { .. } = scope {
            self.refresh_tx_queues(Some(scope));
        }
        let covered: Vec<SessionId> = self
            .control
            .registry
            .sessions()
            .filter(|session| covers(scope, session))
            .map(|session| session.id)
            .collect();
        for id in covered {
            self.tell_session(id);
        }
        let channels: Vec<ChannelId> = self
            .channels
            .keys()
            .copied()
            .filter(|&channel| {
                self.control
                    .registry
                    .process(channel)
                    .is_some_and(|process| covers_process(scope, process))
            })
            .collect();
        for channel in channels {
            self.tell_channel(channel);
        }
    }

    pub(crate) fn tell_all_channels(&mut self) {
        if let Err(error) =
            self.filter
                .set_tap(ChannelId::SERVER, self.wire.ifindex(), traffic::BEST_EFFORT)
        {
            warn!(%error, "cannot classify what the server sends");
        }
        let channels: Vec<ChannelId> = self.channels.keys().copied().collect();
        for channel in channels {
            self.tell_channel(channel);
        }
    }

    /// Takes all processes out of their classes, with the back-pressure of taps without one.
    pub(crate) fn declassify_channels(&self) {
        const NO_CLASS: u16 = 0;
        let server = [(ChannelId::SERVER, self.wire.ifindex())];
        let processes = self.channels.iter().map(|(&channel, held)| {
            self.calls.bound_tap(&held.tap, TAP_SEND_BUFFER);
            (channel, held.tap.ifindex)
        });
        for (channel, ifindex) in server.into_iter().chain(processes) {
            if let Err(error) = self.filter.set_tap(channel, ifindex, NO_CLASS) {
                warn!(%error, "what a channel sends keeps its class");
            }
        }
    }

    /// Applies a channel's class and the back-pressure that it needs. Also called for new processes.
    pub(crate) fn tell_channel(&mut self, channel: ChannelId) {
        let Some(best_effort) = self.qos.transmit.best_effort() else {
            return;
        };
        let class = self.class_of_channel(channel);
        self.tell_main_burst(channel, class.map(|class| class.terms.burst));
        let (minor, terms) = class.map_or((traffic::BEST_EFFORT, best_effort), |class| {
            (class.minor.0, class.terms)
        });
        let Some(tap) = self.channels.get(&channel).map(|channel| &channel.tap) else {
            return;
        };
        self.calls.bound_tap(tap, terms.send_buffer());
        if let Err(error) = self.filter.set_tap(channel, tap.ifindex, minor) {
            warn!(%error, "cannot classify what a process sends");
        }
        for id in self.sessions_owned_by(channel) {
            self.tell_session(id);
        }
    }

    pub(crate) fn sessions_owned_by(&self, channel: ChannelId) -> Vec<SessionId> {
        let sessions = self.control.registry.sessions();
        let owned = sessions.filter(|session| session.owner() == Some(channel));
        owned.map(|session| session.id).collect()
    }

    /// Returns the class of everything that the process has.
    pub(crate) fn class_of_channel(&self, channel: ChannelId) -> Option<Class> {
        let process = self.control.registry.process(channel)?;
        let held = self.qos.transmit.held.iter();
        held.filter(|(_, held)| covers_process(&held.scope, process))
            .min_by_key(|(_, held)| breadth(&held.scope))
            .map(|(id, held)| held.class(*id))
    }

    /// Returns the session's own class, by its flow or its port.
    pub(crate) fn class_of(&self, session: &SessionEntry) -> Option<Class> {
        Some(self.own_reservation(session)?.1)
    }

    pub(crate) fn own_reservation(&self, session: &SessionEntry) -> Option<(&Scope, Class)> {
        let transmit = &self.qos.transmit;
        if transmit.held.is_empty() {
            return None;
        }
        let port = Scope::Port {
            protocol: session.protocol,
            port: session.local.port(),
        };
        let scopes = session
            .flow()
            .map(|flow| Scope::Flow(flow.canonical()))
            .into_iter()
            .chain([port]);
        let id = scopes
            .into_iter()
            .find_map(|scope| transmit.by_scope.get(&scope))?;
        let held = transmit.held.get(id)?;
        Some((&held.scope, held.class(*id)))
    }

    pub(crate) fn end_transmit_of(&mut self, flow: &Scope) {
        if let Some(class) = self.qos.transmit.by_scope.get(flow).copied() {
            self.drop_class(class);
        }
    }

    pub(in crate::qos) fn report_transmit(&self, counts: &LinkCounts, report: &mut QosReport) {
        let held = self.qos.transmit.held.iter();
        report.transmit = held
            .map(|(id, held)| TransmitReport {
                scope: held.scope.clone(),
                device: self.qos.transmit.device(held.ifindex),
                class: id.0,
                uid: held.uid,
                rate: held.terms.rate,
                ceiling: held.terms.ceiling,
                burst: held.terms.burst,
                group: held.group.map(|(key, _)| key),
                kept: if self.qos.transmit.late_classes.contains(id) {
                    RateKept::Suspended
                } else {
                    let link = self.qos.transmit.link(held.ifindex);
                    kept(link, &held.terms, &held.kept)
                },
                traffic: counts.of(held.ifindex, id.0),
            })
            .collect();
    }
}

pub(super) fn of_kernel(error: &TrafficError) -> portolan_proto::qos::Refusal {
    let errno = match error {
        TrafficError::Open(errno) | TrafficError::Kernel { errno, .. } => errno.raw_os_error(),
        TrafficError::Held => libc::EAGAIN,
        TrafficError::InTheWay { .. } | TrafficError::NotRestorable { .. } => libc::EBUSY,
    };
    portolan_proto::qos::Refusal {
        errno,
        reason: error.to_string(),
    }
}
