//! Binding and active opens: whether the call is Portolan's, which address and port it gets, then the
//! handshake by the engine. After it the session moves to the process; see also `udp`.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use portolan_control::opens::check_local;
use portolan_control::sharing::{UdpEndpoint, any_of};
use portolan_control::{
    ClaimId, Command, Effects, Errno, Fallback, Holder, Input, Life, Opening, PortClaim, Way,
};
use portolan_proto::control::{DescriptorEvent, KernelReason, ReplyBody, Reuse, SessionRef};
use portolan_stack::passive::{tune_config, tune_connection};
use portolan_stack::{Path, TcpSession};
use portolan_tcp::Connection;
use portolan_tcp::isn::initial_sequence;
use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, Slot, canonical};
use tracing::debug;

use crate::connections::rejoin::Rejoining;
use crate::connections::rights::PortRight;
use crate::random::{random_u32, random_u64};
use crate::requests::{Answer, BindRequest, NewDescriptor, Target};
use crate::reservation::{PortReservation, Taking};
use crate::server::Server;

/// Attempts to find an ephemeral port that the kernel does not use.
const PORT_ATTEMPTS: usize = 16;

impl Server {
    /// `bind`: takes the port here and in the kernel.
    pub(crate) fn bind(
        &mut self,
        channel: ChannelId,
        session: SessionRef,
        request: BindRequest,
        slot: Slot,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        if let SessionRef::Again(id) = session
            && let Some(rejoined) = self.rejoin(channel, id)?
        {
            return Ok(rejoined);
        }
        if let SessionRef::Known(id) = session {
            self.control.registry.admit(channel, Command::Bind, id)?;
        }
        if session == SessionRef::New && self.is_subject_to_policy(channel) {
            return self.fallback(None, KernelReason::Policy.into());
        }
        self.check_port(channel, self.claim_of(channel, request)?)?;
        let number = match session {
            SessionRef::Known(id) => return self.bind_again(channel, id, request),
            SessionRef::Again(id) => Some(id),
            SessionRef::New => None,
        };
        let near = match (number, request.protocol, fds.get(1)) {
            (Some(_), Protocol::Tcp, Some(near)) => {
                Some(near.try_clone().map_err(|_| Errno::NOBUFS)?)
            }
            _ => None,
        };
        let descriptor = self.take_new_descriptor(fds)?;
        self.control.registry.has_room(channel)?;
        // The socket that holds a UDP port may become the program's own.
        let is_v6 = request.protocol == Protocol::Udp && request.local.is_ipv6();
        let request = BindRequest {
            local: canonical(request.local),
            ..request
        };
        match self.bind_new(channel, (request, is_v6), slot, (descriptor, number)) {
            Ok((id, answer)) => {
                self.control.counters.reopened += u64::from(number.is_some());
                if let Some(near) = near {
                    self.handles.of(id).rejoining = Some(Rejoining::new(near, channel));
                }
                Ok(answer)
            }
            Err(fallback) => self.fallback(None, fallback),
        }
    }

    /// Binds a session that lost its port when its connection failed or its listener stopped.
    fn bind_again(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        request: BindRequest,
    ) -> Result<Answer, Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        if session.claim.is_some() || session.protocol != request.protocol {
            return Err(Errno::INVAL);
        }
        let request = BindRequest {
            local: canonical(request.local),
            ..request
        };
        let taken = check_local(&self.routes, request.protocol, request.local)
            .and_then(|()| Ok(self.take_endpoint(channel, request, (false, Taking::First))?));
        let (claim, local, reservation) = match taken {
            Ok(taken) => taken,
            Err(fallback) => return self.fallback(Some(id), fallback),
        };
        if let Some(session) = self.control.registry.session_mut(id) {
            session.claim = Some(claim);
            session.has_chosen_port = request.local.port() != 0;
            session.local = local;
            session.reuse = request.reuse;
            session.v6_only = request.v6_only;
        }
        self.keep_reservation(id, reservation);
        Ok(ReplyBody::Bound {
            session: id,
            local,
            generation: Default::default(),
        }
        .into())
    }

    fn take_endpoint(
        &mut self,
        channel: ChannelId,
        request: BindRequest,
        (is_v6, taking): (bool, Taking),
    ) -> Result<(ClaimId, SocketAddr, PortReservation), Errno> {
        let claim = self.claim_of(channel, request)?;
        self.reserve_as(taking, claim, is_v6)
    }

    fn claim_of(&self, channel: ChannelId, request: BindRequest) -> Result<PortClaim, Errno> {
        let process = self.control.registry.process(channel).ok_or(Errno::PERM)?;
        Ok(PortClaim {
            protocol: request.protocol,
            local: request.local,
            reuse: request.reuse,
            v6_only: request.v6_only,
            uid: process.uid,
        })
    }

    /// Checks whether the process may bind the port, by the kernel's rules for this namespace. A right that it has shown
    /// is valid for this bind only. One of the other protocol counts where the user has the port already: the server's own
    /// socket then keeps the process from showing a better one.
    pub(crate) fn check_port(
        &mut self,
        channel: ChannelId,
        wanted: PortClaim,
    ) -> Result<(), Errno> {
        let client = self.client_of(channel);
        let client = client.and_then(|id| self.clients.get_mut(&id));
        let right = client.map(|client| std::mem::replace(&mut client.right, PortRight::Nothing));
        self.sysctls.refresh(self.now);
        let first = self.sysctls.values().first_unprivileged_port;
        let port = wanted.local.port();
        if port == 0 || u32::from(port) >= first {
            return Ok(());
        }
        let Some(PortRight::To(shown)) = right else {
            return Err(Errno::ACCES);
        };
        let shown = PortClaim {
            protocol: shown.protocol,
            local: shown.local,
            v6_only: shown.v6_only,
            ..wanted
        };
        let of_its_protocol = PortClaim {
            protocol: shown.protocol,
            ..wanted
        };
        let is_shown = shown.covers(&wanted)
            || shown.covers(&of_its_protocol) && self.control.ports.has(&wanted);
        is_shown.then_some(()).ok_or(Errno::ACCES)
    }

    fn bind_new(
        &mut self,
        channel: ChannelId,
        (request, is_v6): (BindRequest, bool),
        slot: Slot,
        (descriptor, number): (NewDescriptor, Option<SessionId>),
    ) -> Result<(SessionId, Answer), Fallback> {
        check_local(&self.routes, request.protocol, request.local)?;
        let uid = self
            .control
            .registry
            .process(channel)
            .ok_or(Errno::PERM)?
            .uid;
        let taking = match number {
            Some(_) => Taking::Again,
            None => Taking::First,
        };
        let (claim_id, local, reservation) =
            self.take_endpoint(channel, request, (is_v6, taking))?;
        let opening = Opening {
            reuse: request.reuse,
            v6_only: request.v6_only,
            cookie: descriptor.cookie,
            claim: Some(claim_id),
            ..Opening::new(request.protocol, local, uid)
        };
        let id = self.enter_as(channel, opening, (Some(descriptor.far), number))?;
        if let Some(session) = self.control.registry.session_mut(id) {
            session.has_chosen_port = request.local.port() != 0;
        }
        match request.protocol {
            Protocol::Udp => self.watch_port(id, reservation),
            Protocol::Tcp => self.keep_reservation(id, reservation),
        }
        let generation = match request.protocol {
            Protocol::Udp => self.steer(id, Holder::Process(channel, slot)),
            Protocol::Tcp => Default::default(),
        };
        let bound = ReplyBody::Bound {
            session: id,
            local,
            generation,
        };
        Ok((id, bound.into()))
    }

    /// Takes a port in the table and binds a kernel socket to it.
    pub(crate) fn reserve(
        &mut self,
        claim: PortClaim,
        is_v6: bool,
    ) -> Result<(ClaimId, SocketAddr, PortReservation), Errno> {
        self.reserve_as(Taking::First, claim, is_v6)
    }

    fn reserve_as(
        &mut self,
        taking: Taking,
        claim: PortClaim,
        is_v6: bool,
    ) -> Result<(ClaimId, SocketAddr, PortReservation), Errno> {
        let mut last = Errno::ADDRINUSE;
        for _ in 0..PORT_ATTEMPTS {
            let (id, local) = self.claim_port(claim)?;
            match taking.take(&PortClaim { local, ..claim }, is_v6) {
                Ok(reservation) => return Ok((id, local, reservation)),
                Err(errno) => {
                    self.control.ports.release(id);
                    last = errno;
                }
            }
            if claim.local.port() != 0 {
                break;
            }
        }
        Err(last)
    }

    /// Claims a port. One in use may be free by now, if the hang-up of its descriptor was not handled yet.
    fn claim_port(&mut self, claim: PortClaim) -> Result<(ClaimId, SocketAddr), Errno> {
        let bound = self.control.ports.bind(claim, random_u32()).or_else(|_| {
            self.poll_hangups();
            self.control.ports.bind(claim, random_u32())
        });
        bound.map_err(|error| error.errno())
    }

    /// Enters a session of a process, with its descriptor.
    pub(crate) fn enter(
        &mut self,
        channel: ChannelId,
        opening: Opening,
        far: Option<OwnedFd>,
    ) -> Result<SessionId, Errno> {
        self.enter_as(channel, opening, (far, None))
    }

    /// Likewise, under the session's former number, which no other session has.
    fn enter_as(
        &mut self,
        channel: ChannelId,
        opening: Opening,
        (far, number): (Option<OwnedFd>, Option<SessionId>),
    ) -> Result<SessionId, Errno> {
        let mut number = number.map(|id| id.0);
        let numbers = || number.take().unwrap_or_else(random_u64);
        let id = self.control.enter(Some(channel), opening, numbers)?;
        let kept = self.charge_udp_rows(id).and_then(|()| match far {
            Some(far) => self.watch_peer_end(id, far),
            None => Ok(()),
        });
        match kept {
            Ok(()) => Ok(id),
            Err(errno) => {
                self.forget(id);
                Err(errno)
            }
        }
    }

    /// Without rows a socket would be bound but receive nothing.
    fn charge_udp_rows(&mut self, id: SessionId) -> Result<(), Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        if session.protocol != Protocol::Udp {
            return Ok(());
        }
        let rows = UdpEndpoint::from(session).bindings().len();
        self.control.registry.charge_bindings(id, rows)?;
        self.charge_deals(id)
    }

    /// `connect`: opens a connection, or sets a peer.
    pub(crate) fn connect(
        &mut self,
        channel: ChannelId,
        session: SessionRef,
        target: Target,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let target = Target {
            remote: canonical(target.remote),
            ..target
        };
        let known = match session {
            SessionRef::Known(id) => {
                let session = self.control.registry.admit(channel, Command::Connect, id)?;
                if session.protocol != target.protocol {
                    return Err(Errno::INVAL);
                }
                Some(id)
            }
            SessionRef::New => {
                self.control.registry.has_room(channel)?;
                None
            }
            SessionRef::Again(_) => return Err(Errno::INVAL),
        };
        let descriptor = match known {
            Some(_) => None,
            None => Some(self.take_new_descriptor(fds)?),
        };
        if self.is_subject_to_policy(channel) {
            return self.fallback(known, KernelReason::Policy.into());
        }
        let to = (target.protocol, target.remote);
        let hash = |flow: &FlowKey, id| self.hash((flow, id));
        let way = self.control.way_to(&self.routes, to, known, hash);
        let opened = way.and_then(|way| match (way, target.protocol) {
            (Way::WithinHost(local_peer), _) => {
                self.connect_local(channel, known, (target, local_peer), descriptor)
            }
            (Way::Network(path), Protocol::Tcp) => {
                self.connect_tcp(channel, known, target, path, descriptor)
            }
            (Way::Network(path), Protocol::Udp) => {
                self.connect_udp(channel, known, target, path, descriptor)
            }
        });
        match opened {
            Ok(answer) => Ok(answer),
            Err(fallback) => self.fallback(known, fallback),
        }
    }

    fn connect_tcp(
        &mut self,
        channel: ChannelId,
        known: Option<SessionId>,
        target: Target,
        path: Path,
        descriptor: Option<NewDescriptor>,
    ) -> Result<Answer, Fallback> {
        let peer = target.remote.ip();
        if self.defers_open(&target.early, |server| server.has_cookie(peer))? {
            return Ok(ReplyBody::Deferred.into());
        }
        let id = match known {
            Some(id) => id,
            None => self.enter_unbound(channel, &target, descriptor)?,
        };
        let chosen = self.choose_source(id, target.remote, &path).or_else(|_| {
            // A connection that was closed in this turn may have the flow.
            self.settle();
            self.choose_source(id, target.remote, &path)
        });
        let local = match chosen {
            Ok(local) => local,
            Err(errno) => {
                if known.is_none() {
                    self.forget(id);
                }
                return Err(errno.into());
            }
        };
        let flow = FlowKey {
            protocol: Protocol::Tcp,
            local,
            remote: target.remote,
        };
        let uid = self.control.registry.session(id).map_or(0, |it| it.uid);
        let mut config = self.tcp_config(&path, &flow, &self.secret_of_timestamps());
        tune_config(&mut config, &target.options);
        let isn = initial_sequence(&self.secret_of_opens(uid), &flow, self.now);
        let mut connection =
            Connection::connect(&config, local.port(), target.remote.port(), isn, self.now);
        let retries = self.sysctls.values().syn_retries;
        tune_connection(&mut connection, &target.options, retries);
        if let Some(session) = self.control.registry.session_mut(id) {
            session.choose(&target.options);
        }
        let early = self.open_fast(&mut connection, target.remote.ip(), &target.early);
        self.control.counters.opens += 1;
        let session = TcpSession {
            ip: target.options.ip,
            ..TcpSession::new(id, flow, connection)
        };
        let slot = target.slot;
        self.hold(session, Life::Connecting { channel, slot });
        debug!(session = id.0, %flow, "connecting");
        Ok(ReplyBody::Connecting {
            session: id,
            local,
            early,
        }
        .into())
    }

    /// Enters a session that `connect` opens without `bind`, so without a port yet.
    pub(crate) fn enter_unbound(
        &mut self,
        channel: ChannelId,
        target: &Target,
        descriptor: Option<NewDescriptor>,
    ) -> Result<SessionId, Errno> {
        let descriptor = descriptor.ok_or(Errno::INVAL)?;
        let process = self.control.registry.process(channel).ok_or(Errno::PERM)?;
        let local = SocketAddr::new(any_of(target.remote.ip()), 0);
        let opening = Opening {
            // An ephemeral port is never shared by SO_REUSEPORT.
            reuse: Reuse {
                address: target.options.reuse_address && target.protocol == Protocol::Tcp,
                port: false,
            },
            cookie: descriptor.cookie,
            ..Opening::new(target.protocol, local, process.uid)
        };
        self.enter(channel, opening, Some(descriptor.far))
    }

    /// Chooses source address and port of an open, and enters it in the port table.
    pub(crate) fn choose_source(
        &mut self,
        id: SessionId,
        remote: SocketAddr,
        path: &Path,
    ) -> Result<SocketAddr, Errno> {
        let mut effects = Effects::new();
        let (to, at) = ((remote, path), (random_u32(), self.now));
        let chosen = self.control.choose_source(id, to, at, &mut effects);
        self.carry_out(effects);
        chosen
    }

    /// Puts a TCP session into the server's own stack and steers its row here.
    pub(crate) fn hold(&mut self, session: TcpSession, life: Life) {
        let (id, flow) = (session.id, session.flow);
        if let Some(entry) = self.control.registry.session_mut(id) {
            entry.remote = Some(flow.remote);
            entry.local = flow.local;
            entry.life = life;
        }
        self.hold_session(id, session);
    }

    /// Like [`Server::hold`], for a complete session.
    pub(crate) fn hold_session(&mut self, id: SessionId, session: TcpSession) {
        let slot = self.stack.reserve();
        let generation = self.steer(id, Holder::Server(slot));
        self.hold_at(id, (slot, generation), session);
    }

    /// Puts a session at the slot that its row points to.
    pub(crate) fn hold_at(
        &mut self,
        id: SessionId,
        (slot, generation): (Slot, Generation),
        mut session: TcpSession,
    ) {
        session.connection.revoke();
        session.generation = generation;
        self.stack.insert_at(
            self.now,
            slot,
            portolan_stack::Session::Tcp(Box::new(session)),
        );
        self.handles.take_paced(id);
        self.rx_throttle_held(id);
    }

    /// The handshake of an active open is done: the session moves to its process.
    pub(crate) fn established(&mut self, id: SessionId) {
        let life = self
            .control
            .registry
            .session(id)
            .map(|session| &session.life);
        let Some(&Life::Connecting { channel, slot }) = life else {
            return;
        };
        let Some((mut session, generation)) = self.hand_over(id, (channel, slot)) else {
            return;
        };
        if let Some(cookie) = session.connection.take_cookie() {
            self.keep_cookie(session.flow.remote.ip(), cookie);
        }
        let capsule = session.to_capsule();
        self.control.counters.capsule_bytes += capsule.len() as u64;
        let event = DescriptorEvent::Established {
            capsule: portolan_proto::control::Blob::Inline(capsule),
            generation,
        };
        if !self.send_event(id, &event, &[]) {
            self.input(Input::Orphaned(id));
        }
    }

    /// An active open failed: the process may retry with the same descriptor.
    pub(crate) fn open_failed(&mut self, id: SessionId, errno: Errno) {
        self.control.counters.open_failures += 1;
        debug!(session = id.0, errno = errno.0, "connecting failed");
        self.send_event(id, &DescriptorEvent::Failed { errno: errno.0 }, &[]);
        self.input(Input::OpenFailed(id));
    }

    /// Whether any process may bind the session's port.
    fn may_bind_itself(&mut self, id: SessionId) -> bool {
        self.sysctls.refresh(self.now);
        let first = self.sysctls.values().first_unprivileged_port;
        let session = self.control.registry.session(id);
        session.is_some_and(|session| u32::from(session.local.port()) >= first)
    }

    /// Answers a call that falls back to the kernel. A bound session gives its port to the kernel's socket.
    fn fallback(&mut self, known: Option<SessionId>, fallback: Fallback) -> Result<Answer, Errno> {
        let reason = match fallback {
            Fallback::Error(errno) => return Err(errno),
            Fallback::Kernel(reason) => reason,
        };
        let use_kernel = ReplyBody::UseKernel { reason };
        let Some(id) = self.control.fall_back(reason, known) else {
            return Ok(use_kernel.into());
        };
        if reason == KernelReason::Policy && self.may_bind_itself(id) {
            // Rules may match the user and the control group of a socket, which are those of its creator.
            self.forget(id);
            return Ok(use_kernel.into());
        }
        let given_up = self.give_up_port(id, use_kernel);
        self.forget(id);
        given_up
    }
}
