//! Binding and active opens: is the call ours, which address and port, then the handshake by the
//! engine. When it is done the session goes to the process; see also `udp`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use portolan_control::ports::ClaimError;
use portolan_control::{
    ClaimId, Command, Errno, Holder, Input, Life, Opening, PortClaim, SessionEntry,
};
use portolan_proto::control::{
    DescriptorEvent, FastOpenMode, HandshakeOptions, KernelReason, ReplyBody, Reuse, SessionRef,
};
use portolan_proto::metastate::RouteKind;
use portolan_stack::passive::{tune_config, tune_connection};
use portolan_stack::{Path, TcpSession};
use portolan_sys::port_right;
use portolan_tcp::Connection;
use portolan_types::{
    ChannelId, FlowKey, Generation, Protocol, SessionId, Slot, canonical, is_scoped, scope_of,
    scoped,
};
use tracing::debug;

use crate::control_socket::clients::Answer;
use crate::migration::sessions::NewDescriptor;
use crate::reservation::PortReservation;
use crate::server::{Server, random_u32, random_u64};
use crate::udp::sharing::binding_rows;

/// Ephemeral ports that are tried when the kernel turns out to have one in use.
const PORT_ATTEMPTS: usize = 16;

/// A local endpoint somebody wants.
#[derive(Clone, Copy, Debug)]
pub struct BindRequest {
    pub protocol: Protocol,
    pub local: SocketAddr,
    pub reuse: Reuse,
    pub v6_only: bool,
}

/// A peer somebody wants to talk to.
#[derive(Clone, Debug)]
pub struct Target {
    pub protocol: Protocol,
    pub remote: SocketAddr,
    pub slot: Slot,
    pub options: HandshakeOptions,
    pub early: FastOpenMode,
}

/// Why a call does not lead to a session of Portolan's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    Kernel(KernelReason),
    Error(Errno),
}

impl From<Errno> for Fallback {
    fn from(errno: Errno) -> Fallback {
        Fallback::Error(errno)
    }
}

impl From<KernelReason> for Fallback {
    fn from(reason: KernelReason) -> Fallback {
        Fallback::Kernel(reason)
    }
}

impl Server {
    /// `bind`: takes the port here and in the kernel.
    pub fn bind(
        &mut self,
        channel: ChannelId,
        session: SessionRef,
        request: BindRequest,
        slot: Slot,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<Answer, Errno> {
        let known = match session {
            SessionRef::Known(id) => {
                self.control.registry.admit(channel, Command::Bind, id)?;
                Some(id)
            }
            SessionRef::New => None,
        };
        self.check_port(channel, request.local.port())?;
        if let Some(id) = known {
            return self.bind_again(channel, id, request);
        }
        let descriptor = self.take_new_descriptor(fds)?;
        self.control.registry.has_room(channel)?;
        // What holds a UDP port may become the program's own socket.
        let is_v6 = request.protocol == Protocol::Udp && request.local.is_ipv6();
        let request = BindRequest {
            local: canonical(request.local),
            ..request
        };
        match self.bind_new(channel, (request, is_v6), slot, descriptor) {
            Ok(answer) => Ok(answer),
            Err(fallback) => self.fallback(None, fallback),
        }
    }

    /// A session whose port went with a connection that failed, or with its listener.
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
        let taken = self
            .check_local(request.protocol, request.local)
            .and_then(|()| Ok(self.take_endpoint(channel, request, false)?));
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
        is_v6: bool,
    ) -> Result<(ClaimId, SocketAddr, PortReservation), Errno> {
        let process = self.control.registry.process(channel).ok_or(Errno::PERM)?;
        let claim = PortClaim {
            protocol: request.protocol,
            local: request.local,
            reuse: request.reuse,
            v6_only: request.v6_only,
            uid: process.uid,
        };
        self.reserve(claim, is_v6)
    }

    /// May the process bind the port, as the kernel has it for this namespace? What it has shown for it is closed then, so
    /// that the port is free.
    pub fn check_port(&mut self, channel: ChannelId, port: u16) -> Result<(), Errno> {
        let client = self.client_of(channel);
        let client = client.and_then(|id| self.clients.get_mut(&id));
        let right = client.and_then(|client| Some((client.right.take()?, client.credentials.uid)));
        self.sysctls.refresh(self.now);
        let first = self.sysctls.values().first_unprivileged_port;
        let is_privileged = port != 0 && u32::from(port) < first;
        let is_shown = right
            .as_ref()
            .is_some_and(|(right, _)| port_right::is_shown(right, port));
        match right {
            Some((right, uid)) if !is_shown => self.sink.close_of(uid, right),
            // A datagram socket or a listener, whose close does not wait.
            right => drop(right),
        }
        match is_privileged && !is_shown {
            true => Err(Errno::ACCES),
            false => Ok(()),
        }
    }

    fn bind_new(
        &mut self,
        channel: ChannelId,
        (request, is_v6): (BindRequest, bool),
        slot: Slot,
        descriptor: NewDescriptor,
    ) -> Result<Answer, Fallback> {
        self.check_local(request.protocol, request.local)?;
        let uid = self
            .control
            .registry
            .process(channel)
            .ok_or(Errno::PERM)?
            .uid;
        let (claim_id, local, reservation) = self.take_endpoint(channel, request, is_v6)?;
        let opening = Opening {
            reuse: request.reuse,
            v6_only: request.v6_only,
            cookie: descriptor.cookie,
            claim: Some(claim_id),
            ..Opening::new(request.protocol, local, uid)
        };
        let id = self.enter(channel, opening, Some(descriptor.far))?;
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
        Ok(ReplyBody::Bound {
            session: id,
            local,
            generation,
        }
        .into())
    }

    /// Takes a port in the table and binds a kernel socket to it.
    pub fn reserve(
        &mut self,
        claim: PortClaim,
        is_v6: bool,
    ) -> Result<(ClaimId, SocketAddr, PortReservation), Errno> {
        let mut last = Errno::ADDRINUSE;
        for _ in 0..PORT_ATTEMPTS {
            let (id, local) = self.claim_port(claim)?;
            match PortReservation::take(&PortClaim { local, ..claim }, is_v6) {
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

    /// A port that is in use may be free by now: its descriptor's end is not seen yet.
    fn claim_port(&mut self, claim: PortClaim) -> Result<(ClaimId, SocketAddr), Errno> {
        let bound = self.control.ports.bind(claim, random_u32()).or_else(|_| {
            self.poll_hangups();
            self.control.ports.bind(claim, random_u32())
        });
        bound.map_err(|error| error.errno())
    }

    /// Enters a session of a process; undoes the claim if there is no room.
    pub fn enter(
        &mut self,
        channel: ChannelId,
        opening: Opening,
        far: Option<OwnedFd>,
    ) -> Result<SessionId, Errno> {
        // One near end, one session: a second would take the first one's name.
        let is_taken =
            opening.cookie != 0 && self.control.registry.by_cookie(opening.cookie).is_some();
        let claims = opening.claims();
        let opened = match is_taken {
            true => Err(Errno::INVAL),
            false => self
                .control
                .registry
                .open(Some(channel), opening, random_u64),
        };
        let id =
            opened.inspect_err(|_| claims.for_each(|claim| self.control.ports.release(claim)))?;
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

    /// Without rows a socket would be bound and get nothing.
    fn charge_udp_rows(&mut self, id: SessionId) -> Result<(), Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        if session.protocol != Protocol::Udp {
            return Ok(());
        }
        let rows = binding_rows(session);
        self.control.registry.charge_bindings(id, rows)?;
        self.charge_deals(id)
    }

    /// `connect`.
    pub fn connect(
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
        };
        let descriptor = match known {
            Some(_) => None,
            None => Some(self.take_new_descriptor(fds)?),
        };
        let opened = match self.local_peer(&target, known) {
            Some(local_peer) => {
                self.connect_local(channel, known, (target, local_peer), descriptor)
            }
            None => self
                .path_to(target.remote, known)
                .and_then(|path| match target.protocol {
                    Protocol::Tcp => self.connect_tcp(channel, known, target, path, descriptor),
                    Protocol::Udp => self.connect_udp(channel, known, target, path, descriptor),
                }),
        };
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
        let local = match self.local_for(id, target.remote, &path) {
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
        let mut config = self.tcp_config(&path, &flow);
        tune_config(&mut config, &target.options);
        let isn = self.isn(&flow);
        let mut connection =
            Connection::connect(&config, local.port(), target.remote.port(), isn, self.now);
        let retries = self.sysctls.values().syn_retries;
        tune_connection(&mut connection, &target.options, retries);
        self.choose_delivery(id, target.options.delivery);
        self.choose_priority(id, target.options.priority);
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

    /// A session that `connect` opens without `bind`: no port yet.
    pub fn enter_unbound(
        &mut self,
        channel: ChannelId,
        target: &Target,
        descriptor: Option<NewDescriptor>,
    ) -> Result<SessionId, Errno> {
        let descriptor = descriptor.ok_or(Errno::INVAL)?;
        let process = self.control.registry.process(channel).ok_or(Errno::PERM)?;
        let local = SocketAddr::new(any_of(target.remote.ip()), 0);
        let opening = Opening {
            // A port of its own is never shared by SO_REUSEPORT.
            reuse: Reuse {
                address: target.options.reuse_address && target.protocol == Protocol::Tcp,
                port: false,
            },
            cookie: descriptor.cookie,
            ..Opening::new(target.protocol, local, process.uid)
        };
        self.enter(channel, opening, Some(descriptor.far))
    }

    /// Chooses source address and port for a TCP session that wants to reach `remote`, and enters
    /// the connection in the port table.
    pub fn local_for(
        &mut self,
        id: SessionId,
        remote: SocketAddr,
        path: &Path,
    ) -> Result<SocketAddr, Errno> {
        let session = self.control.registry.session(id).ok_or(Errno::BADF)?;
        let mut claim = self.ports_claim(session);
        if claim.local.ip().is_unspecified() {
            let source = path.source.ok_or(Errno::ADDRNOTAVAIL)?;
            claim.local = scoped(source, claim.local.port(), path.interface);
        }
        if claim.local.is_ipv4() != remote.is_ipv4() {
            return Err(Errno::AFNOSUPPORT);
        }
        let mut joined = self.join_port(claim, remote);
        if joined.is_err() && self.reuse_time_wait(claim.local.ip(), remote) {
            joined = self.join_port(claim, remote);
        }
        let (claim_id, local) = joined.map_err(|error| error.errno())?;
        if let Some(session) = self.control.registry.session_mut(id) {
            session.flow_claim = Some(claim_id);
        }
        Ok(local)
    }

    fn join_port(
        &mut self,
        claim: PortClaim,
        remote: SocketAddr,
    ) -> Result<(ClaimId, SocketAddr), ClaimError> {
        if claim.local.port() == 0 {
            return self.control.ports.connect(claim, remote, random_u32());
        }
        let id = self.control.ports.join(claim, remote)?;
        Ok((id, claim.local))
    }

    fn ports_claim(&self, session: &SessionEntry) -> PortClaim {
        PortClaim {
            protocol: session.protocol,
            local: session.local,
            reuse: session.reuse,
            v6_only: session.v6_only,
            uid: session.uid,
        }
    }

    /// Puts a TCP session into the server's own stack and aims its row here.
    pub fn hold(&mut self, session: TcpSession, life: Life) {
        let (id, flow) = (session.id, session.flow);
        if let Some(entry) = self.control.registry.session_mut(id) {
            entry.remote = Some(flow.remote);
            entry.local = flow.local;
            entry.life = life;
        }
        self.hold_session(id, session);
    }

    /// As [`Server::hold`], for a session that comes whole.
    pub fn hold_session(&mut self, id: SessionId, session: TcpSession) {
        let slot = self.stack.reserve();
        let generation = self.steer(id, Holder::Server(slot));
        self.hold_at(id, (slot, generation), session);
    }

    /// Puts a session at the slot that its row points to.
    pub fn hold_at(
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
        self.forget_rx_throttle(id);
        self.rx_throttle_held(id);
    }

    /// The handshake of an active open is done: the session goes to its process.
    pub fn established(&mut self, id: SessionId) {
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

    /// An active open failed: the process may try again with the same descriptor.
    pub fn open_failed(&mut self, id: SessionId, errno: Errno) {
        self.control.counters.open_failures += 1;
        debug!(session = id.0, errno = errno.0, "connecting failed");
        self.send_event(id, &DescriptorEvent::Failed { errno: errno.0 }, &[]);
        self.back_to_bound(id);
    }

    /// Takes a failed open back to where `connect` found it.
    pub fn back_to_bound(&mut self, id: SessionId) {
        if let Some(slot) = self.server_slot(id) {
            self.stack.remove(slot);
            // The slot must not be freed twice.
            self.control.registry.unsteer(id);
        }
        self.unsteer(id);
        self.forget_local(id);
        let bound = self.claim_of(id);
        let Some(session) = self.control.registry.session_mut(id) else {
            return;
        };
        let family = any_of(session.local.ip());
        session.local = bound.map_or(SocketAddr::new(family, 0), |claim| claim.local);
        session.remote = None;
        session.life = Life::Bound;
        if let Some(claim) = session.flow_claim.take() {
            self.control.ports.release(claim);
        }
        self.give_up_unchosen_port(id);
    }

    /// As Linux: a socket that is closed for its peers keeps its address, and its port only if the program chose it
    /// (`SOCK_BINDPORT_LOCK`).
    pub fn give_up_unchosen_port(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session_mut(id) else {
            return;
        };
        if session.has_chosen_port {
            return;
        }
        session.local.set_port(0);
        if let Some(claim) = session.claim.take() {
            self.control.ports.release(claim);
            self.drop_reservation(id);
        }
    }

    /// Is `remote` reached through a managed device? `known` may be bound to a device's address.
    fn path_to(&self, remote: SocketAddr, known: Option<SessionId>) -> Result<Path, Fallback> {
        let scope = scope_of(remote);
        let remote = remote.ip();
        // As Linux: a link-local peer is on no link that anybody knows.
        if is_scoped(remote) && scope == 0 {
            return Err(Errno::INVAL.into());
        }
        if remote.is_unspecified() || self.routes.is_local(remote) {
            return Err(KernelReason::LocalAddress.into());
        }
        if remote.is_multicast() || remote == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return Err(KernelReason::NotUnicast.into());
        }
        let path = self
            .routes
            .path_in(remote, scope)
            .map_err(|_| Fallback::Kernel(KernelReason::NoRoute))?;
        match path.kind {
            RouteKind::Unicast if path.managed => {}
            RouteKind::Unicast => return Err(KernelReason::UnmanagedDevice.into()),
            RouteKind::Local => return Err(KernelReason::LocalAddress.into()),
            RouteKind::Broadcast | RouteKind::Multicast => {
                return Err(KernelReason::NotUnicast.into());
            }
            RouteKind::Refuse => return Err(KernelReason::NoRoute.into()),
        }
        let family = known
            .and_then(|id| self.control.registry.session(id))
            .map(|session| session.local.ip());
        match family {
            // The kernel knows what to say of that.
            Some(local) if local.is_loopback() => Err(KernelReason::LocalAddress.into()),
            Some(local) if !local.is_unspecified() && local.is_ipv4() != remote.is_ipv4() => {
                Err(Errno::AFNOSUPPORT.into())
            }
            _ => Ok(path),
        }
    }

    /// May a session of Portolan's have this local address?
    fn check_local(&self, protocol: Protocol, local: SocketAddr) -> Result<(), Fallback> {
        let address = local.ip();
        if is_scoped(address) && scope_of(local) == 0 {
            return Err(Errno::INVAL.into());
        }
        if address.is_unspecified() {
            return Ok(());
        }
        if address.is_loopback() {
            return match protocol {
                Protocol::Tcp if self.routes.path(address).is_ok() => Ok(()),
                Protocol::Tcp | Protocol::Udp => Err(KernelReason::LocalAddress.into()),
            };
        }
        let is_for_many = address.is_multicast() || self.routes.is_broadcast(address);
        match protocol {
            // Who binds to a group hears that group only (the kernel socket is bound likewise).
            Protocol::Udp if is_for_many => return Ok(()),
            Protocol::Tcp if is_for_many => return Err(KernelReason::NotUnicast.into()),
            Protocol::Udp | Protocol::Tcp => {}
        }
        match self.managed_addresses.get(&address) {
            Some(true) => Ok(()),
            Some(false) => Err(KernelReason::UnmanagedDevice.into()),
            None => Err(Errno::ADDRNOTAVAIL.into()),
        }
    }

    /// Answers a call that leads elsewhere. A bound session gives its port to the kernel's socket.
    fn fallback(&mut self, known: Option<SessionId>, fallback: Fallback) -> Result<Answer, Errno> {
        let reason = match fallback {
            Fallback::Error(errno) => return Err(errno),
            Fallback::Kernel(reason) => reason,
        };
        self.control.counters.use_kernel(reason);
        // A UDP session is left to the kernel by its library, with what is unread.
        let is_held = |id: &SessionId| {
            let session = self.control.registry.session(*id);
            session.is_some_and(|session| {
                session.protocol == Protocol::Udp && matches!(session.holder, Holder::Process(..))
            })
        };
        let socket = known.filter(|id| !is_held(id)).and_then(|id| {
            let socket = self.give_up_port(id);
            self.forget(id);
            socket
        });
        let fds = socket.into_iter().collect();
        Ok(Answer::Reply(ReplyBody::UseKernel { reason }, fds))
    }
}

pub fn any_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
