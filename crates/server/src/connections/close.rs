//! The end of sessions: capsules that come back, connections the server finishes, processes that
//! died with sessions open.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use portolan_control::{Command, Errno, Holder, SessionPhase};
use portolan_proto::control::{AfterFlush, Capsule, Reader, ReplyBody, SocketOptionsBlob};
use portolan_stack::{IpOptions, Packet, Session, TcpSession, Transport, send_segment};
use portolan_sys::shm;
use portolan_tcp::{HandoffBuffer, StateName};
use portolan_types::{ChannelId, Generation, Instant, Protocol, SeqNum, SessionId, Slot};
use portolan_wire::tcp::{TcpFlags, TcpHeader};
use tracing::debug;

use crate::control_socket::clients::Answer;
use crate::server::{Server, random_u32};

/// How long the port of an aborted connection is kept from careless reuse: as long as TIME_WAIT.
const HOLD_BACK: Duration = Duration::from_secs(60);

/// First wait for a peer to answer the provoking segment; doubled each time. Linux answers at most
/// one segment outside the window each 500 ms.
const PROVOKE_EVERY: Duration = Duration::from_millis(550);
const PROVOKE_TIMES: u32 = 5;

/// How long ports in TIME_WAIT are kept from a connection to the same peer, at least.
const REUSE_AFTER: Duration = Duration::from_secs(1);

/// A slot that no session has.
const NO_SLOT: Slot = Slot(u32::MAX);

/// A connection whose holder died with its numbers: the peer must say them before it can be reset.
#[derive(Clone, Copy, Debug)]
pub struct OrphanedFlow {
    pub next: Instant,
    tries: u32,
}

impl Server {
    /// `BeginFlush`: the session is about to come back. What comes for it waits here, so that what its holder has
    /// before it packs is all there was.
    pub fn depart(&mut self, channel: ChannelId, id: SessionId) -> Result<Answer, Errno> {
        let session = self.registry.admit(channel, Command::Flush, id)?;
        if session.protocol == Protocol::Udp || self.locals.has(id) {
            return Err(Errno::OPNOTSUPP);
        }
        if session.awaited.is_none() {
            let slot = self.stack.reserve();
            self.registry.depart(id, slot);
            self.renew_rows(id);
        }
        Ok(ReplyBody::Done.into())
    }

    /// `AbortFlush`: it does not come, and its packets go where it is again.
    pub fn stay(&mut self, channel: ChannelId, id: SessionId) -> Answer {
        if self.registry.admit(channel, Command::Flush, id).is_ok() {
            self.await_no_longer(id);
            self.renew_rows(id);
        }
        Answer::Silence
    }

    /// The session does not come: what has waited for it is nobody's.
    pub fn await_no_longer(&mut self, id: SessionId) {
        let session = self.registry.session_mut(id);
        if let Some((slot, _)) = session.and_then(|session| session.awaited.take()) {
            self.stack.remove(slot);
            self.stack.released().for_each(drop);
        }
    }

    /// `Flush`: the session comes back.
    pub fn flush(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        (capsule, fds): (Capsule, Vec<OwnedFd>),
        then: AfterFlush,
        options_blob: SocketOptionsBlob,
    ) -> Result<Answer, Errno> {
        let session = self.registry.admit(channel, Command::Flush, id)?;
        self.counters.flushes += 1;
        if session.protocol == Protocol::Udp {
            return self.flush_udp(id, then);
        }
        if self.locals.has(id) {
            return Ok(self.flush_local(channel, id, then, options_blob));
        }
        let Some(session) = self.unpack(id, capsule, fds) else {
            self.counters.bad_capsules += 1;
            self.abort_orphan(id);
            return Err(Errno::PROTO);
        };
        let at = self.registry.arrive(id).unwrap_or_else(|| {
            let slot = self.stack.reserve();
            (slot, self.steer(id, Holder::Server(slot)))
        });
        self.hold_at(id, at, session);
        self.note_migration(id);
        self.registry.detach(id);
        self.registry.describe(id, options_blob);
        match then {
            AfterFlush::Close => self.close_held(id),
            AfterFlush::Relay(reader) => {
                self.note_reader(id, channel, reader);
                match reader {
                    Reader::Sender => self.start_relay(id),
                    Reader::Other => self.start_relay_gently(id),
                }
            }
            AfterFlush::Park => self.park(id),
        }
        self.end_recall(id);
        Ok(ReplyBody::Done.into())
    }

    /// Datagrams have no state worth keeping; only the port stays while a descriptor lives.
    fn flush_udp(&mut self, id: SessionId, then: AfterFlush) -> Result<Answer, Errno> {
        match then {
            AfterFlush::Close => {
                self.forget(id);
                Ok(ReplyBody::Done.into())
            }
            AfterFlush::Relay(_) | AfterFlush::Park => Err(Errno::OPNOTSUPP),
        }
    }

    /// Decodes a capsule; only one of this very session is taken.
    fn unpack(&mut self, id: SessionId, capsule: Capsule, fds: Vec<OwnedFd>) -> Option<TcpSession> {
        let (bytes, unread) = shm::unpack_capsule(capsule, fds).ok()?;
        // Unread bytes stay where the last holder has put them.
        let unread = match unread {
            Some((memory, at)) => {
                let memory = Arc::new(memory);
                Some(HandoffBuffer::new(
                    memory,
                    at.start as usize,
                    at.length as usize,
                )?)
            }
            None => None,
        };
        let beside = unread.as_ref().map_or(0, HandoffBuffer::bytes_aside);
        self.counters.capsule_bytes += (bytes.len() + beside) as u64;
        let capsule = TcpSession::from_parts(&bytes, unread).ok()?;
        let session = self.registry.session(id)?;
        let is_same = capsule.id == id && Some(capsule.flow) == session.flow();
        let has_ports = capsule.connection.local_port() == capsule.flow.local.port()
            && capsule.connection.remote_port() == capsule.flow.remote.port();
        (is_same && has_ports).then_some(capsule)
    }

    /// `Release`: the process gives up a session without state.
    pub fn release(&mut self, channel: ChannelId, id: SessionId) -> Result<Answer, Errno> {
        let session = self.registry.admit(channel, Command::Release, id)?;
        match session.phase {
            // Segments that come from now on must not find it, though its hang-up is not read yet.
            SessionPhase::Listening if self.has_hung_up(id) => self.on_hangup(id),
            SessionPhase::Listening => {}
            SessionPhase::Offered | SessionPhase::Relayed | SessionPhase::Parked => {
                self.abort_held(id)
            }
            _ => self.forget(id),
        }
        Ok(ReplyBody::Done.into())
    }

    pub fn note_migration(&mut self, id: SessionId) {
        if let Some(session) = self.registry.session_mut(id) {
            session.migrations += 1;
        }
    }

    /// Finishes a session that the server holds: what is queued, FIN, TIME_WAIT.
    pub fn close_held(&mut self, id: SessionId) {
        if self.locals.has(id) {
            return self.close_local(id);
        }
        self.set_phase(id, SessionPhase::Closing);
        let Some(slot) = self.server_slot(id) else {
            return;
        };
        let now = self.now;
        if let Some(session) = self.stack.tcp(slot) {
            session.connection.close(now);
        }
        self.stack.touch(slot);
        self.note_orphan(id);
        self.look_at_closing(id);
    }

    /// Resets a session that the server holds.
    pub fn abort_held(&mut self, id: SessionId) {
        self.counters.aborts += 1;
        if self.locals.has(id) {
            return self.abort_local(id);
        }
        self.set_phase(id, SessionPhase::Closing);
        let Some(slot) = self.server_slot(id) else {
            self.forget(id);
            return;
        };
        let now = self.now;
        if let Some(session) = self.stack.tcp(slot) {
            session.connection.abort(now);
        }
        self.stack.touch(slot);
    }

    /// Is a closing session done, or in TIME_WAIT? The oldest go when too many wait.
    pub fn look_at_closing(&mut self, id: SessionId) {
        let state = self
            .server_slot(id)
            .and_then(|slot| self.stack.tcp(slot))
            .map(|session| session.connection.state());
        match state {
            Some(StateName::TimeWait) => self.enter_time_wait(id),
            Some(StateName::Closed) => self.done.push(id),
            _ => {}
        }
    }

    fn enter_time_wait(&mut self, id: SessionId) {
        if self.waiting.insert(id, self.now).is_some() {
            return;
        }
        // There is nothing more to send or to receive.
        self.orphans.remove(id);
        self.end_guarantees_of_flow(id);
        self.time_wait.push_back(id);
        while self.waiting.len() > self.config.limits.time_wait {
            let Some(oldest) = self.time_wait.pop_front() else {
                return;
            };
            if self.waiting.contains_key(&oldest) {
                self.counters.time_wait_evicted += 1;
                self.forget(oldest);
            }
        }
        // Those that ended in time lie in the queue until they come to its front.
        while let Some(oldest) = self.time_wait.front()
            && !self.waiting.contains_key(oldest)
        {
            self.time_wait.pop_front();
        }
    }

    /// Ends the oldest TIME_WAIT between two hosts that is old enough for its ports to be used
    /// again: timestamps tell its late segments from the new connection's (RFC 6191; Linux's
    /// `tcp_tw_reuse`). False if there is none.
    pub fn reuse_time_wait(&mut self, local: IpAddr, remote: SocketAddr) -> bool {
        let is_fit = |id: &&SessionId| {
            self.waiting
                .get(*id)
                .is_some_and(|since| self.now.since(*since) >= REUSE_AFTER)
                && self.registry.session(**id).is_some_and(|session| {
                    session.local.ip() == local && session.remote == Some(remote)
                })
        };
        let Some(id) = self.time_wait.iter().find(is_fit).copied() else {
            return false;
        };
        self.forget(id);
        true
    }

    /// Takes a session out for the process whose row it gets. Packets that came before lie on the
    /// ring or the tap: they go into the session before it leaves, and so before all that reaches the
    /// process.
    pub fn hand_over(
        &mut self,
        id: SessionId,
        to: (ChannelId, Slot),
    ) -> Option<(TcpSession, Generation)> {
        let held = self.server_slot(id)?;
        self.set_phase(id, SessionPhase::Connected);
        let generation = self.steer(id, Holder::Process(to.0, to.1));
        self.drain();
        self.counters.handoffs += 1;
        self.note_migration(id);
        match self.stack.remove(held)? {
            Session::Tcp(mut session) => {
                self.give_handle(&mut session);
                Some((*session, generation))
            }
            Session::Udp(_) => None,
        }
    }

    /// The holder is gone and with it the numbers. The row points here now: a segment outside any
    /// window makes the peer acknowledge (RFC 9293 §3.10.7.4), and the reset that answers this
    /// acknowledgement is exact.
    pub fn abort_orphan(&mut self, id: SessionId) {
        if self.locals.has(id) {
            return self.orphan_local(id);
        }
        let Some(session) = self.registry.session(id) else {
            return;
        };
        let is_tcp_flow = session.protocol == Protocol::Tcp && session.remote.is_some();
        if !is_tcp_flow {
            self.forget(id);
            return;
        }
        self.counters.aborts += 1;
        self.fail_recall(id);
        self.registry.detach(id);
        self.drop_far(id);
        self.set_phase(id, SessionPhase::Closing);
        self.await_no_longer(id);
        self.steer(id, Holder::Server(NO_SLOT));
        let orphaned_flows = OrphanedFlow {
            next: self.now,
            tries: 0,
        };
        self.orphaned_flows.insert(id, orphaned_flows);
        self.probe_peer(id);
    }

    fn probe_peer(&mut self, id: SessionId) {
        let Some(flow) = self.registry.session(id).and_then(|session| session.flow()) else {
            self.orphaned_flows.remove(&id);
            return;
        };
        let Some(orphaned_flows) = self.orphaned_flows.get_mut(&id) else {
            return;
        };
        if orphaned_flows.tries == PROVOKE_TIMES {
            debug!(session = id.0, "peer never answered");
            self.quarantine_port(id);
            return;
        }
        orphaned_flows.next = self.now + PROVOKE_EVERY * (1 << orphaned_flows.tries);
        orphaned_flows.tries += 1;
        self.probes_due.add(orphaned_flows.next, id);
        let header = TcpHeader {
            source_port: flow.local.port(),
            destination_port: flow.remote.port(),
            seq: SeqNum(random_u32()),
            ack: SeqNum(random_u32()),
            flags: TcpFlags::ACK,
            ..TcpHeader::default()
        };
        let ip = IpOptions::default();
        send_segment(&flow, ip, &header, &self.routes, &mut self.wire);
    }

    /// Asks again the peers that have not answered. Returns when to come back.
    pub fn drive_dying(&mut self) -> Option<Instant> {
        for (due, id) in self.probes_due.take(self.now) {
            if self
                .orphaned_flows
                .get(&id)
                .is_some_and(|orphaned_flows| orphaned_flows.next == due)
            {
                self.probe_peer(id);
            }
        }
        self.probes_due.next()
    }

    /// A segment of a connection whose holder died.
    pub fn on_probe_answer(&mut self, id: SessionId, packet: &Packet<'_>) {
        let Transport::Tcp {
            header, payload, ..
        } = &packet.transport
        else {
            return;
        };
        let is_reset = header.flags.contains(TcpFlags::RST);
        if !is_reset && !header.flags.contains(TcpFlags::ACK) {
            return;
        }
        self.reset(packet, header, payload);
        self.quarantine_port(id);
    }

    /// Forgets a connection that ended badly, and holds its port back.
    pub fn quarantine_port(&mut self, id: SessionId) {
        let until = self.now + HOLD_BACK;
        let claim = self
            .registry
            .session_mut(id)
            .and_then(|session| session.flow_claim.take());
        if let Some(claim) = claim {
            self.ports.hold_back(claim, until);
        }
        self.forget(id);
    }
}
