//! Listeners under a flood of SYNs (ADR 22): while many of a listener's SYNs are answered by cookies,
//! the packet filter answers them, as the listener's owner would. What is decided here is when, and
//! with what.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use portolan_bpf::FloodSeen;
use portolan_control::{Command, Errno, Timer};
use portolan_proto::control::AcceptQueue;
use portolan_proto::filter::{BindingKey, Flood};
use portolan_proto::report::{CookieCounts, FloodCounts, ListenerReport};
use portolan_stack::passive::flood;
use portolan_stack::{CookieUse, SOMAXCONN};
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId};
use tracing::{debug, warn};

use crate::control_socket::clients::Answer;
use crate::server::Server;

/// From one look at floods to the next.
const LOOK: Duration = Duration::from_millis(100);

/// With fewer SYNs meanwhile a flood is over: half as many as make one (`FloodDetector`).
const FEW: u64 = 100;

/// The listeners' bindings that are flooded.
#[derive(Debug, Default)]
pub struct Floods {
    met: HashMap<BindingKey, FloodedSyns>,
    /// Listeners with flows that the filter is to leave to them.
    exempting: HashSet<SessionId>,
}

/// SYNs of one flood.
#[derive(Debug, Default)]
struct FloodedSyns {
    /// Counted for its listeners.
    counted: FloodSeen,
    /// All up to the last look.
    looked: u64,
}

/// What both queues of a listener hold, and as many that have left them.
const SPARED_MAX: usize = 4 * SOMAXCONN as usize;

impl Server {
    /// A SYN to the listener was answered by a cookie, or dropped.
    pub fn note_unkept(&mut self, id: SessionId, flow: &FlowKey) {
        let now = self.now;
        self.rx_throttle.note(now);
        let Some(listener) = self.control.registry.listener_mut(id) else {
            return;
        };
        listener.flood_detector.note(now);
        if listener.flood_detector.is_flood(now) {
            let mut bindings = self.bindings_of(id).into_iter();
            if let Some(binding) = bindings.find(|binding| binding.is_for(flow)) {
                self.begin_flood(&binding);
            }
        }
    }

    fn begin_flood(&mut self, binding: &BindingKey) {
        let is_never = self.sysctls.values().cookies == CookieUse::Never;
        let is_known = self.floods.met.contains_key(binding);
        if !is_never && !is_known && self.steer_flood(binding) {
            debug!(?binding, "SYNs are a flood");
            self.control.counters.floods += 1;
            self.count_floods(binding, |counts| counts.floods += 1);
            self.floods.met.insert(*binding, FloodedSyns::default());
            self.look_at_floods_later();
        }
    }

    /// `Flooded`: as a delegate says.
    pub fn flooded(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        queue: AcceptQueue,
    ) -> Result<Answer, Errno> {
        self.check_delegate(channel, id)?;
        let listener = self.control.registry.listener_mut(id);
        if let Some(delegate) = listener.and_then(|listener| listener.delegate.as_mut()) {
            delegate.queue = queue;
        }
        self.review_floods_of(id);
        for binding in self.bindings_of(id) {
            self.begin_flood(&binding);
        }
        Ok(Answer::Silence)
    }

    /// `Spare`: as a delegate says. What it says of others' flows is not heeded.
    pub fn spare(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        flows: &[FlowKey],
    ) -> Result<Answer, Errno> {
        self.check_delegate(channel, id)?;
        for flow in flows {
            if let Ok(flow) = self.flow_of(id, flow.local, flow.remote) {
                self.spare_flow(id, flow);
            }
        }
        self.look_at_floods_later();
        Ok(Answer::Silence)
    }

    fn check_delegate(&self, channel: ChannelId, id: SessionId) -> Result<(), Errno> {
        self.control.registry.admit(channel, Command::Serve, id)?;
        match self.is_delegate(id, channel) {
            true => Ok(()),
            false => Err(Errno::PERM),
        }
    }

    fn spare_flow(&mut self, id: SessionId, flow: FlowKey) {
        let Some(listener) = self.control.registry.listener_mut(id) else {
            return;
        };
        self.floods.exempting.insert(id);
        let exempt = listener.exempt.get_or_insert_default();
        let has_room = exempt.flows.len() < SPARED_MAX;
        if has_room && self.filter.floods.spare(&flow).is_ok() {
            exempt.flows.push(flow);
        } else {
            exempt.is_incomplete = true;
        }
    }

    /// No flood needs to know of the listener's connections any more.
    pub fn forget_spared(&mut self, id: SessionId) {
        self.floods.exempting.remove(&id);
        let listener = self.control.registry.listener_mut(id);
        let exempt = listener.and_then(|listener| listener.exempt.take());
        for flow in exempt.unwrap_or_default().flows {
            if let Err(error) = self.filter.floods.spare_no_more(&flow) {
                warn!(%error, "a flow stays spared");
            }
        }
    }

    fn look_at_floods_later(&mut self) {
        self.control.timers.arm_once(Timer::Floods, self.now + LOOK);
    }

    fn bindings_of(&self, id: SessionId) -> Vec<BindingKey> {
        let session = self.control.registry.session(id);
        session.map_or_else(Vec::new, |session| {
            BindingKey::of(Protocol::Tcp, session.local, session.v6_only).collect()
        })
    }

    /// Tells the filter what the listeners of a binding answer with now. False if they are left to
    /// answer themselves.
    fn steer_flood(&mut self, binding: &BindingKey) -> bool {
        let told = match self.flood_of(binding) {
            Some(flood) => self.filter.floods.set(binding, &flood).map(|()| true),
            None => {
                self.count_met(binding);
                self.filter.floods.end(binding).map(|()| false)
            }
        };
        told.unwrap_or_else(|error| {
            warn!(%error, "the filter does not answer a flood");
            false
        })
    }

    /// Which of several listeners a SYN is for, the filter cannot tell: they must agree, and all have room.
    fn flood_of(&self, binding: &BindingKey) -> Option<Flood> {
        let members = self.listeners_of(binding);
        let (first, others) = members.split_first()?;
        let flood = self.answers_of(*first)?;
        let is_full = flood.flags & Flood::FULL != 0;
        let is_common = others.iter().all(|id| self.answers_of(*id) == Some(flood));
        (others.is_empty() || is_common && !is_full).then_some(flood)
    }

    fn listeners_of(&self, binding: &BindingKey) -> Vec<SessionId> {
        let port = u16::from_be_bytes(binding.local_port);
        let at_port = self.listening_ports.get(&port).into_iter().flatten();
        let members = at_port.filter(|id| self.bindings_of(**id).contains(binding));
        members.copied().collect()
    }

    fn count_floods(&mut self, binding: &BindingKey, count: impl Fn(&mut FloodCounts)) {
        for id in self.listeners_of(binding) {
            if let Some(listener) = self.control.registry.listener_mut(id) {
                count(&mut listener.floods);
            }
        }
    }

    /// Counts for its listeners what the filter has dealt with.
    fn count_met(&mut self, binding: &BindingKey) {
        let Some(known) = self.floods.met.get_mut(binding) else {
            return;
        };
        let seen = self.filter.floods.seen(binding);
        let before = std::mem::replace(&mut known.counted, seen);
        let answered = seen.answered.saturating_sub(before.answered);
        let dropped = seen.dropped.saturating_sub(before.dropped);
        self.count_floods(binding, |counts| {
            counts.answered += answered;
            counts.dropped += dropped;
        });
    }

    /// SYNs since the last look.
    fn newly_met(&mut self, binding: &BindingKey) -> u64 {
        self.count_met(binding);
        self.floods.met.get_mut(binding).map_or(0, |known| {
            let all = known.counted.answered + known.counted.dropped;
            all.saturating_sub(std::mem::replace(&mut known.looked, all))
        })
    }

    /// What is shown of a listener; none of others.
    pub fn report_listener(&mut self, id: SessionId) -> Option<ListenerReport> {
        self.control.registry.listener(id)?;
        let mut is_flooded = false;
        for binding in self.bindings_of(id) {
            is_flooded |= self.floods.met.contains_key(&binding);
            self.count_met(&binding);
        }
        let claimed = self.claimed_cookies(id);
        let listener = self.control.registry.listener(id)?;
        let mut cookies = listener.cookies;
        cookies.add(claimed);
        Some(ListenerReport {
            is_delegated: listener.delegate.is_some(),
            is_flooded,
            filter: listener.floods,
            cookies,
        })
    }

    /// What the process says that performs the listener's handshakes.
    pub fn claimed_cookies(&self, id: SessionId) -> CookieCounts {
        let delegate = self
            .control
            .registry
            .listener(id)
            .and_then(|listener| listener.delegate);
        let row = delegate.and_then(|delegate| {
            let channel = self.channels.get(&delegate.channel)?;
            channel.statistics.row(delegate.slot)
        });
        row.filter(|row| row.session == id.0)
            .map_or_else(CookieCounts::default, |row| CookieCounts::of(&row.figures))
    }

    fn answers_of(&self, id: SessionId) -> Option<Flood> {
        let listener = self.control.registry.listener(id)?;
        let secret = match listener.delegate {
            Some(_) => listener.lent_secret.as_ref()?,
            None => &self.secret,
        };
        let exempt = listener.exempt.as_ref();
        if exempt.is_some_and(|exempt| exempt.is_incomplete) {
            return None;
        }
        let has_room = match listener.delegate {
            Some(delegate) => delegate.queue == AcceptQueue::HasRoom,
            None => listener.has_room(),
        };
        let mut flood = flood(&self.base_config(), &listener.options, secret);
        if !has_room {
            flood.flags |= Flood::FULL;
        }
        Some(flood)
    }

    /// Something about the listener has changed, which may be gone.
    pub fn review_floods_of(&mut self, id: SessionId) {
        if self.floods.met.is_empty() {
            return;
        }
        for binding in self.bindings_of(id) {
            self.review_flood(&binding);
        }
    }

    fn review_flood(&mut self, binding: &BindingKey) {
        if self.floods.met.contains_key(binding) && !self.steer_flood(binding) {
            self.floods.met.remove(binding);
        }
    }

    /// The listener's owner answers what comes next, whatever it is.
    pub fn end_floods_of(&mut self, id: SessionId) {
        for binding in self.bindings_of(id) {
            self.end_flood(&binding);
        }
        self.forget_spared(id);
    }

    fn end_flood(&mut self, binding: &BindingKey) {
        self.count_met(binding);
        if self.floods.met.remove(binding).is_some()
            && let Err(error) = self.filter.floods.end(binding)
        {
            warn!(%error, "the filter goes on answering a flood");
        }
    }

    /// Ends the floods that are over.
    pub fn look_at_floods(&mut self) {
        self.sysctls.refresh(self.now);
        let bindings: Vec<BindingKey> = self.floods.met.keys().copied().collect();
        for binding in bindings {
            self.look_at_flood(&binding);
        }
        self.look_at_spared();
        if !self.floods.met.is_empty() {
            self.look_at_floods_later();
        }
    }

    fn look_at_spared(&mut self) {
        let listeners: Vec<SessionId> = self.floods.exempting.iter().copied().collect();
        for id in listeners {
            let mut bindings = self.bindings_of(id).into_iter();
            if !bindings.any(|binding| self.floods.met.contains_key(&binding)) {
                self.forget_spared(id);
            }
        }
    }

    fn look_at_flood(&mut self, binding: &BindingKey) {
        let met = self.newly_met(binding);
        let is_never = self.sysctls.values().cookies == CookieUse::Never;
        if is_never || met < FEW {
            debug!(met, "SYNs are no flood any more");
            return self.end_flood(binding);
        }
        self.cookie_clock.note(self.now);
        self.review_flood(binding);
    }
}
