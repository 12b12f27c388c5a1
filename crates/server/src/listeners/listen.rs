//! Passive opens: SYN, SYN queue or cookie, accept queue, offer on the listener's descriptor,
//! `Cache`. Connections that reach the port through the kernel are handed on as they are.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_control::{
    ClaimId, Command, Deadline, Errno, Input, Life, Listener, Opening, PortClaim, Queueing,
    SessionPhase,
};
use portolan_proto::control::{
    Blob, DescriptorEvent, HandshakeOptions, ReplyBody, SessionRef, SocketOptionsBlob,
};
use portolan_proto::filter::{BindingKey, FlowRow};
use portolan_stack::passive::{self, passive_config};
use portolan_stack::{SynVerdict, TcpSession};
use portolan_sys::unix::{self, PairKind, SendError};
use portolan_tcp::{Config as TcpConfig, Connection};
use portolan_types::{ChannelId, FlowKey, Protocol, SeqNum, SessionId, Slot};
use portolan_wire::tcp::TcpHeader;
use rustix::event::epoll::EventFlags;
use tracing::{debug, warn};

use crate::control_socket::clients::Answer;
use crate::migration::sessions::NewDescriptor;
use crate::server::{Server, Source, random_u64};

/// Connections taken from the kernel's queue in one turn.
const KERNEL_ACCEPTS_PER_TURN: usize = 64;

/// How long a SYN that passed the filter before its port's row stood may take through the kernel's
/// stack. Its sender repeats one that does not arrive after a second.
const GUARDED_FOR: Duration = Duration::from_secs(1);

/// A slot that no session has: the row of a listener names nobody.
const NO_SLOT: Slot = Slot(u32::MAX);

/// What a library asks for by `listen`.
#[derive(Debug)]
pub struct Listening {
    pub backlog: u32,
    pub options: HandshakeOptions,
    pub options_blob: SocketOptionsBlob,
    /// Where the process would have the port's segments, to perform the handshakes itself.
    pub slot: Option<Slot>,
}

impl Server {
    /// `listen`.
    pub fn listen(
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
            listener.options = spec.options;
        }
        let rules = self.choose_delegate(channel, id, &spec);
        self.control.registry.describe(id, spec.options_blob);
        // Who performs the handshakes shows on the descriptor that somebody waits.
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
        };
        let descriptor = match fds.is_empty() {
            true => self.check_carries_messages(id).map(|()| None)?,
            false => Some(self.take_new_descriptor(fds)?),
        };
        self.become_listener(id, backlog, descriptor)
    }

    /// May the connections to accept come on the descriptor that a bound session has? Whoever shares it accepts, too.
    fn check_carries_messages(&self, id: SessionId) -> Result<(), Errno> {
        let far = self.handles.peer_end(id).ok_or(Errno::INVAL)?;
        match unix::carries_messages(&far.fd) {
            true => Ok(()),
            false => Err(Errno::INVAL),
        }
    }

    /// `ReplaceDescriptor`: the session goes by another pair from now on.
    pub fn replace_descriptor(
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
        listener.resize(backlog);
        if let Some(port) = self.handles.port(id) {
            port.socket.listen(backlog)?;
        }
        self.admit_crowded_out(id);
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
        let local = session.local;
        let claim = session.claim.ok_or(Errno::INVAL)?;
        let rows = BindingKey::of(Protocol::Tcp, local, session.v6_only).count();
        self.control.registry.charge_bindings(id, rows)?;
        // First the row: a handshake that the kernel begins is cut off when the filter takes the rest of it.
        self.open_port(id, local);
        if let Err(errno) = self.listen_at_kernel(id, claim, backlog) {
            self.close_port(id, local);
            return Err(errno);
        }
        if let Some(descriptor) = descriptor {
            self.rename(id, descriptor)?;
        }
        self.set_life(id, Life::Listening(Box::new(Listener::new(backlog))));
        debug!(session = id.0, %local, backlog, "listening");
        Ok((id, local))
    }

    /// For connections that come past the filter, as over loopback.
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
        if let Err(errno) = port.socket.listen_except_by(&managed, backlog) {
            self.control.ports.stop_listening(claim);
            return Err(errno);
        }
        port.token = self
            .poll
            .add_to_crowd(&port.socket, Source::Reservation(id), EventFlags::IN)
            .ok();
        let until = self.now + GUARDED_FOR;
        self.control.arm(id, Deadline::PortTransition, until);
        Ok(())
    }

    /// Lets the filter send the port's segments here. Listeners that share a port share the row.
    fn open_port(&mut self, id: SessionId, local: SocketAddr) {
        let ids = self.listening_ports.entry(local.port()).or_default();
        let others = ids.clone();
        ids.push(id);
        self.steer_listener(id);
        for other in others {
            self.want_back(other);
        }
    }

    /// Whose the SYNs to a listener are.
    pub fn channel_of_listener(&self, id: SessionId) -> ChannelId {
        let delegate = self.control.registry.listener(id).and_then(|l| l.delegate);
        delegate.map_or(ChannelId::SERVER, |delegate| delegate.channel)
    }

    /// Writes the row of a listener.
    pub fn steer_listener(&self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let local = session.local;
        if local.ip().is_loopback() {
            // No frame of a network is for it.
            return;
        }
        let delegate = self.control.registry.listener(id).and_then(|l| l.delegate);
        let (channel, slot, flags) = match delegate {
            Some(delegate) => (delegate.channel, delegate.slot, FlowRow::DELEGATED),
            None => (ChannelId::SERVER, NO_SLOT, 0),
        };
        let row = FlowRow {
            channel: channel.0,
            slot: slot.0,
            flags: flags | self.extension_flags(session, channel),
            budget: self.budget_of(session),
            ..FlowRow::default()
        };
        for key in BindingKey::of(Protocol::Tcp, local, session.v6_only) {
            if let Err(error) = self.filter.bind(&key, row) {
                warn!(%error, %local, "cannot open a port in the filter");
            }
        }
    }

    fn close_port(&mut self, id: SessionId, local: SocketAddr) {
        let Some(ids) = self.listening_ports.get_mut(&local.port()) else {
            return;
        };
        ids.retain(|other| *other != id);
        let others = ids.clone();
        if ids.is_empty() {
            self.listening_ports.remove(&local.port());
        }
        if local.ip().is_loopback() {
            return;
        }
        let shared: HashSet<BindingKey> = others
            .into_iter()
            .filter_map(|other| self.control.registry.session(other))
            .flat_map(|other| BindingKey::of(Protocol::Tcp, other.local, other.v6_only))
            .collect();
        for key in BindingKey::of(Protocol::Tcp, local, self.is_v6_only(id)) {
            if !shared.contains(&key)
                && let Err(error) = self.filter.unbind(&key)
            {
                warn!(%error, %local, "cannot close a port in the filter");
            }
        }
    }

    fn is_v6_only(&self, id: SessionId) -> bool {
        self.control
            .registry
            .session(id)
            .is_some_and(|session| session.v6_only)
    }

    /// `StopListening`: the session is bound, as before `listen`.
    pub fn stop_listening(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let session = self
            .control
            .registry
            .admit(channel, Command::StopListening, id)?;
        let claim = session.claim.ok_or(Errno::INVAL)?;
        let descriptor = self.take_new_descriptor(fds)?;
        self.end_listening(id);
        self.end_extensions_of(id);
        self.stop_listening_at_kernel(id, claim);
        self.control.registry.release_bindings(id);
        self.give_up_unchosen_port(id);
        self.control.registry.replace_cookie(id, descriptor.cookie);
        if let Err(errno) = self.watch_peer_end(id, descriptor.far) {
            self.forget(id);
            return Err(errno);
        }
        debug!(session = id.0, "listens no longer");
        Ok(ReplyBody::Done.into())
    }

    fn stop_listening_at_kernel(&mut self, id: SessionId, claim: ClaimId) {
        self.control.ports.stop_listening(claim);
        self.control.disarm(id, Deadline::PortTransition);
        if let Some(port) = self.handles.port_mut(id) {
            port.socket.stop_listening();
            if let Some(token) = port.token.take() {
                self.poll.remove(&port.socket, token);
            }
        }
    }

    /// Ends a listener: what nobody accepted is reset, the port is free.
    pub fn close_listener(&mut self, id: SessionId) {
        if self.control.registry.listener(id).is_some() {
            self.end_listening(id);
            self.forget(id);
        }
    }

    /// What nobody accepted is reset, and what comes finds nobody.
    fn end_listening(&mut self, id: SessionId) {
        self.forget_spared(id);
        let Some(session) = self.control.registry.session_mut(id) else {
            return;
        };
        let local = session.local;
        let Life::Listening(listener) = std::mem::replace(&mut session.life, Life::Bound) else {
            return;
        };
        self.handles.of(id).kernel_connections.clear();
        self.close_port(id, local);
        self.review_floods_of(id);
        for id in listener.unaccepted() {
            self.input(Input::Abort(id));
        }
        self.refuse_pending_connects(id);
    }

    /// The listener that a packet to `local` is for: the very address goes before any address;
    /// among equals (`SO_REUSEPORT`) the flow decides.
    pub fn listener_for(&self, flow: &FlowKey) -> Option<SessionId> {
        let ids = self.listening_ports.get(&flow.local.port())?;
        let fits = |id: &&SessionId, exact: bool| {
            self.control.registry.session(**id).is_some_and(|session| {
                if exact {
                    session.local.ip() == flow.local.ip()
                } else {
                    session.local.ip().is_unspecified()
                        && (session.local.is_ipv4() == flow.local.is_ipv4()
                            || session.local.is_ipv6() && !session.v6_only)
                }
            })
        };
        for exact in [true, false] {
            let group = ids.iter().filter(|id| fits(id, exact)).copied();
            let chosen = preferred(group, |id| self.hash((flow, id)));
            if chosen.is_some() {
                return chosen;
            }
        }
        None
    }

    /// A SYN for a listener.
    pub fn on_syn(
        &mut self,
        listener_id: SessionId,
        flow: FlowKey,
        (header, payload): (&TcpHeader, &[u8]),
        isn: SeqNum,
    ) {
        self.sysctls.refresh(self.now);
        let Some(listener) = self.control.registry.listener(listener_id) else {
            return;
        };
        match listener.on_syn(self.sysctls.values().cookies) {
            SynVerdict::Drop => {
                self.control.counters.syn_dropped += 1;
                self.note_unkept(listener_id, &flow);
            }
            SynVerdict::Cookie => self.send_cookie(listener_id, &flow, header),
            SynVerdict::Open => self.open_handshake(listener_id, flow, (header, payload), isn),
        }
    }

    fn open_handshake(
        &mut self,
        listener_id: SessionId,
        flow: FlowKey,
        (header, payload): (&TcpHeader, &[u8]),
        isn: SeqNum,
    ) {
        let Some(config) = self.passive_config(listener_id, &flow) else {
            return;
        };
        let options = self.handshake_options(listener_id);
        let retries = self.sysctls.values().syn_ack_retries;
        let mut connection = passive::open(&config, (&options, retries), header, isn, self.now);
        let is_early = self.accept_fast(listener_id, &flow, (header, payload), &mut connection);
        let Some(id) = self.enter_passive(listener_id, flow, connection) else {
            return;
        };
        if is_early {
            if let Some(listener) = self.control.registry.listener_mut(listener_id) {
                listener.fast.push(id);
            }
            self.handshake_done(id);
            return;
        }
        if let Some(listener) = self.control.registry.listener_mut(listener_id) {
            listener.handshake_started(id);
        }
    }

    /// Parameters of the connections of a listener; none without a way to the peer.
    pub fn passive_config(&self, listener_id: SessionId, flow: &FlowKey) -> Option<TcpConfig> {
        let path = self.path_of(flow.remote).ok()?;
        let options = self.handshake_options(listener_id);
        let base = self.base_config();
        let config = passive_config(&base, &options, (&path, flow), &self.secret);
        Some(TcpConfig {
            handle_room: self.handle_room(flow),
            ..config
        })
    }

    pub fn handshake_options(&self, listener_id: SessionId) -> HandshakeOptions {
        let listener = self.control.registry.listener(listener_id);
        listener.map_or_else(HandshakeOptions::default, |listener| listener.options)
    }

    /// Enters the session of a connection that a listener opens: on its port, and for its user.
    pub fn enter_for(
        &mut self,
        listener: SessionId,
        flow: &FlowKey,
        life: Life,
    ) -> Result<SessionId, Errno> {
        let parent = self
            .control
            .registry
            .session(listener)
            .ok_or(Errno::CONNREFUSED)?;
        let opening = Opening {
            life,
            remote: Some(flow.remote),
            reuse: parent.reuse,
            v6_only: parent.v6_only,
            listener: Some(listener),
            ..Opening::new(Protocol::Tcp, flow.local, parent.uid)
        };
        let claim = PortClaim {
            local: flow.local,
            ..self.claim_of(listener).ok_or(Errno::CONNREFUSED)?
        };
        let joined = self.control.ports.join(claim, flow.remote);
        let claim = joined.map_err(|error| error.errno())?;
        let opening = Opening {
            flow_claim: Some(claim),
            ..opening
        };
        let id = self
            .control
            .registry
            .open(None, opening, random_u64)
            .inspect_err(|_| self.control.ports.release(claim))?;
        let options = self.handshake_options(listener);
        self.choose_delivery(id, options.delivery);
        self.choose_priority(id, options.priority);
        Ok(id)
    }

    /// Enters a session that a listener opens, held here.
    pub fn enter_passive(
        &mut self,
        listener_id: SessionId,
        flow: FlowKey,
        connection: Connection,
    ) -> Option<SessionId> {
        let life = || Life::Handshake {
            deferred_until: None,
        };
        let id = self.enter_for(listener_id, &flow, life()).ok()?;
        let session = TcpSession {
            ip: self.handshake_options(listener_id).ip,
            ..TcpSession::new(id, flow, connection)
        };
        self.hold(session, life());
        Some(id)
    }

    /// A handshake is done, and nothing else has come. With `TCP_DEFER_ACCEPT` the application
    /// hears of it with the first bytes, or when the time is over.
    pub fn defer_or_offer(&mut self, id: SessionId) {
        let seconds = self
            .control
            .registry
            .session(id)
            .and_then(|session| session.listener)
            .and_then(|listener| self.handshake_options(listener).defer_accept_seconds);
        match seconds {
            Some(seconds) => {
                let until = self.now + Duration::from_secs(u64::from(seconds));
                self.set_life(
                    id,
                    Life::Handshake {
                        deferred_until: Some(until),
                    },
                );
                self.control.arm(id, Deadline::Defer, until);
            }
            None => self.handshake_done(id),
        }
    }

    /// Does it wait for bytes?
    pub fn is_deferred(&self, id: SessionId) -> bool {
        let session = self.control.registry.session(id);
        session.is_some_and(|session| {
            matches!(
                session.life,
                Life::Handshake {
                    deferred_until: Some(_)
                }
            )
        })
    }

    /// A handshake is done: the session waits to be accepted.
    pub fn handshake_done(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session_mut(id) else {
            return;
        };
        if let Life::Handshake { deferred_until } = &mut session.life
            && deferred_until.take().is_some()
        {
            self.control.disarm(id, Deadline::Defer);
        }
        let Some(listener_id) = self.listener_of(id) else {
            return;
        };
        let Some(listener) = self.control.registry.listener_mut(listener_id) else {
            return self.input(Input::Abort(id));
        };
        match listener.handshake_done(id) {
            Queueing::Queued => {
                self.review_floods_of(listener_id);
                self.set_life(id, Life::Offered);
                self.announce(listener_id);
            }
            Queueing::CrowdedOut => self.control.counters.accept_overflow += 1,
            Queueing::Waits => {}
        }
    }

    fn listener_of(&self, id: SessionId) -> Option<SessionId> {
        self.control.registry.session(id)?.listener
    }

    /// The accept queue may have room for those that it had none for.
    fn admit_crowded_out(&mut self, listener_id: SessionId) {
        let mut has_new = false;
        while let Some(listener) = self.control.registry.listener_mut(listener_id)
            && let Some(id) = listener.admit_crowded_out()
        {
            self.review_floods_of(listener_id);
            self.set_life(id, Life::Offered);
            has_new = true;
        }
        if has_new {
            self.announce(listener_id);
        }
    }

    /// A handshake came to nothing.
    pub fn handshake_failed(&mut self, id: SessionId) {
        let listener_id = self.listener_of(id);
        let listener = listener_id.and_then(|id| self.control.registry.listener_mut(id));
        if let Some(listener) = listener {
            listener.handshake_failed(id);
        }
        self.forget(id);
    }

    /// Offers what waits, as far as the descriptor's queue has room.
    pub fn announce(&mut self, listener_id: SessionId) {
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

    /// True if the queue is full.
    fn announce_sessions(&mut self, listener_id: SessionId) -> bool {
        while let Some(id) = self.next_ready(listener_id) {
            if !self.has_descriptors() {
                self.offer_later(listener_id);
                return false;
            }
            match self.offer(listener_id, id) {
                Ok(()) => self.control.counters.accepts += 1,
                Err(SendError::Blocked) => return true,
                // For want of descriptors or memory.
                Err(SendError::Failed(_)) => {
                    self.offer_later(listener_id);
                    return false;
                }
                Err(_) => self.input(Input::Abort(id)),
            }
            if let Some(listener) = self.control.registry.listener_mut(listener_id) {
                listener.note_offered();
            }
        }
        false
    }

    fn next_ready(&self, listener_id: SessionId) -> Option<SessionId> {
        self.control.registry.listener(listener_id)?.next_ready()
    }

    /// Sends one accepted session's descriptor to whoever accepts next.
    fn offer(&mut self, listener_id: SessionId, id: SessionId) -> Result<(), SendError> {
        let session = self.control.registry.session(id).ok_or(SendError::Closed)?;
        let remote = session.remote.ok_or(SendError::Closed)?;
        let listener = self
            .control
            .registry
            .listener(listener_id)
            .ok_or(SendError::Closed)?;
        let event = DescriptorEvent::Accepted {
            session: id,
            local: session.local,
            remote,
            caching: listener.caching(),
        };
        let (far, near) = unix::socket_pair(PairKind::Stream).map_err(SendError::Failed)?;
        let cookie = unix::cookie(&near).map_err(SendError::Failed)?;
        self.try_send_event(listener_id, &event, &[near.as_fd()])?;
        self.control.registry.replace_cookie(id, cookie);
        if self.watch_peer_end(id, far).is_err() {
            warn!(session = id.0, "cannot watch an accepted session");
        }
        Ok(())
    }

    /// `Accepted`: nobody has used the session yet, and whoever does first gets it.
    pub fn leave_accepted(&mut self, channel: ChannelId, id: SessionId) -> Answer {
        // A child may have asked for it already.
        if self
            .control
            .registry
            .admit(channel, Command::Accept, id)
            .is_ok()
        {
            self.control.counters.delayed += 1;
            self.note_acceptor(id, channel);
            self.input(Input::Park(id));
        }
        Answer::Silence
    }

    /// The session has left its listener's queue.
    pub fn note_acceptor(&mut self, id: SessionId, channel: ChannelId) {
        self.leave_queue(id);
        if let Some(session) = self.control.registry.session_mut(id) {
            session.acceptor = Some(channel);
        }
    }

    pub fn leave_queue(&mut self, id: SessionId) {
        let Some(listener_id) = self.control.registry.session(id).and_then(|s| s.listener) else {
            return;
        };
        if let Some(listener) = self.control.registry.listener_mut(listener_id) {
            listener.has_accepted(id);
            self.review_floods_of(listener_id);
            self.admit_crowded_out(listener_id);
            self.admit_pending_connects(listener_id);
        }
    }

    /// Learns from who uses an accepted session whom those to come are for: the process that
    /// accepted it, or a child of that. A child may be one that nobody knows.
    pub fn note_user(&mut self, id: SessionId, user: Option<ChannelId>) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        let is_acceptor = session.acceptor == user;
        let is_first = match session.migrations {
            0 => session.acceptor.is_some(),
            // It went to the acceptor with `accept`, and may have come back since.
            1 | 2 => !is_acceptor,
            _ => false,
        };
        let listener = session.listener.filter(|_| is_first);
        if let Some(listener) = listener.and_then(|id| self.control.registry.listener_mut(id)) {
            listener.is_for_children = !is_acceptor;
        }
    }

    /// Connections that only the kernel sees, such as those over loopback.
    pub fn on_kernel_connections(&mut self, id: SessionId) {
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

    /// True if the queue is full.
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

/// The one of `group` that has the highest hash: who joins takes flows evenly from all others, who
/// leaves gives up only its own.
fn preferred(
    group: impl Iterator<Item = SessionId>,
    hash: impl Fn(SessionId) -> u64,
) -> Option<SessionId> {
    group.max_by_key(|id| hash(*id))
}

/// A capsule or a list as it travels.
pub fn pack(bytes: Vec<u8>) -> Result<(Blob, Option<OwnedFd>), Errno> {
    portolan_sys::shm::pack(bytes).map_err(|_| Errno::NOBUFS)
}

#[cfg(test)]
mod tests {
    use std::collections::hash_map::RandomState;
    use std::hash::BuildHasher;

    use super::*;

    fn dealt(hasher: &RandomState, flows: u32, group: &[u64]) -> Vec<SessionId> {
        let group = || group.iter().copied().map(SessionId);
        let choose = |flow| preferred(group(), |id| hasher.hash_one((flow, id)));
        (0..flows)
            .map(|flow| choose(flow).expect("it has members"))
            .collect()
    }

    #[test]
    fn a_member_that_leaves_a_group_gives_up_only_its_own_flows() {
        let hasher = RandomState::new();
        let before = dealt(&hasher, 1000, &[1, 2, 3, 4]);
        let after = dealt(&hasher, 1000, &[1, 2, 4]);
        for (before, after) in before.iter().zip(&after) {
            assert!(before == after || *before == SessionId(3));
        }
        for member in [1, 2, 4].map(SessionId) {
            let share = after.iter().filter(|id| **id == member).count();
            assert!((230..440).contains(&share), "{share} of 1000");
        }
    }

    #[test]
    fn a_group_without_members_has_none_to_prefer() {
        assert_eq!(preferred(std::iter::empty(), |_| 0), None);
    }
}
