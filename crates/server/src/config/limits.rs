//! `[limits]`: the server resources that one process, one user and all together may have.

use std::time::Duration;

use portolan_control::{ControlLimits, Limit, Limits, OrphanLimits};
use rustix::process::{Resource, getrlimit};
use serde::Deserialize;

use super::error::ConfigError;

/// Channels in the filter's tables, without the server's own.
const MAX_PROCESSES: u32 = 1023;

/// Rows of the filter's table of flows.
pub(crate) const FLOWS: u32 = 262_144;

/// Control connections beyond those of registered processes, for commands and new programs.
const EXTRA_CONNECTIONS: u32 = 256;

const MIB: u64 = 1 << 20;

/// Descriptors that one session takes of the server's at the most: the other end of its own, and the kernel's socket on its port.
/// A listener is charged as two sessions.
const DESCRIPTORS_OF_SESSION: u64 = 2;

/// What the server has besides, where it may have many: connections, channels, and what messages bring.
const OTHER_DESCRIPTORS: u64 = 4096;

/// And the part of all that is where it may have few.
const OTHERS_OF_FEW: u64 = 6;

/// Each key is optional.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsConfig {
    pub processes: u32,
    pub processes_per_user: u32,
    pub sessions_per_process: u32,
    /// Sessions in TIME-WAIT; above it the oldest is removed.
    pub time_wait: usize,
    /// Percent of each resource reserved for root.
    pub root_reserve: u8,
    /// Control connections of one user.
    pub connections_per_user: u32,
    pub sessions: u32,
    pub sessions_per_user: u32,
    /// Rows of the filter's table of bindings: one or two for each listener and each UDP socket.
    pub bindings: u32,
    pub bindings_per_user: u32,
    /// UDP ports with `SO_REUSEPORT` sockets that share flows.
    pub shared_ports: u32,
    pub shared_ports_per_user: u32,
    /// Closed connections with unsent data.
    pub orphans: u32,
    pub orphans_per_user: u32,
    /// MiB of that data.
    pub orphan_memory: u32,
    pub orphan_memory_per_user: u32,
    /// Seconds without progress after which an orphan is reset.
    pub orphan_seconds: u32,
    /// MiB that the server holds of relayed sessions.
    pub relay_memory: u32,
    pub relay_memory_per_user: u32,
    /// Microseconds of server time for the requests of one user before others have their turn.
    pub turn_us: u32,
    /// Percent of the server's time for one user over more than a turn.
    pub time_share: u32,
}

impl Default for LimitsConfig {
    fn default() -> LimitsConfig {
        LimitsConfig {
            processes: 256,
            processes_per_user: 128,
            sessions_per_process: 32_768,
            time_wait: 16_384,
            root_reserve: 10,
            connections_per_user: 192,
            sessions: FLOWS,
            sessions_per_user: 131_072,
            bindings: 65_536,
            bindings_per_user: 32_768,
            shared_ports: 4096,
            shared_ports_per_user: 1024,
            orphans: 65_536,
            orphans_per_user: 32_768,
            orphan_memory: 256,
            orphan_memory_per_user: 64,
            orphan_seconds: 240,
            relay_memory: 512,
            relay_memory_per_user: 128,
            turn_us: 2000,
            time_share: 60,
        }
    }
}

impl LimitsConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        for (name, value, maximum) in [
            ("processes", self.processes, MAX_PROCESSES),
            ("processes_per_user", self.processes_per_user, MAX_PROCESSES),
            ("sessions_per_process", self.sessions_per_process, 1 << 20),
            (
                "connections_per_user",
                self.connections_per_user,
                MAX_PROCESSES + EXTRA_CONNECTIONS,
            ),
            ("sessions", self.sessions, FLOWS),
            ("sessions_per_user", self.sessions_per_user, FLOWS),
            ("bindings", self.bindings, 1 << 20),
            ("bindings_per_user", self.bindings_per_user, 1 << 20),
            ("shared_ports", self.shared_ports, 65_536),
            ("shared_ports_per_user", self.shared_ports_per_user, 65_536),
            ("orphans", self.orphans, FLOWS),
            ("orphans_per_user", self.orphans_per_user, FLOWS),
            ("orphan_memory", self.orphan_memory, 1 << 20),
            (
                "orphan_memory_per_user",
                self.orphan_memory_per_user,
                1 << 20,
            ),
            ("orphan_seconds", self.orphan_seconds, 86_400),
            ("relay_memory", self.relay_memory, 1 << 20),
            ("relay_memory_per_user", self.relay_memory_per_user, 1 << 20),
            ("turn_us", self.turn_us, 1_000_000),
            ("time_share", self.time_share, 100),
        ] {
            if !(1..=maximum).contains(&value) {
                return Err(ConfigError::Limit(name, maximum));
            }
        }
        match self.root_reserve {
            0..=90 => Ok(()),
            _ => Err(ConfigError::RootReserve(self.root_reserve)),
        }
    }

    fn limit(&self, total: u32, per_user: u32) -> Limit {
        Limit::with_reserve(total.into(), per_user.into(), self.root_reserve)
    }

    pub(crate) fn of_control(&self) -> ControlLimits {
        ControlLimits {
            registry: self.of_registry(),
            orphans: OrphanLimits {
                number: self.limit(self.orphans, self.orphans_per_user),
                memory: self.orphan_memory(),
                patience: Duration::from_secs(self.orphan_seconds.into()),
            },
            relay_memory: self.memory(self.relay_memory, self.relay_memory_per_user),
            time_wait: self.time_wait,
        }
    }

    fn of_registry(&self) -> Limits {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let within = self.within(descriptors);
        Limits {
            processes: self.limit(self.processes, self.processes_per_user),
            sessions: self.limit(within.sessions, within.sessions_per_user),
            bindings: self.limit(self.bindings, self.bindings_per_user),
            sessions_per_process: self.sessions_per_process,
        }
    }

    /// No more sessions than there are descriptors for: so each user has a part of those, and root a reserve.
    fn within(&self, descriptors: u64) -> LimitsConfig {
        let others = OTHER_DESCRIPTORS.min(descriptors / OTHERS_OF_FEW);
        let most = (descriptors - others) / DESCRIPTORS_OF_SESSION;
        let most = u32::try_from(most).unwrap_or(u32::MAX).max(1);
        let sessions = self.sessions.min(most);
        let of_user = if sessions < self.sessions {
            self.sessions_per_user.min((sessions / 2).max(1))
        } else {
            self.sessions_per_user
        };
        LimitsConfig {
            sessions,
            sessions_per_user: of_user,
            ..*self
        }
    }

    pub(crate) fn connections(&self) -> Limit {
        self.limit(
            self.processes + EXTRA_CONNECTIONS,
            self.connections_per_user,
        )
    }

    pub(crate) fn shared_ports(&self) -> Limit {
        self.limit(self.shared_ports, self.shared_ports_per_user)
    }

    fn orphan_memory(&self) -> Limit {
        self.memory(self.orphan_memory, self.orphan_memory_per_user)
    }

    /// Returns a limit in bytes for values in MiB.
    fn memory(&self, total: u32, per_user: u32) -> Limit {
        let bytes = |mebibytes: u32| u64::from(mebibytes) * MIB;
        Limit::with_reserve(bytes(total), bytes(per_user), self.root_reserve)
    }

    pub(crate) fn slice(&self) -> Duration {
        Duration::from_micros(self.turn_us.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_for_as_many_sessions_and_for_several_users() {
        let limits = LimitsConfig::default();
        assert_eq!(limits.within(u64::MAX), limits);
        let few = limits.within(1024);
        assert_eq!((few.sessions, few.sessions_per_user), (427, 213));
        let own = LimitsConfig {
            sessions: 100,
            sessions_per_user: 90,
            ..limits
        };
        assert_eq!(own.within(1024), own);
        let least = limits.within(3);
        assert_eq!((least.sessions, least.sessions_per_user), (1, 1));
    }
}
