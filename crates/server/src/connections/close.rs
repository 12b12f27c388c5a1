//! The end of sessions: capsules that return, connections that the server finishes, processes that died with
//! sessions open.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use portolan_control::{Command, Errno, Holder, Input, Life, Progress, SessionPhase, Start};
use portolan_proto::control::{AfterFlush, Capsule, Reader, ReplyBody, SocketOptionsBlob};
use portolan_stack::passive::Segment;
use portolan_stack::{IpOptions, Packet, Session, TcpSession, send_segment};
use portolan_sys::{clock, probes, shm};
use portolan_tcp::{HandoffBuffer, StateName};
use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SeqNum, SessionId, Slot};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use crate::random::random_u32;
use crate::requests::Answer;
use crate::server::Server;

impl Server {
    /// `BeginFlush`: the session is about to return. Packets for it wait here from now on, so that what its
    /// holder has before it makes the capsule is complete.
    pub(crate) fn depart(&mut self, channel: ChannelId, id: SessionId) -> Result<Answer, Errno> {
        let session = self.control.registry.admit(channel, Command::Flush, id)?;
        if session.protocol == Protocol::Udp || self.handles.local(id).is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        if session.awaited.is_none() {
            if self.is_stopping() {
                // It stays where it is, and leaves with the next server.
                return Ok(Answer::Silence);
            }
            let slot = self.stack.reserve();
            self.control.registry.depart(id, slot, self.now);
            self.renew_rows(id);
        }
        Ok(ReplyBody::Done.into())
    }

    /// `AbortFlush`: the session does not return; its packets go to its holder again.
    pub(crate) fn stay(&mut self, channel: ChannelId, id: SessionId) -> Answer {
        if self
            .control
            .registry
            .admit(channel, Command::Flush, id)
            .is_ok()
        {
            self.await_no_longer(id);
            self.renew_rows(id);
        }
        Answer::Silence
    }

    /// The session will not arrive: discards packets that wait for it.
    fn await_no_longer(&mut self, id: SessionId) {
        let session = self.control.registry.session_mut(id);
        if let Some((slot, _)) = session.and_then(|session| session.awaited.take()) {
            self.remove_connection(slot);
        }
    }

    /// Removes a connection from the engine, with packets that wait at its slot.
    pub(crate) fn remove_connection(&mut self, slot: Slot) {
        self.stack.remove(slot);
        self.stack.released().for_each(drop);
    }

    /// `Flush`: the session returns.
    pub(crate) fn flush(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        (capsule, fds): (Capsule, Vec<OwnedFd>),
        then: AfterFlush,
        options_blob: SocketOptionsBlob,
    ) -> Result<Answer, Errno> {
        let session = self.control.registry.admit(channel, Command::Flush, id)?;
        self.control.counters.flushes += 1;
        if session.protocol == Protocol::Udp {
            return self.flush_udp(id, then);
        }
        if self.handles.local(id).is_some() {
            return Ok(self.flush_local(channel, id, then, options_blob));
        }
        let Some(session) = self.unpack((channel, id), capsule, fds) else {
            self.control.counters.bad_capsules += 1;
            self.input(Input::Orphaned(id));
            return Err(Errno::PROTO);
        };
        let at = self.end_of_flush(id).unwrap_or_else(|| {
            let slot = self.stack.reserve();
            (slot, self.steer(id, Holder::Server(slot)))
        });
        self.hold_at(id, at, session);
        self.note_migration(id);
        self.control.registry.detach(id);
        self.control.registry.describe(id, options_blob);
        match then {
            AfterFlush::Close => self.input(Input::Close(id)),
            AfterFlush::Relay(reader) => {
                self.note_reader(id, channel, reader);
                match reader {
                    Reader::Sender => self.input(Input::Relay(id, Start::AtOnce)),
                    Reader::Other => self.input(Input::Relay(id, Start::Gently)),
                }
            }
            AfterFlush::Park => self.input(Input::Park(id)),
        }
        self.input(Input::Returned(id));
        Ok(ReplyBody::Done.into())
    }

    /// Returns where the server waited for a session; None if it did not.
    fn end_of_flush(&mut self, id: SessionId) -> Option<(Slot, Generation)> {
        let at = self.control.registry.arrive(id)?;
        let since = self.control.registry.session(id)?.awaited_since;
        // Not the time of this turn, in which the announcement may have been read, too.
        let took = clock::now().since(since);
        self.control.migration_times.flushed.observe(took);
        Some(at)
    }

    /// Datagrams have no state worth keeping; only the port stays as long as a descriptor is open.
    fn flush_udp(&mut self, id: SessionId, then: AfterFlush) -> Result<Answer, Errno> {
        match then {
            AfterFlush::Close => {
                self.forget(id);
                Ok(ReplyBody::Done.into())
            }
            AfterFlush::Relay(_) | AfterFlush::Park => Err(Errno::OPNOTSUPP),
        }
    }

    /// Decodes a capsule; only one of this session is accepted.
    pub(crate) fn unpack(
        &mut self,
        (channel, id): (ChannelId, SessionId),
        capsule: Capsule,
        fds: Vec<OwnedFd>,
    ) -> Option<TcpSession> {
        let (bytes, unread) = shm::unpack_capsule(capsule, fds).ok()?;
        // Unread bytes stay in the memory of the last holder.
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
        let length = (bytes.len() + beside) as u64;
        self.control.counters.capsule_bytes += length;
        probes::flushed(id.0, channel.0.into(), length);
        let capsule = TcpSession::from_parts(&bytes, unread).ok()?;
        let session = self.control.registry.session(id)?;
        let is_same = capsule.id == id && Some(capsule.flow) == session.flow();
        let has_ports = capsule.connection.local_port() == capsule.flow.local.port()
            && capsule.connection.remote_port() == capsule.flow.remote.port();
        (is_same && has_ports).then_some(capsule)
    }

    /// `Release`: the process gives up a session without state.
    pub(crate) fn release(&mut self, channel: ChannelId, id: SessionId) -> Result<Answer, Errno> {
        let phase = self
            .control
            .registry
            .admit(channel, Command::Release, id)?
            .phase();
        self.leave_rejoined(id, channel);
        match phase {
            // New segments must not find the listener, although its hang-up is not read yet.
            SessionPhase::Listening if self.has_hung_up(id) => self.on_hangup(id),
            SessionPhase::Listening => {}
            SessionPhase::Offered | SessionPhase::Relayed | SessionPhase::Parked => {
                self.input(Input::Abort(id));
            }
            _ => self.forget(id),
        }
        Ok(ReplyBody::Done.into())
    }

    pub(crate) fn note_migration(&mut self, id: SessionId) {
        if let Some(session) = self.control.registry.session_mut(id) {
            session.migrations += 1;
        }
    }

    /// Reports whether a closing session is finished, or in TIME-WAIT.
    pub(crate) fn look_at_closing(&mut self, id: SessionId) {
        let state = self
            .server_slot(id)
            .and_then(|slot| self.stack.tcp(slot))
            .map(|session| session.connection.state());
        let progress = match state {
            Some(StateName::TimeWait) => Progress::TimeWait,
            Some(StateName::Closed) => Progress::Closed,
            _ => Progress::Open,
        };
        self.input(Input::Progress { id, progress });
    }

    /// Begins to finish a connection: queued data, FIN, TIME-WAIT.
    pub(crate) fn close_connection(&mut self, id: SessionId, slot: Slot) {
        let now = self.now;
        if let Some(session) = self.stack.tcp(slot) {
            session.connection.close(now);
        }
        self.stack.touch(slot);
        if let Some(unsent) = self.unsent(id) {
            self.input(Input::Finishing { id, unsent });
        }
        self.look_at_closing(id);
    }

    pub(crate) fn reset_connection(&mut self, slot: Slot) {
        let now = self.now;
        if let Some(session) = self.stack.tcp(slot) {
            session.connection.abort(now);
        }
        self.stack.touch(slot);
    }

    /// Returns how many bytes the peer of a session held here has not acknowledged.
    pub(crate) fn unsent(&mut self, id: SessionId) -> Option<u64> {
        let slot = self.server_slot(id)?;
        let session = self.stack.tcp(slot)?;
        Some(session.connection.tcp_info().send_queue as u64)
    }

    /// Removes a session for the process that its row now names. Earlier packets are still on the ring or the
    /// tap: they are processed before the session leaves, and so before any that reach the process.
    pub(crate) fn hand_over(
        &mut self,
        id: SessionId,
        to: (ChannelId, Slot),
    ) -> Option<(TcpSession, Generation)> {
        let held = self.server_slot(id)?;
        let before = clock::now();
        self.set_life(id, Life::Connected);
        let generation = self.steer(id, Holder::Process(to.0, to.1));
        self.drain();
        self.control.counters.handoffs += 1;
        self.note_migration(id);
        let removed = self.stack.remove(held)?;
        let took = clock::now().since(before);
        self.control.migration_times.cached.observe(took);
        probes::cached(id.0, to.0.0.into(), to.1.0.into());
        match removed {
            Session::Tcp(mut session) => {
                self.give_handle(&mut session);
                Some((*session, generation))
            }
            Session::Udp(_) => None,
        }
    }

    /// Probes the peer of a connection whose sequence numbers are lost, to make it send them.
    pub(crate) fn probe_peer(&mut self, flow: &FlowKey) {
        let header = TcpHeader {
            source_port: flow.local.port(),
            destination_port: flow.remote.port(),
            seq: SeqNum(random_u32()),
            ack: SeqNum(random_u32()),
            flags: TcpFlags::ACK,
            ..TcpHeader::default()
        };
        let ip = IpOptions::default();
        send_segment(flow, ip, &header, &self.routes, &mut self.wire);
    }

    /// Handles a segment of a connection whose holder died.
    pub(crate) fn on_probe_answer(&mut self, id: SessionId, packet: &Packet<'_>) {
        let Some(segment) = Segment::of(packet) else {
            return;
        };
        let flags = segment.header.flags;
        if !flags.contains(TcpFlags::RST) && !flags.contains(TcpFlags::ACK) {
            return;
        }
        self.reset(&segment);
        self.input(Input::ProbeAnswered(id));
    }
}
