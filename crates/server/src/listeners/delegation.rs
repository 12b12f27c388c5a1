//! Delegated listeners (NE §3.2, ADR 15): a process performs the handshakes itself, the port's row points to it, and it
//! may send from the port. It registers the connections that it accepts, and returns those not accepted when the
//! delegation ends. The port, and everything else about the listener, stay with the server.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use portolan_control::{Command, Errno, Holder, Input, Life, SessionPhase};
use portolan_proto::control::{Blob, ReplyBody};
use portolan_proto::encode;
use portolan_stack::TcpSession;
use portolan_stack::passive::{Handshake, Rules};
use portolan_tcp::StateName;
use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, canonical, scope_of};
use tracing::debug;

use crate::random::random_u64;
use crate::requests::{Answer, Claimed, Listening};
use crate::server::Server;

impl Server {
    /// After `listen`: delegates the handshakes if that is requested, or configured for the port, and
    /// possible. Returns the rules for the process that performs them.
    pub(crate) fn choose_delegate(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        spec: &Listening,
    ) -> Option<Vec<u8>> {
        let slot = spec.slot?;
        if !self.is_delegation_wished(id, spec) {
            return None;
        }
        let secret = self.control.delegate(id, (channel, slot))?;
        self.end_floods_of(id);
        self.steer_listener(id);
        self.move_extensions_of(id);
        debug!(session = id.0, channel = channel.0, "handshakes delegated");
        Some(self.rules(secret))
    }

    /// Returns the rules for a process that performs handshakes.
    pub(crate) fn rules(&self, secret: [u8; 16]) -> Vec<u8> {
        let sysctls = self.sysctls.values();
        encode(&Rules {
            config: self.base_config(),
            cookies: sysctls.cookies,
            syn_ack_retries: sysctls.syn_ack_retries,
            secret,
        })
    }

    fn is_delegation_wished(&self, id: SessionId, spec: &Listening) -> bool {
        let policy = &self.config.delegation;
        let port = self.control.registry.session(id).map(|s| s.local.port());
        let by_policy = port.is_some_and(|port| policy.ports.contains(&port));
        policy.allow && spec.options.is_delegated.unwrap_or(by_policy)
    }

    /// `Register`: a connection that the process has opened or accepted gets a row of its own. Its frames came by the port's row until
    /// now, so that there are none of another holder, and no generation tells them apart.
    pub(crate) fn claim(
        &mut self,
        channel: ChannelId,
        port: SessionId,
        claimed: Claimed,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        self.control.admit_opener(channel, port)?;
        let flow = self.flow_of(port, claimed.local, claimed.remote)?;
        self.control.registry.has_room(channel)?;
        let descriptor = self.take_new_descriptor(fds)?;
        let is_accepted = !self.control.is_lease(port);
        let life = Life::Connected;
        let id = self.control.enter_for(port, &flow, life, random_u64)?;
        self.control.registry.replace_cookie(id, descriptor.cookie);
        self.control.registry.entitle(id, channel);
        if let Some(session) = self.control.registry.session_mut(id) {
            session.acceptor = is_accepted.then_some(channel);
        }
        if let Err(errno) = self.watch_peer_end(id, descriptor.far) {
            self.forget(id);
            return Err(errno);
        }
        let holder = Holder::Process(channel, claimed.slot);
        self.control
            .registry
            .adopt(id, holder, Generation::UNREGISTERED);
        self.renew_rows(id);
        self.note_migration(id);
        self.control.counters.claims += 1;
        Ok(ReplyBody::Bound {
            session: id,
            local: flow.local,
            generation: Generation::UNREGISTERED,
        }
        .into())
    }

    /// Returns the flow that a library names: on the listener's or the lease's own endpoint, and not in use.
    pub(crate) fn flow_of(
        &self,
        port: SessionId,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<FlowKey, Errno> {
        let session = self.control.registry.session(port).ok_or(Errno::BADF)?;
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local: canonical(local),
            remote: canonical(remote),
        };
        let is_on_it = match session.phase() {
            SessionPhase::Leased => flow.local == session.local,
            _ => self.listener_for(&flow) == Some(port),
        };
        let is_scope_right = scope_of(session.local) == 0 || session.local == flow.local;
        if !(is_on_it && is_scope_right && self.may_connect(&flow)) {
            return Err(Errno::INVAL);
        }
        if self.control.registry.by_flow(&flow).is_some() {
            Err(Errno::ADDRINUSE)
        } else {
            Ok(flow)
        }
    }

    /// Is the flow one from a served address of this host to another host?
    pub(crate) fn may_connect(&self, flow: &FlowKey) -> bool {
        self.routes.serves(flow.local.ip()) == Some(true)
            && flow.remote.port() != 0
            && flow.local.is_ipv4() == flow.remote.is_ipv4()
            && !is_nobody(flow.remote.ip())
            && self.routes.serves(flow.remote.ip()).is_none()
    }

    /// `ReturnPending`: a connection that the library opened and nobody has accepted.
    pub(crate) fn surrender(
        &mut self,
        channel: ChannelId,
        listener: SessionId,
        (capsule, fd): (Blob, Option<OwnedFd>),
    ) -> Result<Answer, Errno> {
        self.control
            .registry
            .admit(channel, Command::Serve, listener)?;
        if !self.control.is_delegate(listener, channel) {
            return Err(Errno::PERM);
        }
        let Some((flow, session)) = self.unpack_surrendered(listener, capsule, fd) else {
            self.control.counters.bad_capsules += 1;
            return Err(Errno::PROTO);
        };
        let state = session.connection.state();
        let handshake = Handshake::of(&session.connection);
        if self.has_crowd(listener, state) {
            self.control.counters.accept_overflow += 1;
            return Ok(Answer::Silence);
        }
        let Some(id) = self.enter_passive(listener, flow, session.connection) else {
            return Ok(Answer::Silence);
        };
        self.control.counters.surrenders += 1;
        if let Some(listener) = self.control.registry.listener_mut(listener) {
            listener.opens.queue.handshake_started(id);
        }
        match handshake {
            Handshake::Undone => {}
            Handshake::Done => self.input(Input::Handshake(id)),
            Handshake::Readable => self.input(Input::ReadableHandshake(id)),
        }
        Ok(Answer::Silence)
    }

    /// Returns whether the queue for a connection in that state is full. A full accept queue leaves
    /// handshakes where they are.
    fn has_crowd(&self, listener: SessionId, state: StateName) -> bool {
        let listener = self.control.registry.listener(listener);
        listener.is_none_or(|listener| match state {
            StateName::SynReceived => listener.opens.queue.is_crowded(),
            _ => !listener.opens.queue.has_room(),
        })
    }

    pub(crate) fn unpack_surrendered(
        &mut self,
        listener: SessionId,
        capsule: Blob,
        fd: Option<OwnedFd>,
    ) -> Option<(FlowKey, TcpSession)> {
        let bytes = portolan_sys::shm::unpack(capsule, fd).ok()?;
        self.control.counters.capsule_bytes += bytes.len() as u64;
        let session = TcpSession::from_capsule(&bytes).ok()?;
        let flow = self
            .flow_of(listener, session.flow.local, session.flow.remote)
            .ok()?;
        let has_ports = session.connection.local_port() == flow.local.port()
            && session.connection.remote_port() == flow.remote.port();
        (has_ports && flow == session.flow).then_some((flow, session))
    }

    /// `EndDelegation`: returns the handshakes to the server.
    pub(crate) fn end_delegation(
        &mut self,
        channel: ChannelId,
        listener: SessionId,
    ) -> Result<Answer, Errno> {
        self.control
            .registry
            .admit(channel, Command::Serve, listener)?;
        self.take_handshakes_from(channel, listener);
        Ok(ReplyBody::Done.into())
    }

    fn take_handshakes_from(&mut self, channel: ChannelId, id: SessionId) {
        let sole = self.control.delegate_of(id);
        if sole.is_some_and(|sole| sole.channel == channel) {
            self.take_handshakes(id);
        } else {
            self.leave_part(channel, id);
        }
    }

    /// The handshakes of a process that it performs no longer may complete by the cookies that it sent.
    pub(crate) fn keep_cookies_of(&mut self, id: SessionId, channel: ChannelId) {
        let claimed = self.claimed_cookies(id, channel);
        if let Some(listener) = self.control.registry.listener_mut(id) {
            listener.opens.cookies.add(claimed);
            self.note_cookies();
        }
    }

    /// Returns the listener's handshakes to the server.
    pub(crate) fn take_handshakes(&mut self, id: SessionId) {
        for channel in self.control.delegates_of(id) {
            if self.control.performs(id, channel) {
                self.leave_part(channel, id);
                continue;
            }
            self.probe_unregistered(channel, |_, port| port == id);
            self.keep_cookies_of(id, channel);
            if let Some(listener) = self.control.registry.listener_mut(id) {
                listener.delegate = None;
            }
            self.end_floods_of(id);
            self.steer_listener(id);
            self.move_extensions_of(id);
            debug!(session = id.0, "handshakes taken back");
        }
    }

    /// Ends the delegations of an exited process; its listeners may continue in others.
    pub(crate) fn end_delegations_of(&mut self, channel: ChannelId) {
        for id in self.control.delegated_to(channel) {
            self.take_handshakes_from(channel, id);
        }
    }
}

/// Returns whether the address belongs to no host.
fn is_nobody(address: IpAddr) -> bool {
    address.is_unspecified()
        || address.is_multicast()
        || address.is_loopback()
        || address == IpAddr::from([255, 255, 255, 255])
}
