//! Routes, neighbours and addresses: from the kernel to all libraries, to the filter and to the
//! server's own look-ups. Also the resolution of unknown neighbours.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use portolan_control::{Charge, Errno, Limit, SessionEntry, SessionPhase, Timer};
use portolan_proto::filter::FilterInterface;
use portolan_proto::metastate::{Metastate, RouteKind};
use portolan_stack::{NextHop, NoRoute, Path, Routes};
use portolan_types::{ChannelId, Instant, SessionId, scope_of};
use tracing::{debug, error};

use crate::server::Server;

/// Time limit for resolving a neighbour, that of the kernel itself (three probes, one second
/// apart).
const RESOLVE_FOR: Duration = Duration::from_secs(3);
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// Neighbours resolved at a time for the server's own sessions.
const RESOLVING_MAX: usize = 1024;

/// Neighbours resolved at a time for programs.
pub(crate) const RESOLVING: Limit = Limit {
    total: 1024,
    per_user: 128,
    reserve: 64,
};

/// A neighbour being resolved.
#[derive(Debug)]
pub(crate) struct Resolving {
    since: Instant,
    /// Charge of the user whose program requested it.
    charge: Option<Charge>,
}

impl Server {
    /// Handles a change of the network.
    pub(crate) fn on_network_change(&mut self) {
        if self.network.take_news() {
            self.publish();
            let there = self.network.tables.devices();
            self.on_devices(&there);
            self.review_driver_hooks();
        }
    }

    /// Publishes the present state of the network.
    pub(crate) fn publish(&mut self) {
        // The filter first: what it passes from now on reaches sockets that hold the ports already.
        self.apply_host_policy();
        let mut state = self.network.tables.snapshot(&self.managed);
        state.obeys_policy = self.obeys_policy;
        if let Err(failure) = self.metastate.publish(&state) {
            error!(%failure, "libraries keep the old metastate");
        }
        self.tell_filter(&state);
        self.generation = self.generation.wrapping_add(2);
        self.routes = Routes::new(self.generation, state);
        if let Err(failure) = self.filter.floods.set_paths(self.routes.return_paths()) {
            error!(%failure, "the filter keeps old ways back");
        }
        self.drop_resolved();
    }

    fn tell_filter(&mut self, state: &Metastate) {
        let interfaces: Vec<FilterInterface> = state
            .interfaces
            .iter()
            .filter(|interface| interface.managed)
            .map(|interface| FilterInterface {
                ifindex: interface.index,
                mac: interface.mac.0,
                reserved: [0; 2],
            })
            .collect();
        // RFC 1122 §3.2.1.3: loopback addresses never appear outside a host.
        let addresses: Vec<IpAddr> = state
            .addresses
            .iter()
            .map(|a| a.address)
            .filter(|address| !address.is_loopback())
            .collect();
        let mut broadcast: Vec<IpAddr> = state
            .routes
            .iter()
            .filter(|route| route.kind == RouteKind::Broadcast)
            .map(|route| route.destination)
            .collect();
        broadcast.push(IpAddr::V4(Ipv4Addr::BROADCAST));
        let told = self
            .filter
            .set_interfaces(&interfaces)
            .and_then(|()| self.filter.set_local_addresses(&addresses, &broadcast));
        if let Err(failure) = told {
            error!(%failure, "the filter keeps the old addresses");
        }
    }

    /// Returns the path to a peer, on the link that its address names, if any.
    pub(crate) fn path_of(&self, remote: SocketAddr) -> Result<Path, NoRoute> {
        self.routes.path_in(remote.ip(), scope_of(remote))
    }

    /// Has the kernel resolve a neighbour, unless it is doing so already.
    pub(crate) fn resolve(&mut self, next_hop: NextHop) {
        let own = self.resolving.values().filter(|r| r.charge.is_none());
        if self.is_wanted(next_hop) && own.count() < RESOLVING_MAX {
            self.look_for(next_hop, None);
        }
    }

    /// `Resolve`: likewise for a program.
    pub(crate) fn resolve_for(&mut self, channel: ChannelId, next_hop: NextHop) {
        let Some(uid) = self.control.registry.process(channel).map(|p| p.uid) else {
            return;
        };
        if self.is_wanted(next_hop)
            && let Ok(charge) = self.programs_resolve.charge(uid, 1)
        {
            self.look_for(next_hop, Some(charge));
        }
    }

    fn is_wanted(&self, next_hop: NextHop) -> bool {
        let NextHop { interface, address } = next_hop;
        self.managed.contains(&interface)
            && self.routes.is_next_hop(interface, address)
            && self.routes.neighbour(interface, address).is_none()
            && !self.resolving.contains_key(&next_hop)
    }

    fn look_for(&mut self, next_hop: NextHop, charge: Option<Charge>) {
        let since = self.now;
        self.resolving.insert(next_hop, Resolving { since, charge });
        self.ask_for(next_hop);
    }

    fn ask_for(&mut self, next_hop: NextHop) {
        self.network.resolve(next_hop.interface, next_hop.address);
        let again = self.now + RESOLVE_AGAIN;
        self.control.timers.arm(Timer::Neighbour(next_hop), again);
    }

    fn drop_resolved(&mut self) {
        let (routes, timers) = (&self.routes, &mut self.control.timers);
        self.resolving.retain(|hop, _| {
            let is_known = routes.neighbour(hop.interface, hop.address).is_some();
            if is_known {
                timers.disarm(Timer::Neighbour(*hop));
            }
            !is_known
        });
    }

    /// Retries the resolution of a neighbour, or gives up.
    pub(crate) fn ask_again_for(&mut self, next_hop: NextHop) {
        let Some(resolving) = self.resolving.get(&next_hop) else {
            return;
        };
        if self.now.since(resolving.since) < RESOLVE_FOR {
            return self.ask_for(next_hop);
        }
        self.resolving.remove(&next_hop);
        self.unanswered.push(next_hop);
        self.control.timers.defer(Timer::Unanswered);
    }

    /// Linux reports an unreachable neighbour as `EHOSTUNREACH`. A session that had only a reset
    /// left to send is over.
    pub(crate) fn give_up_on_unanswered(&mut self) {
        // One walk for all: a program may have any of them looked for, many at once.
        let unanswered: HashSet<NextHop> = self.unanswered.drain(..).collect();
        let is_stuck = |session: &&SessionEntry| {
            matches!(
                session.phase(),
                SessionPhase::Connecting | SessionPhase::Closing
            ) && session
                .remote
                .and_then(|remote| self.path_of(remote).ok())
                .is_some_and(|path| {
                    unanswered.contains(&NextHop {
                        interface: path.interface,
                        address: path.next_hop,
                    })
                })
        };
        let stuck: Vec<(SessionId, SessionPhase)> = self
            .control
            .registry
            .sessions()
            .filter(is_stuck)
            .map(|session| (session.id, session.phase()))
            .collect();
        debug!(
            ?unanswered,
            sessions = stuck.len(),
            "neighbours do not answer"
        );
        for (id, phase) in stuck {
            match phase {
                SessionPhase::Connecting => self.open_failed(id, Errno::HOSTUNREACH),
                _ => self.look_at_closing(id),
            }
        }
    }
}
