//! Connections that processes have opened or accepted and not registered (ADR 31): they hand over those that they have
//! closed, and leave a journal of all.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_control::{Control, Errno, Input, Life, Timer};
use portolan_proto::control::Blob;
use portolan_stack::TcpSession;
use portolan_types::{ChannelId, FlowKey, Instant, SessionId};

use crate::random::random_u64;
use crate::requests::Answer;
use crate::server::Server;

/// When the peers of lost connections are probed, from the loss on. Linux answers at most one segment outside the window
/// within half a second.
const PROBES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// Probes sent per turn.
const PER_TURN: usize = 256;

/// Lost connections whose peers are probed at the same time; the peers of others find out when they next send.
const MOST: usize = 1 << 16;

/// The peers to be probed. Nothing else is kept of a lost connection: whatever is on its port by then answers the peer's
/// acknowledgement of a probe by a reset, and the probe harms no other connection between the same endpoints.
#[derive(Debug, Default)]
pub(crate) struct LostConnections {
    due: VecDeque<Lost>,
}

#[derive(Debug)]
struct Lost {
    since: Instant,
    /// Number of probes sent.
    probes: usize,
    flow: FlowKey,
}

impl Lost {
    fn due(&self) -> Option<Instant> {
        Some(self.since + *PROBES.get(self.probes)?)
    }
}

impl LostConnections {
    fn add(&mut self, now: Instant, flow: FlowKey) {
        if self.due.len() < MOST {
            self.due.push_back(Lost {
                since: now,
                probes: 0,
                flow,
            });
        }
    }

    /// Takes a turn's flows to be probed, and returns when the next are due.
    fn take(&mut self, now: Instant) -> (Vec<FlowKey>, Option<Instant>) {
        let mut flows = Vec::new();
        let mut next = None;
        for _ in 0..self.due.len() {
            let Some(mut lost) = self.due.pop_front() else {
                break;
            };
            if flows.len() < PER_TURN && lost.due().is_some_and(|due| due <= now) {
                flows.push(lost.flow);
                lost.probes += 1;
            }
            let Some(due) = lost.due() else { continue };
            next = Some(next.map_or(due, |next: Instant| next.min(due)));
            self.due.push_back(lost);
        }
        (flows, next)
    }
}

impl Server {
    /// `ReturnClosed`: the server finishes a connection that it did not know.
    pub(crate) fn finish_unregistered(
        &mut self,
        channel: ChannelId,
        port: SessionId,
        (capsule, fd): (Blob, Option<OwnedFd>),
    ) -> Result<Answer, Errno> {
        self.control.admit_opener(channel, port)?;
        let Some((flow, session)) = self.unpack_surrendered(port, capsule, fd) else {
            self.control.counters.bad_capsules += 1;
            return Err(Errno::PROTO);
        };
        let life = || Life::Connected;
        let id = self.control.enter_for(port, &flow, life(), random_u64)?;
        self.control.counters.closed_unregistered += 1;
        self.hold(TcpSession { id, ..session }, life());
        self.input(Input::Close(id));
        Ok(Answer::Silence)
    }

    /// The listener is no longer delegated, or gone, and nobody has its unregistered connections.
    pub(crate) fn probe_unregistered_of(&mut self, listener: SessionId) {
        for channel in self.control.delegates_of(listener) {
            self.probe_unregistered(channel, |_, port| port == listener);
        }
    }

    /// Has the peers of a process's unregistered connections on those ports hear that nobody has them any more.
    pub(crate) fn probe_unregistered(
        &mut self,
        channel: ChannelId,
        is_concerned: impl Fn(&Control, SessionId) -> bool,
    ) {
        let Some(process) = self.channels.get(&channel) else {
            return;
        };
        let claimed: Vec<(SessionId, FlowKey)> = process
            .journal
            .records()
            .filter_map(|record| Some((record.port()?, record.flow())))
            .filter(|(port, _)| is_concerned(&self.control, *port))
            .collect();
        for (port, flow) in claimed {
            if self.control.admit_opener(channel, port).is_err() {
                continue;
            }
            // What is not on the port, or registered by now, is no such connection.
            if let Ok(flow) = self.flow_of(port, flow.local, flow.remote) {
                self.control.counters.lost_unregistered += 1;
                self.lost_connections.add(self.now, flow);
                self.control.timers.defer(Timer::LostConnections);
            }
        }
    }

    pub(crate) fn probe_lost_connections(&mut self) {
        let (flows, next) = self.lost_connections.take(self.now);
        for flow in &flows {
            self.probe_peer(flow);
        }
        if let Some(next) = next {
            self.control.timers.arm(Timer::LostConnections, next);
        }
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::Protocol;

    use super::*;

    fn flow(port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], port).into(),
        }
    }

    #[test]
    fn each_peer_is_probed_three_times_and_some_of_many_per_turn() {
        let mut lost = LostConnections::default();
        let start = Instant::ZERO;
        for port in 0..300 {
            lost.add(start, flow(port));
        }
        let (first, next) = lost.take(start);
        assert_eq!((first.len(), next), (PER_TURN, Some(start)));
        let (rest, next) = lost.take(start);
        assert_eq!(
            (rest.len(), next),
            (300 - PER_TURN, Some(start + PROBES[1]))
        );
        assert!(lost.take(start).0.is_empty());
        let mut probes = 0;
        let mut now = start + PROBES[1];
        while let (flows, Some(next)) = lost.take(now) {
            probes += flows.len();
            now = now.max(next);
        }
        // The last turn has no next one.
        assert!(probes >= 300, "{probes}");
        assert!(lost.due.is_empty());
    }

    #[test]
    fn there_is_a_limit() {
        let mut lost = LostConnections::default();
        for _ in 0..=MOST {
            lost.add(Instant::ZERO, flow(1));
        }
        assert_eq!(lost.due.len(), MOST);
    }
}
