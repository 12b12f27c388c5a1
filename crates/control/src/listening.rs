//! When a port belongs to a listener, and which process may perform its handshakes.

use std::time::Duration;

use portolan_proto::control::AcceptQueue;
use portolan_types::{ChannelId, Instant, SessionId, Slot};

use crate::control::{Control, Effect, Effects};
use crate::errno::Errno;
use crate::legality::Command;
use crate::listener::Delegate;
use crate::listener_table::Endpoint;
use crate::timer::Deadline;

/// How long a process may take to end a delegation after it was asked to.
const BACK_WITHIN: Duration = Duration::from_secs(2);

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

    /// Asks the process that performs the listener's handshakes to end the delegation.
    pub(crate) fn want_back(&mut self, id: SessionId, now: Instant, out: &mut Effects) {
        let delegate = self.registry.listener_mut(id);
        let delegate = delegate.and_then(|listener| listener.delegate.as_mut());
        if let Some(delegate) = delegate.filter(|delegate| !delegate.is_wanted_back) {
            delegate.is_wanted_back = true;
            let channel = delegate.channel;
            self.arm(id, Deadline::Delegation, now + BACK_WITHIN);
            out.push(Effect::Recall(channel, id));
        }
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

    /// Ports that listeners share cannot be delegated, nor what only the server does: Fast Open, and waiting for data.
    fn can_delegate(&self, channel: ChannelId, id: SessionId) -> bool {
        let (Some(session), Some(listener)) =
            (self.registry.session(id), self.registry.listener(id))
        else {
            return false;
        };
        let options = &listener.opens.options;
        let is_plain = options.fast_open_queue.is_none() && options.defer_accept_seconds.is_none();
        self.listeners.is_alone(session.local.port())
            && is_plain
            && !session.local.ip().is_loopback()
            && session.owner() == Some(channel)
            && listener
                .delegate
                .is_none_or(|delegate| delegate.channel == channel && !delegate.is_wanted_back)
    }

    /// Returns the delegate of the listener, if any.
    pub fn delegate_of(&self, id: SessionId) -> Option<Delegate> {
        self.registry.listener(id)?.delegate
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
        let delegate = self.delegate_of(id);
        delegate.is_some_and(|delegate| delegate.channel == channel)
    }

    /// Returns the channel that SYNs to a listener go to.
    pub fn channel_of_listener(&self, id: SessionId) -> ChannelId {
        let delegate = self.delegate_of(id);
        delegate.map_or(ChannelId::SERVER, |delegate| delegate.channel)
    }

    /// Returns the listeners delegated to the process.
    pub fn delegated_to(&self, channel: ChannelId) -> Vec<SessionId> {
        let all = self.listeners.all();
        all.filter(|&id| self.is_delegate(id, channel)).collect()
    }
}
