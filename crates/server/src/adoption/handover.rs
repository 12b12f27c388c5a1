//! Connections that the server itself holds, for the next one: those that it relays or has parked, those in accept
//! queues, and those that it finishes for programs that have closed them. A server that stops for a successor puts their
//! state, and its ends of their descriptors and of those that processes hold, into the messages of a socket that the
//! service manager keeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use portolan_control::{Errno, HeldBefore, Input, Life, SessionEntry, SessionPhase, Start};
use portolan_proto::control::HandshakeOptions;
use portolan_proto::encode;
use portolan_stack::Session;
use portolan_sys::unix::{self, MAX_FDS, PairKind, socket_pair};
use portolan_tcp::StateName;
use portolan_types::{ChannelId, SessionId};
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use tracing::{debug, info, warn};

use crate::adoption::held::{
    self, HeldConnection, HeldState, LeftConnection, Message, Role, first_message,
};
use crate::adoption::left_ends::LeftEnd;
use crate::server::Server;
use crate::supervisor::Kept;

/// Room for all messages, in bytes; more than the connections of a server need.
const ROOM: usize = 1 << 30;

impl Server {
    /// Can the next server continue with a session that this one holds?
    pub(crate) fn can_hand_over(&self, id: SessionId) -> bool {
        let session = self.control.registry.session(id);
        self.supervisor.keeps() && session.and_then(Role::of).is_some()
    }

    /// Takes connections out of the accept queue of a listener that ends, so that they do not end with it.
    pub(crate) fn leave_queue(&mut self, listener: SessionId) {
        let Some(entry) = self.control.registry.listener(listener) else {
            return;
        };
        let queued: Vec<SessionId> = entry.opens.queue.unaccepted().collect();
        for id in queued {
            if self.can_hand_over(id) {
                self.input(Input::Accepted(id, None));
            }
        }
    }

    /// Connections in TIME-WAIT end with this server. Their rows go first: a SYN that finds one comes to the server, which
    /// passes it on to the listener now, and soon no longer.
    pub(crate) fn end_time_waits(&mut self) {
        let over = self.stack.iter().filter_map(|(_, session)| match session {
            Session::Tcp(tcp) if tcp.connection.state() == StateName::TimeWait => Some(tcp.id),
            _ => None,
        });
        for id in over.collect::<Vec<SessionId>>() {
            self.input(Input::FlowReused(id));
        }
        self.drain();
    }

    /// Has the service manager keep the connections for the next server, and the ends. Returns the connections that it keeps,
    /// which are no longer here.
    pub(crate) fn hand_over_all(&mut self, ends: Vec<(LeftEnd, OwnedFd)>) -> Vec<SessionId> {
        let sessions = self.control.registry.sessions();
        let mut held: Vec<&SessionEntry> = sessions
            .filter(|session| self.can_hand_over(session.id))
            .collect();
        // In the order in which they came, which is that of accept queues.
        held.sort_unstable_by_key(|session| session.generation.0);
        let held: Vec<SessionId> = held.iter().map(|session| session.id).collect();
        if held.is_empty() && ends.is_empty() {
            return held;
        }
        // What has arrived for them belongs to their states.
        self.drain();
        self.put_aside(held, ends).unwrap_or_else(|error| {
            warn!(%error, "connections that the server held are lost");
            Vec::new()
        })
    }

    fn put_aside(
        &mut self,
        held: Vec<SessionId>,
        ends: Vec<(LeftEnd, OwnedFd)>,
    ) -> std::io::Result<Vec<SessionId>> {
        let (kept, end) = socket_pair(PairKind::SeqPacket)?;
        set_socket_send_buffer_size_force(&end, ROOM)?;
        unix::send(&end, &first_message(), &[]).map_err(std::io::Error::other)?;
        for some in ends.chunks(MAX_FDS) {
            let message = Message::Ends(some.iter().map(|(end, _)| *end).collect());
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, far)| far.as_fd()).collect();
            if let Err(error) = unix::send(&end, &encode(&message), &fds) {
                warn!(%error, "descriptors of connections are lost");
            }
        }
        let mut put = Vec::new();
        for id in held {
            let Some((connection, fds)) = self.pack(id) else {
                continue;
            };
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            let message = Message::Held(Box::new(connection));
            match unix::send(&end, &encode(&message), &fds) {
                Ok(()) => put.push(id),
                Err(error) => warn!(%error, session = id.0, "a connection is lost"),
            }
        }
        self.supervisor.keep(Kept::Connections, [kept.as_fd()])?;
        Ok(put)
    }

    /// Takes a connection out of the engine.
    fn pack(&mut self, id: SessionId) -> Option<(HeldConnection, Vec<OwnedFd>)> {
        let session = self.control.registry.session(id)?;
        let role = Role::of(session)?;
        let is_local = session.is_local();
        let held = HeldBefore {
            id,
            flow: session.flow()?,
            listener: session.listener,
            uid: session.uid,
            cookie: session.cookie,
            reuse: session.reuse,
            v6_only: session.v6_only,
            options: HandshakeOptions {
                delivery: session.delivery,
                priority: session.priority,
                ..HandshakeOptions::default()
            },
        };
        let options_blob = session.options_blob.clone();
        let (state, of_state) = if is_local {
            self.pack_end(id)?
        } else {
            self.pack_connection(id)?
        };
        let end = role.has_descriptor().then(|| self.take_far(id)).flatten();
        let connection = HeldConnection {
            session: held,
            role,
            options_blob,
            state,
        };
        Some((connection, end.into_iter().chain(of_state).collect()))
    }

    fn pack_connection(&mut self, id: SessionId) -> Option<(HeldState, Vec<OwnedFd>)> {
        let slot = self.server_slot(id)?;
        let Session::Tcp(tcp) = self.stack.remove(slot)? else {
            return None;
        };
        let (capsule, fds) = self.encapsulate(&tcp).ok()?;
        Some((HeldState::Capsule(capsule), fds))
    }

    fn pack_end(&mut self, id: SessionId) -> Option<(HeldState, Vec<OwnedFd>)> {
        let end = self.handles.of(id).local.take()?;
        let memory = end.memory.fd.try_clone().ok()?;
        Some((HeldState::Memory(end.side), vec![memory]))
    }

    /// Continues with the connections that the previous server held.
    pub(crate) fn take_up_connections(&mut self) {
        let left = std::mem::take(&mut self.inheritance.held);
        if left.is_empty() {
            return;
        }
        for connection in left {
            let flow = *connection.flow();
            match self.take_up(connection) {
                Ok(()) => self.control.counters.taken_up += 1,
                Err(errno) => {
                    debug!(?errno, %flow, "a connection is not taken up");
                    self.control.counters.adoptions_refused += 1;
                    self.remove_row(&flow);
                }
            }
        }
        info!(
            connections = self.control.counters.taken_up,
            "held by the previous server"
        );
    }

    /// The server is ready: nobody else is to continue with them.
    pub(crate) fn forget_kept_connections(&mut self) {
        self.supervisor.drop_kept(Kept::Connections);
        if let Some(messages) = self.inheritance.messages.take() {
            held::clear(&messages);
        }
    }

    fn take_up(&mut self, LeftConnection { connection, fds }: LeftConnection) -> Result<(), Errno> {
        let HeldConnection {
            session,
            role,
            options_blob,
            state,
        } = connection;
        let listener = session.listener;
        let id = self.control.enter_held(session, state.reach())?;
        let mut fds = fds.into_iter();
        let entered = match role.has_descriptor().then(|| fds.next()) {
            Some(Some(end)) => self.watch_peer_end_of_parked(id, end),
            Some(None) => Err(Errno::PROTO),
            None => Ok(()),
        };
        let continued = entered.and_then(|()| self.continue_with(id, state, fds.collect()));
        continued.inspect_err(|_| self.forget(id))?;
        self.control.registry.describe(id, options_blob);
        match role {
            Role::Relays => self.input(Input::Relay(id, Start::AtOnce)),
            Role::Parks => self.input(Input::Park(id)),
            Role::Queues => self.wait_for_listener(id, listener),
            Role::Finishes => self.input(Input::Close(id)),
        }
        Ok(())
    }

    fn continue_with(
        &mut self,
        id: SessionId,
        state: HeldState,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(), Errno> {
        match state {
            HeldState::Capsule(capsule) => {
                let from = (ChannelId::SERVER, id);
                let tcp = self.unpack(from, capsule, fds).ok_or(Errno::PROTO)?;
                self.hold_session(id, tcp);
                Ok(())
            }
            HeldState::Memory(side) => self.enter_end(id, side, fds.pop().ok_or(Errno::PROTO)?),
        }
    }

    fn wait_for_listener(&mut self, id: SessionId, listener: Option<SessionId>) {
        self.set_life(id, Life::Parked);
        let queues = &mut self.inheritance.queued;
        queues.entry(listener.unwrap_or(id)).or_default().push(id);
    }

    /// Puts the connections that were in a listener's accept queue under the previous server back.
    pub(crate) fn queue_again(&mut self, listener: SessionId) {
        for id in self.inheritance.take_queue(listener) {
            if self.phase(id) == Some(SessionPhase::Parked) {
                self.set_life(id, Life::handshake());
                self.input(Input::ReadableHandshake(id));
            }
        }
    }
}
