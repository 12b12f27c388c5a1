//! Listeners: their ports, and the offer of each connection to be accepted on the listener's descriptor. Connections
//! that reach the port through the kernel are passed on unchanged.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_control::{
    ClaimId, Command, Deadline, Errno, Input, Life, Listener, Opening, PortClaim, SessionEntry,
    SessionPhase,
};
use portolan_proto::control::{Caching, DescriptorEvent, ReplyBody, SessionRef};
use portolan_proto::filter::{BindingKey, FlowRow};
use portolan_sys::unix::{self, PairKind, SendError};
use portolan_types::{ChannelId, FlowKey, Protocol, SessionId, Slot};
use rustix::event::epoll::EventFlags;
use tracing::{debug, warn};

use crate::adoption::Buckets;
use crate::requests::{Answer, Listening, NewDescriptor};
use crate::server::{Server, Source};

/// Connections taken from the kernel's queue in one turn.
const KERNEL_ACCEPTS_PER_TURN: usize = 64;

/// How long a SYN that passed the filter before its port's row was written may take through the kernel's stack. Its
/// sender retransmits a lost one after a second.
const GUARDED_FOR: Duration = Duration::from_secs(1);

impl Server {
    /// Where a row of a listener leads to: it names no session of the server.
    pub(crate) const PLACE: (ChannelId, Slot) = (ChannelId::SERVER, Slot(u32::MAX));

    /// `listen`: makes a session a listener, or changes one.
    pub(crate) fn listen(
        &mut self,
        channel: ChannelId,
        session: SessionRef,
        spec: Listening,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        self.sysctls.look(self.now);
        let keeps_descriptor = fds.is_empty();
        let (id, local) = self.listen_with(channel, session, spec.backlog, fds)?;
        if let Some(listener) = self.control.registry.listener_mut(id) {
            listener.opens.options = spec.options;
        }
        let rules = self.choose_delegate(channel, id, &spec);
        self.leave_port_of_before(id);
        self.queue_again(id);
        self.control.registry.describe(id, spec.options_blob);
        // The performer of the handshakes signals pending connections on the descriptor.
        let far = match (&rules, self.handles.peer_end(id)) {
            (Some(_), Some(far)) if keeps_descriptor => {
                Some(far.fd.try_clone().map_err(|_| Errno::NOBUFS)?)
            }
            _ => None,
        };
        let body = ReplyBody::Listening {
            session: id,
            local,
            rules,
        };
        Ok(Answer::Reply(body, far.into_iter().collect()))
    }

    fn listen_with(
        &mut self,
        channel: ChannelId,
        session: SessionRef,
        backlog: u32,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(SessionId, SocketAddr), Errno> {
        let id = match session {
            SessionRef::Known(id) => {
                let session = self.control.registry.admit(channel, Command::Listen, id)?;
                if session.phase() == SessionPhase::Listening {
                    return self.resize_backlog(id, backlog);
                }
                id
            }
            SessionRef::New => return self.listen_unbound(channel, backlog, fds),
            SessionRef::Again(_) => return Err(Errno::INVAL),
        };
        let descriptor = if fds.is_empty() {
            self.check_carries_messages(id).map(|()| None)?
        } else {
            Some(self.take_new_descriptor(fds)?)
        };
        self.become_listener(id, backlog, descriptor)
    }

    /// Checks whether a bound session's descriptor can carry the connections to accept. Processes that share it
    /// accept, too.
    fn check_carries_messages(&self, id: SessionId) -> Result<(), Errno> {
        let far = self.handles.peer_end(id).ok_or(Errno::INVAL)?;
        if unix::carries_messages(&far.fd) {
            Ok(())
        } else {
            Err(Errno::INVAL)
        }
    }

    /// `ReplaceDescriptor`: the session uses another pair from now on.
    pub(crate) fn replace_descriptor(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        self.control.registry.admit(channel, Command::Bind, id)?;
        let descriptor = self.take_new_descriptor(fds)?;
        self.rename(id, descriptor)?;
        Ok(ReplyBody::Done.into())
    }

    fn rename(&mut self, id: SessionId, descriptor: NewDescriptor) -> Result<(), Errno> {
        self.control.registry.replace_cookie(id, descriptor.cookie);
        self.watch_peer_end(id, descriptor.far)
    }

    fn resize_backlog(
        &mut self,
        id: SessionId,
        backlog: u32,
    ) -> Result<(SessionId, SocketAddr), Errno> {
        let listener = self.control.registry.listener_mut(id).ok_or(Errno::INVAL)?;
        listener.opens.queue.resize(backlog);
        if let Some(port) = self.handles.port(id) {
            port.socket.listen(backlog)?;
        }
        self.input(Input::Resized(id));
        let local = self.control.registry.session(id).ok_or(Errno::BADF)?.local;
        Ok((id, local))
    }

    /// Linux gives a socket that listens without `bind` an ephemeral port on all addresses.
    fn listen_unbound(
        &mut self,
        channel: ChannelId,
        backlog: u32,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(SessionId, SocketAddr), Errno> {
        self.control.registry.has_room(channel)?;
        let descriptor = self.take_new_descriptor(fds)?;
        let uid = self
            .control
            .registry
            .process(channel)
            .ok_or(Errno::PERM)?
            .uid;
        let claim = PortClaim {
            protocol: Protocol::Tcp,
            local: (IpAddr::from([0, 0, 0, 0]), 0).into(),
            reuse: Default::default(),
            v6_only: false,
            uid,
        };
        let (claim_id, local, reservation) = self.reserve(claim, false)?;
        let opening = Opening {
            claim: Some(claim_id),
            ..Opening::new(Protocol::Tcp, local, uid)
        };
        let id = self.enter(channel, opening, None)?;
        self.keep_reservation(id, reservation);
        let listening = self.become_listener(id, backlog, Some(descriptor));
        if listening.is_err() {
            self.forget(id);
        }
        listening
    }

    fn become_listener(
        &mut self,
        id: SessionId,
        backlog: u32,
        descriptor: Option<NewDescriptor>,
    ) -> Result<(SessionId, SocketAddr), Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let (local, uid) = (session.local, session.uid);
        let claim = session.claim.ok_or(Errno::INVAL)?;
        let rows = BindingKey::of(Protocol::Tcp, local, session.v6_only).count();
        self.control.registry.charge_listener(id, rows)?;
        // First the row: a handshake that the kernel begins is cut off when the filter takes the rest of it.
        self.input(Input::Listens(id));
        if let Err(errno) = self.listen_at_kernel(id, claim, backlog) {
            self.input(Input::ListeningEnds(id));
            return Err(errno);
        }
        if let Some(descriptor) = descriptor {
            self.rename(id, descriptor)?;
        }
        // Listeners that share the port are of one user, and the filter answers a flood of SYNs to all of them.
        let owner = u64::from(uid) << 16 | u64::from(local.port());
        let secret = self.secret.derive("listeners", owner);
        self.set_life(
            id,
            Life::Listening(Box::new(Listener::new(backlog, secret))),
        );
        debug!(session = id.0, %local, backlog, "listening");
        Ok((id, local))
    }

    /// Listens for connections that bypass the filter, as over loopback.
    fn listen_at_kernel(
        &mut self,
        id: SessionId,
        claim: ClaimId,
        backlog: u32,
    ) -> Result<(), Errno> {
        let port = self.handles.port_mut(id).ok_or(Errno::INVAL)?;
        let managed: Vec<u32> = self.managed.iter().copied().collect();
        self.control
            .ports
            .listen(claim)
            .map_err(|error| error.errno())?;
        // Without a token the program listens by itself when there is no server, if it may.
        port.token_socket = port.socket.token().ok();
        if let Err(errno) = port.socket.listen_except_by(&managed, backlog) {
            port.token_socket = None;
            self.control.ports.stop_listening(claim);
            return Err(errno);
        }
        port.token = self
            .poll
            .add_to_crowd(&port.socket, Source::Reservation(id), EventFlags::IN)
            .ok();
        if self.obeys_policy {
            self.open_port_at_kernel(id);
            return Ok(());
        }
        let until = self.now + GUARDED_FOR;
        self.control.arm(id, Deadline::PortTransition, until);
        Ok(())
    }

    /// Writes the rows of a listener.
    pub(crate) fn steer_listener(&mut self, id: SessionId) {
        if self.control.has_performers(id) {
            return self.steer_to_performers(id);
        }
        self.write_row_of_listener(id);
        self.end_deal(id);
    }

    fn write_row_of_listener(&self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let local = session.local;
        if local.ip().is_loopback() {
            // No frame from a network is for it.
            return;
        }
        let ((channel, slot), flags) = match self.control.delegate_of(id) {
            Some(delegate) => ((delegate.channel, delegate.slot), FlowRow::DELEGATED),
            None => (Server::PLACE, 0),
        };
        let row = self.row_of_listener(session, (channel, slot), flags);
        for key in BindingKey::of(Protocol::Tcp, local, session.v6_only) {
            if channel == ChannelId::SERVER && self.inheritance.ports().contains_key(&key) {
                // Until it is known whether the process continues.
                continue;
            }
            if let Err(error) = self.filter.bind(&key, row) {
                warn!(%error, %local, "cannot open a port in the filter");
            }
        }
    }

    pub(crate) fn row_of_listener(
        &self,
        session: &SessionEntry,
        (channel, slot): (ChannelId, Slot),
        flags: u16,
    ) -> FlowRow {
        FlowRow {
            channel: channel.0,
            slot: slot.0,
            flags: flags | self.extension_flags(session, channel),
            class: self.class_in_row(session),
            budget: self.budget_of(session),
            ..FlowRow::default()
        }
    }

    /// The rows of a listener are its own from now on, and no longer those that the previous server wrote.
    fn leave_port_of_before(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let keys = BindingKey::of(Protocol::Tcp, session.local, session.v6_only);
        let left: Vec<Buckets> = keys
            .filter_map(|key| self.inheritance.leave_port(&key))
            .collect();
        if let Some(buckets) = left.iter().find(|buckets| !buckets.is_empty()) {
            self.continue_deal(id, buckets);
        }
        if !left.is_empty() {
            self.steer_listener(id);
        }
    }

    pub(crate) fn close_rows(&self, keys: &[BindingKey]) {
        for key in keys {
            if let Err(error) = self.filter.unbind(key) {
                warn!(%error, ?key, "cannot close a port in the filter");
            }
        }
    }

    /// `StopListening`: the session is bound, as before `listen`.
    pub(crate) fn stop_listening(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let session = self
            .control
            .registry
            .admit(channel, Command::StopListening, id)?;
        session.claim.ok_or(Errno::INVAL)?;
        let descriptor = self.take_new_descriptor(fds)?;
        self.input(Input::ListeningEnds(id));
        self.stop_listening_at_kernel(id);
        self.input(Input::StoppedListening(id));
        self.control.registry.replace_cookie(id, descriptor.cookie);
        if let Err(errno) = self.watch_peer_end(id, descriptor.far) {
            self.forget(id);
            return Err(errno);
        }
        debug!(session = id.0, "listens no longer");
        Ok(ReplyBody::Done.into())
    }

    fn stop_listening_at_kernel(&mut self, id: SessionId) {
        self.handles.of(id).kernel_connections.clear();
        let session = self.control.registry.session(id);
        let shares_address = session.is_some_and(|session| session.reuse.address);
        if let Some(port) = self.handles.port_mut(id) {
            port.token_socket = None;
            port.socket.stop_listening(shares_address);
            if let Some(token) = port.token.take() {
                self.poll.remove(&port.socket, token);
            }
        }
    }

    /// Returns the listener that a packet of `flow` is for.
    pub(crate) fn listener_for(&self, flow: &FlowKey) -> Option<SessionId> {
        let listeners = &self.control.listeners;
        listeners.choose(flow, |id| self.hash((flow, id)))
    }

    /// Offers waiting connections, as far as the descriptor's queue has room.
    pub(crate) fn announce(&mut self, listener_id: SessionId) {
        let blocked = self.announce_kernel(listener_id) || self.announce_sessions(listener_id);
        let Some(listener) = self.control.registry.listener_mut(listener_id) else {
            return;
        };
        if listener.is_blocked == blocked {
            return;
        }
        listener.is_blocked = blocked;
        let (far, reservation) = if blocked {
            (EventFlags::OUT, EventFlags::empty())
        } else {
            (EventFlags::empty(), EventFlags::IN)
        };
        self.watch_far(listener_id, far);
        self.watch_reservation(listener_id, reservation);
    }

    /// Returns true if the queue is full.
    fn announce_sessions(&mut self, listener_id: SessionId) -> bool {
        while let Some(id) = self.next_ready(listener_id) {
            if !self.has_descriptors() {
                self.offer_later(listener_id);
                return false;
            }
            match self.offer(listener_id, id) {
                Ok(()) => self.control.counters.accepts += 1,
                Err(SendError::Blocked) => return true,
                // For lack of descriptors or memory.
                Err(SendError::Failed(_)) => {
                    self.offer_later(listener_id);
                    return false;
                }
                Err(_) => self.input(Input::Abort(id)),
            }
            if let Some(listener) = self.control.registry.listener_mut(listener_id) {
                listener.opens.queue.note_offered();
            }
        }
        false
    }

    fn next_ready(&self, listener_id: SessionId) -> Option<SessionId> {
        let listener = self.control.registry.listener(listener_id)?;
        listener.opens.queue.next_ready()
    }

    /// Sends the descriptor of one established session to the next process that accepts.
    fn offer(&mut self, listener_id: SessionId, id: SessionId) -> Result<(), SendError> {
        let session = self.control.registry.session(id).ok_or(SendError::Closed)?;
        let remote = session.remote.ok_or(SendError::Closed)?;
        let listener = self
            .control
            .registry
            .listener(listener_id)
            .ok_or(SendError::Closed)?;
        let caching = listener.caching();
        let event = DescriptorEvent::Accepted {
            session: id,
            local: session.local,
            remote,
            caching,
        };
        let (far, near) = unix::socket_pair(PairKind::Stream).map_err(SendError::Failed)?;
        unix::refuse_descriptors(&far);
        let cookie = unix::cookie(&near).map_err(SendError::Failed)?;
        self.try_send_event(listener_id, &event, &[near.as_fd()])?;
        self.control.registry.replace_cookie(id, cookie);
        let watched = match caching {
            Caching::WithFirstUse => self.watch_peer_end_of_parked(id, far),
            Caching::WithAccept => self.watch_peer_end(id, far),
        };
        if watched.is_err() {
            warn!(session = id.0, "cannot watch an accepted session");
        }
        Ok(())
    }

    /// `Accepted`: the session was not used yet; the first process that uses it gets it.
    pub(crate) fn leave_accepted(&mut self, channel: ChannelId, id: SessionId) -> Answer {
        // A child may have asked for it already.
        if self
            .control
            .registry
            .admit(channel, Command::Accept, id)
            .is_ok()
        {
            self.control.counters.delayed += 1;
            self.input(Input::Accepted(id, Some(channel)));
            self.input(Input::Park(id));
        }
        Answer::Silence
    }

    /// Accepts connections that only the kernel sees, such as those over loopback.
    pub(crate) fn on_kernel_connections(&mut self, id: SessionId) {
        if !self.has_descriptors() {
            // They wait in the kernel's queue.
            if let Some(listener) = self.control.registry.listener_mut(id) {
                listener.is_blocked = true;
                self.watch_reservation(id, EventFlags::empty());
                self.offer_later(id);
            }
            return;
        }
        if self.control.registry.listener(id).is_none() {
            return;
        }
        let handles = self.handles.of(id);
        for _ in 0..KERNEL_ACCEPTS_PER_TURN {
            let accepted = handles.port.as_ref().and_then(|port| port.socket.accept());
            let Some(connection) = accepted else {
                break;
            };
            self.control.counters.kernel_accepts += 1;
            handles.kernel_connections.push_back(connection);
        }
        self.announce(id);
    }

    /// Returns true if the queue is full.
    fn announce_kernel(&mut self, listener_id: SessionId) -> bool {
        let mut waiting = std::mem::take(&mut self.handles.of(listener_id).kernel_connections);
        let mut blocked = false;
        while let Some((fd, remote)) = waiting.front() {
            let event = DescriptorEvent::AcceptedKernel { remote: *remote };
            let sent = self.try_send_event(listener_id, &event, &[fd.as_fd()]);
            if sent == Err(SendError::Blocked) {
                blocked = true;
                break;
            }
            waiting.pop_front();
        }
        self.handles.of(listener_id).kernel_connections = waiting;
        blocked
    }

    fn watch_reservation(&self, id: SessionId, interest: EventFlags) {
        let port = self.handles.port(id);
        let Some((socket, token)) = port.and_then(|port| Some((&port.socket, port.token?))) else {
            return;
        };
        if let Err(errno) = self.poll.modify(socket, token, interest) {
            warn!(%errno, "cannot watch a reservation");
        }
    }
}
