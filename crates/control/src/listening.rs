//! When a port belongs to a listener, and which process may perform its handshakes.

use std::collections::BTreeMap;
use std::time::Duration;

use portolan_proto::control::AcceptQueue;
use portolan_types::{ChannelId, Instant, SessionId, Slot};

use crate::control::{Control, Effect, Effects};
use crate::errno::Errno;
use crate::legality::Command;
use crate::listener::{Delegate, Listener};
use crate::listener_table::Endpoint;
use crate::session::SessionEntry;
use crate::timer::Deadline;

/// How long a process may take to end a delegation after it was asked to.
const BACK_WITHIN: Duration = Duration::from_secs(2);

/// How long the flows of a listener may stay with the server until all of its processes are ready to share them.
const ANSWER_WITHIN: Duration = Duration::from_millis(250);

impl Control {
    /// Opens a listener: its row is written, and an existing delegation of the port ends.
    pub(crate) fn open_port(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        let endpoint = Endpoint {
            id,
            local: session.local,
            v6_only: session.v6_only,
        };
        out.push(Effect::SteerListener(id));
        for other in self.listeners.open(endpoint) {
            self.want_back(other, now, out);
        }
    }

    /// Asks the processes that perform the listener's handshakes to end the delegation.
    pub(crate) fn want_back(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(listener) = self.registry.listener_mut(id) else {
            return;
        };
        if let Some(delegate) = &mut listener.delegate {
            if delegate.is_wanted_back {
                return;
            }
            delegate.is_wanted_back = true;
        }
        let channels: Vec<ChannelId> = listener.delegates().map(|(channel, _)| channel).collect();
        if !channels.is_empty() {
            self.arm(id, Deadline::Delegation, now + BACK_WITHIN);
        }
        out.extend(channels.into_iter().map(|it| Effect::Recall(it, id)));
    }

    /// Delegates the handshakes of a listener to a process, if possible. Returns the listener's secret for it.
    pub fn delegate(
        &mut self,
        id: SessionId,
        (channel, slot): (ChannelId, Slot),
    ) -> Option<[u8; 16]> {
        if !self.can_delegate(channel, id) {
            return None;
        }
        let listener = self.registry.listener_mut(id)?;
        listener.delegate = Some(Delegate {
            channel,
            slot,
            queue: AcceptQueue::HasRoom,
            is_wanted_back: false,
        });
        self.counters.delegations += 1;
        Some(listener.secret.0)
    }

    fn can_delegate(&self, channel: ChannelId, id: SessionId) -> bool {
        let (Some(session), Some(listener)) =
            (self.registry.session(id), self.registry.listener(id))
        else {
            return false;
        };
        self.is_delegable(session, listener)
            && session.owner() == Some(channel)
            && listener.performers.is_empty()
            && listener
                .delegate
                .is_none_or(|delegate| delegate.channel == channel && !delegate.is_wanted_back)
    }

    /// Ports that listeners share cannot be delegated, nor what only the server does: Fast Open.
    fn is_delegable(&self, session: &SessionEntry, listener: &Listener) -> bool {
        let options = &listener.opens.options;
        options.fast_open_queue.is_none()
            && !session.local.ip().is_loopback()
            && self.listeners.is_alone(session.local.port())
    }

    /// A process that has the listener among others offers to perform a part of its handshakes. All connections that it
    /// has performed the handshakes of are registered. Returns the listener's secret if it takes part from now on.
    pub fn offer_part(
        &mut self,
        id: SessionId,
        (channel, slot): (ChannelId, Slot),
        now: Instant,
        out: &mut Effects,
    ) -> Option<[u8; 16]> {
        if !self.can_take_part(id) {
            self.leave_part(id, channel, out);
            return None;
        }
        let listener = self.registry.listener_mut(id)?;
        let is_new = !listener.performers.has(channel);
        if !listener.performers.offer(channel, slot) {
            return None;
        }
        listener.acceptors.remove(&channel);
        let secret = listener.secret.0;
        self.counters.delegations += u64::from(is_new);
        self.deal_later(id, now, out);
        Some(secret)
    }

    fn can_take_part(&self, id: SessionId) -> bool {
        let (session, listener) = (self.registry.session(id), self.registry.listener(id));
        session.zip(listener).is_some_and(|(session, listener)| {
            listener.delegate.is_none() && self.is_delegable(session, listener)
        })
    }

    /// The processes that have these buckets since before this server go on. Returns false if they cannot.
    pub fn continue_parts(
        &mut self,
        id: SessionId,
        buckets: &BTreeMap<u32, (ChannelId, Slot)>,
    ) -> bool {
        if !self.can_take_part(id) {
            return false;
        }
        if let Some(listener) = self.registry.listener_mut(id) {
            listener.performers.continue_with(buckets);
        }
        true
    }

    /// A process that has performed its part since before this server has come. Returns the listener's secret.
    pub fn confirm_part(
        &mut self,
        id: SessionId,
        (channel, slot): (ChannelId, Slot),
    ) -> Option<[u8; 16]> {
        let listener = self.registry.listener_mut(id)?;
        let is_confirmed = listener.performers.confirm(channel, slot);
        is_confirmed.then_some(listener.secret.0)
    }

    /// Returns the parts of processes that have not come.
    pub fn inherited_parts(&self) -> Vec<(SessionId, ChannelId)> {
        let parts = |id| {
            let listener: Option<&Listener> = self.registry.listener(id);
            let channels = listener
                .into_iter()
                .flat_map(|it| it.performers.inherited());
            channels.map(move |channel| (id, channel))
        };
        self.listeners.all().flat_map(parts).collect()
    }

    /// Deals the buckets of a listener as soon as all of its performers are quiet.
    fn deal_later(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let Some(listener) = self.registry.listener_mut(id) else {
            return;
        };
        let acceptors = std::mem::take(&mut listener.acceptors);
        let asked = listener.performers.call_together(acceptors);
        if listener.performers.are_together() {
            listener.performers.deal();
        } else {
            self.arm(id, Deadline::Delegation, now + ANSWER_WITHIN);
        }
        out.extend(asked.into_iter().map(|it| Effect::Recall(it, id)));
        out.push(Effect::SteerListener(id));
    }

    /// Those that have not answered by now keep what they have, or take no part.
    fn deal_among_quiet(&mut self, id: SessionId, out: &mut Effects) {
        if let Some(listener) = self.registry.listener_mut(id)
            && listener.performers.is_due()
        {
            listener.performers.deal();
            out.push(Effect::SteerListener(id));
        }
    }

    /// A process performs no handshakes of the listener any more, or declines to.
    pub fn leave_part(&mut self, id: SessionId, channel: ChannelId, out: &mut Effects) {
        let Some(listener) = self.registry.listener_mut(id) else {
            return;
        };
        listener.acceptors.remove(&channel);
        let has_left = listener.performers.leave(channel).is_some();
        let are_together = listener.performers.are_together();
        if are_together {
            listener.performers.deal();
        }
        if has_left || are_together {
            out.push(Effect::SteerListener(id));
        }
    }

    /// The time for an answer to a recall is over.
    pub(crate) fn on_delegation_due(&mut self, id: SessionId, out: &mut Effects) {
        let Some(listener) = self.registry.listener(id) else {
            return;
        };
        match listener.delegate {
            Some(delegate) if delegate.is_wanted_back => {
                self.counters.recall_timeouts += 1;
                out.push(Effect::TakeHandshakes(id));
            }
            None if !self.can_take_part(id) && !listener.performers.is_empty() => {
                self.counters.recall_timeouts += 1;
                out.push(Effect::TakeHandshakes(id));
            }
            None => self.deal_among_quiet(id, out),
            Some(_) => {}
        }
    }

    /// Returns the process that performs all handshakes of the listener, if any.
    pub fn delegate_of(&self, id: SessionId) -> Option<Delegate> {
        self.registry.listener(id)?.delegate
    }

    /// Do several processes perform the listener's handshakes, or offer to?
    pub fn has_performers(&self, id: SessionId) -> bool {
        let listener = self.registry.listener(id);
        listener.is_some_and(|listener| !listener.performers.is_empty())
    }

    /// Does the process perform a part of the listener's handshakes?
    pub fn performs(&self, id: SessionId, channel: ChannelId) -> bool {
        let listener = self.registry.listener(id);
        listener.is_some_and(|listener| listener.performers.has(channel))
    }

    pub fn is_delegated(&self, id: SessionId) -> bool {
        let listener = self.registry.listener(id);
        listener.is_some_and(Listener::is_delegated)
    }

    /// Returns the processes that perform the listener's handshakes.
    pub fn delegates_of(&self, id: SessionId) -> Vec<ChannelId> {
        let delegates = self.registry.listener(id).map(Listener::delegates);
        let delegates = delegates.into_iter().flatten();
        delegates.map(|(channel, _)| channel).collect()
    }

    /// Checks whether the process may hand over connections that it has opened on this port.
    pub fn admit_opener(&self, channel: ChannelId, port: SessionId) -> Result<(), Errno> {
        self.registry.admit(channel, Command::Register, port)?;
        if self.is_lease(port) || self.is_delegate(port, channel) {
            Ok(())
        } else {
            Err(Errno::PERM)
        }
    }

    pub fn is_delegate(&self, id: SessionId, channel: ChannelId) -> bool {
        let delegates = self.registry.listener(id).map(Listener::delegates);
        delegates.is_some_and(|mut all| all.any(|(its, _)| its == channel))
    }

    /// Returns the channel that all SYNs to a listener go to.
    pub fn channel_of_listener(&self, id: SessionId) -> ChannelId {
        let delegate = self.registry.listener(id).and_then(|it| it.delegate);
        delegate.map_or(ChannelId::SERVER, |delegate| delegate.channel)
    }

    /// Returns the listeners delegated to the process.
    pub fn delegated_to(&self, channel: ChannelId) -> Vec<SessionId> {
        let all = self.listeners.all();
        all.filter(|&id| self.is_delegate(id, channel)).collect()
    }
}
