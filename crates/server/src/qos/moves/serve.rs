//! Follows processes that change their control group.

use std::collections::HashMap;
use std::time::Duration;

use portolan_control::Timer;
use portolan_proto::qos::Scope;
use portolan_types::ChannelId;
use tracing::debug;

use super::super::scope::memberships_of;
use super::Whereabouts;
use crate::server::Server;

/// The kernel does not report such moves.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Server {
    /// Handles a guarantee of the scope that was added or removed.
    pub(crate) fn scope_has_changed(&mut self, scope: &Scope) {
        let Scope::Cgroup(_) = scope else {
            return;
        };
        let is_cgroup = |scope: &Scope| matches!(scope, Scope::Cgroup(_));
        let has_some =
            self.qos.transmit.scopes().any(is_cgroup) || self.qos.receive.scopes().any(is_cgroup);
        if has_some {
            self.control.timers.arm_once(Timer::Cgroups, self.now)
        } else {
            self.control.timers.disarm(Timer::Cgroups);
            self.qos.whereabouts = Whereabouts::default();
        }
    }

    /// Checks the cgroups of the processes.
    pub(crate) fn look_for_moves(&mut self) {
        self.control
            .timers
            .arm(Timer::Cgroups, self.now + LOOK_EVERY);
        let processes = self.control.registry.processes();
        let now: HashMap<ChannelId, String> = processes
            .filter_map(|process| Some((process.channel, memberships_of(process.pid)?)))
            .collect();
        let before = std::mem::take(&mut self.qos.whereabouts.by_channel);
        // A process seen for the first time may have moved since it registered.
        let moved = now
            .iter()
            .filter(|(channel, memberships)| before.get(channel) != Some(memberships));
        let moved: Vec<ChannelId> = moved.map(|(channel, _)| *channel).collect();
        self.qos.whereabouts.by_channel = now;
        for channel in moved {
            debug!(channel = channel.0, "a process is new in its cgroup");
            self.renew_guarantees_of(channel);
        }
    }

    fn renew_guarantees_of(&mut self, channel: ChannelId) {
        self.tell_channel(channel);
        for id in self.sessions_owned_by(channel) {
            self.renew_rows(id);
        }
        self.renew_raw_rows();
    }
}
