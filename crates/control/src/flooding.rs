//! Listeners under a SYN flood (ADR 22): while many of a listener's SYNs are answered by cookies, the packet filter
//! answers them, as the listener's owner would. This module decides when, and with what.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use portolan_proto::control::AcceptQueue;
use portolan_proto::filter::{BindingKey, Flood, FloodSeen};
use portolan_proto::report::FloodCounts;
use portolan_stack::passive::{CookieUse, flood};
use portolan_tcp::Config;
use portolan_types::{ChannelId, FlowKey, Instant, Protocol, SessionId};

use crate::control::{Control, Effect, Effects};
use crate::listener::ExemptFlows;
use crate::timer::Timer;

#[cfg(test)]
mod tests;

/// Interval between reviews of floods.
const LOOK: Duration = Duration::from_millis(100);

/// How long flows are kept that a process has named, until it reports the flood: its messages wait for their turn.
const EXPECTED_FOR: Duration = Duration::from_secs(1);

/// With fewer SYNs in an interval a flood is over: half as many as make one (`FloodDetector`).
const FEW: u64 = 100;

/// The parameters of answers to SYNs, besides those of the listener.
pub struct Answering {
    pub config: Config,
    pub cookies: CookieUse,
}

/// Counts of one flood's SYNs.
#[derive(Debug, Default)]
struct FloodedSyns {
    /// Already counted for its listeners.
    counted: FloodSeen,
    /// Total at the last review.
    looked: u64,
}

/// Flooded bindings of listeners.
#[derive(Debug, Default)]
pub(crate) struct Floods {
    met: HashMap<BindingKey, FloodedSyns>,
    /// Listeners with flows that the filter must leave to them.
    exempting: HashSet<SessionId>,
}

impl Control {
    /// Notes a SYN to the listener that was answered by a cookie, or dropped. Returns the binding if it is flooded now.
    pub fn on_unkept_syn(
        &mut self,
        id: SessionId,
        flow: &FlowKey,
        now: Instant,
    ) -> Option<BindingKey> {
        let listener = self.registry.listener_mut(id)?;
        listener.opens.flood_detector.note(now);
        if !listener.opens.flood_detector.is_flood(now) {
            return None;
        }
        let mut bindings = self.bindings_of(id).into_iter();
        let binding = bindings.find(|binding| binding.is_for(flow))?;
        (!self.floods.met.contains_key(&binding)).then_some(binding)
    }

    /// Handles a report of the process that performs the listener's handshakes: the listener is flooded, and `queue` is
    /// the state of its accept queue.
    pub fn on_flooded(
        &mut self,
        (channel, id): (ChannelId, SessionId),
        queue: AcceptQueue,
        answering: &Answering,
        now: Instant,
    ) -> Effects {
        if let Some(listener) = self.registry.listener_mut(id) {
            listener.note_queue_of(channel, queue);
        }
        let mut effects = self.review_floods_of(id, answering);
        for binding in self.bindings_of(id) {
            self.begin_flood(&binding, answering, now, &mut effects);
        }
        effects
    }

    pub fn begin_flood(
        &mut self,
        binding: &BindingKey,
        answering: &Answering,
        now: Instant,
        out: &mut Effects,
    ) {
        if answering.cookies == CookieUse::Never || self.floods.met.contains_key(binding) {
            return;
        }
        if let Some(flood) = self.flood_of(binding, answering) {
            self.counters.floods += 1;
            self.count_floods(binding, |counts| counts.floods += 1);
            self.floods.met.insert(*binding, FloodedSyns::default());
            self.look_at_floods_later(now);
            out.push(Effect::AnswerFlood(*binding, Box::new(flood)));
        }
    }

    /// The filter does not answer, or stopped answering. `seen` counts the SYNs so far.
    pub fn on_flood_ended(&mut self, binding: &BindingKey, seen: FloodSeen) {
        self.count_flooded(binding, seen);
        self.floods.met.remove(binding);
    }

    /// Notes a flow that the filter now leaves to the listener; with `None` it cannot, and must not answer for the
    /// listener.
    pub fn note_exempt(&mut self, id: SessionId, flow: Option<FlowKey>, now: Instant) {
        let Some(listener) = self.registry.listener_mut(id) else {
            return;
        };
        let exempt = listener.exempt.get_or_insert_with(|| ExemptFlows {
            flows: Vec::new(),
            named: now,
            is_incomplete: false,
        });
        exempt.is_incomplete |= flow.is_none();
        exempt.flows.extend(flow);
        exempt.named = now;
        self.floods.exempting.insert(id);
        self.look_at_floods_later(now);
    }

    /// The flows of the listener no longer need to be exempt from a flood.
    pub(crate) fn forget_exempt(&mut self, id: SessionId, out: &mut Effects) {
        self.floods.exempting.remove(&id);
        let listener = self.registry.listener_mut(id);
        if let Some(exempt) = listener.and_then(|listener| listener.exempt.take()) {
            out.push(Effect::ForgetExempt(exempt.flows));
        }
    }

    fn look_at_floods_later(&mut self, now: Instant) {
        self.timers.arm_once(Timer::Floods, now + LOOK);
    }

    fn bindings_of(&self, id: SessionId) -> Vec<BindingKey> {
        let session = self.registry.session(id);
        session.map_or_else(Vec::new, |session| {
            BindingKey::of(Protocol::Tcp, session.local, session.v6_only).collect()
        })
    }

    /// Returns what the filter answers for a binding. It cannot tell which of several listeners a SYN is for: they must
    /// agree, and all have room.
    fn flood_of(&self, binding: &BindingKey, answering: &Answering) -> Option<Flood> {
        let mut members = self.listeners.having(binding);
        let flood = self.answers_of(members.next()?, answering)?;
        let mut others = members.peekable();
        let is_full = flood.flags & Flood::FULL != 0;
        if others.peek().is_some() && is_full {
            return None;
        }
        let is_common = others.all(|id| self.answers_of(id, answering) == Some(flood));
        is_common.then_some(flood)
    }

    fn answers_of(&self, id: SessionId, answering: &Answering) -> Option<Flood> {
        let listener = self.registry.listener(id)?;
        let exempt = listener.exempt.as_ref();
        if exempt.is_some_and(|exempt| exempt.is_incomplete) {
            return None;
        }
        let mut flood = flood(&answering.config, &listener.opens.options, &listener.secret);
        if !listener.has_room() {
            flood.flags |= Flood::FULL;
        }
        Some(flood)
    }

    fn count_floods(&mut self, binding: &BindingKey, count: impl Fn(&mut FloodCounts)) {
        for id in self.listeners.having(binding) {
            if let Some(listener) = self.registry.listener_mut(id) {
                count(&mut listener.floods);
            }
        }
    }

    /// Adds the filter's counts to those of the binding's listeners.
    fn count_flooded(&mut self, binding: &BindingKey, seen: FloodSeen) {
        let Some(known) = self.floods.met.get_mut(binding) else {
            return;
        };
        let before = std::mem::replace(&mut known.counted, seen);
        let answered = seen.answered.saturating_sub(before.answered);
        let dropped = seen.dropped.saturating_sub(before.dropped);
        self.count_floods(binding, |counts| {
            counts.answered += answered;
            counts.dropped += dropped;
        });
    }

    /// Returns whether the listener is flooded, and updates its counts.
    pub fn is_flooded(&mut self, id: SessionId, seen: impl Fn(&BindingKey) -> FloodSeen) -> bool {
        let mut is_flooded = false;
        for binding in self.bindings_of(id) {
            is_flooded |= self.floods.met.contains_key(&binding);
            self.count_flooded(&binding, seen(&binding));
        }
        is_flooded
    }

    /// Returns whether any listener is flooded.
    pub fn has_floods(&self) -> bool {
        !self.floods.met.is_empty()
    }

    /// Reviews the floods of a listener that has changed or been removed.
    pub fn review_floods_of(&self, id: SessionId, answering: &Answering) -> Effects {
        let bindings = self.bindings_of(id).into_iter();
        let met = bindings.filter(|binding| self.floods.met.contains_key(binding));
        met.map(|binding| self.review_flood(&binding, answering))
            .collect()
    }

    /// Updates the answers for a flooded binding, or ends the flood if the filter can no longer answer for its
    /// listeners.
    fn review_flood(&self, binding: &BindingKey, answering: &Answering) -> Effect {
        match self.flood_of(binding, answering) {
            Some(flood) => Effect::AnswerFlood(*binding, Box::new(flood)),
            None => Effect::EndFlood(*binding),
        }
    }

    /// Ends the floods of a listener: its owner answers all further SYNs.
    pub fn end_floods_of(&mut self, id: SessionId) -> Effects {
        let bindings = self.bindings_of(id).into_iter();
        let met = bindings.filter(|binding| self.floods.met.contains_key(binding));
        let mut effects: Effects = met.map(Effect::EndFlood).collect();
        self.forget_exempt(id, &mut effects);
        effects
    }

    /// Ends the floods that are over, and schedules another review if some are not.
    pub fn look_at_floods(
        &mut self,
        answering: &Answering,
        now: Instant,
        seen: impl Fn(&BindingKey) -> FloodSeen,
    ) -> Effects {
        let bindings: Vec<BindingKey> = self.floods.met.keys().copied().collect();
        let mut effects = Effects::new();
        let mut going_on = HashSet::new();
        for binding in bindings {
            self.count_flooded(&binding, seen(&binding));
            let is_never = answering.cookies == CookieUse::Never;
            if is_never || self.newly_met(&binding) < FEW {
                effects.push(Effect::EndFlood(binding));
            } else {
                going_on.insert(binding);
                effects.push(self.review_flood(&binding, answering));
            }
        }
        let exempting: Vec<SessionId> = self.floods.exempting.iter().copied().collect();
        for id in exempting {
            let mut bindings = self.bindings_of(id).into_iter();
            let is_flooded = bindings.any(|binding| going_on.contains(&binding));
            if !is_flooded && !self.is_flood_expected(id, now) {
                self.forget_exempt(id, &mut effects);
            }
        }
        if !going_on.is_empty() || !self.floods.exempting.is_empty() {
            self.look_at_floods_later(now);
        }
        effects
    }

    /// Whether the process that named flows of the listener may be about to report the flood that they are exempt from.
    fn is_flood_expected(&self, id: SessionId, now: Instant) -> bool {
        let listener = self.registry.listener(id);
        let exempt = listener.and_then(|listener| listener.exempt.as_ref());
        exempt.is_some_and(|it| !it.is_incomplete && now.since(it.named) < EXPECTED_FOR)
    }

    /// Returns the number of SYNs since the last review.
    fn newly_met(&mut self, binding: &BindingKey) -> u64 {
        self.floods.met.get_mut(binding).map_or(0, |known| {
            let all = known.counted.answered + known.counted.dropped;
            all.saturating_sub(std::mem::replace(&mut known.looked, all))
        })
    }
}
