//! UDP sessions: cached at bind and at connect, so the server only handles rows and ports.

pub(crate) mod datagrams;
pub(crate) mod sharing;
pub(crate) mod unread;

use std::net::SocketAddr;

use portolan_control::{Command, Errno, Fallback, Holder, Input, Life, PortClaim, SessionEntry};
use portolan_proto::control::{ReplyBody, Reuse};
use portolan_stack::Path;
use portolan_types::{ChannelId, Protocol, SessionId, Slot, scoped};
use tracing::debug;

use crate::calls::{Call, Sequel};
use crate::random::random_u32;
use crate::requests::Answer;
use crate::requests::NewDescriptor;
use crate::requests::Target;
use crate::reservation::PortReservation;
use crate::server::Server;
use crate::user_threads::WaitsFor;

impl Server {
    /// Sets the peer: an exact flow replaces the binding.
    pub(crate) fn connect_udp(
        &mut self,
        channel: ChannelId,
        known: Option<SessionId>,
        target: Target,
        path: Path,
        descriptor: Option<NewDescriptor>,
    ) -> Result<Answer, Fallback> {
        if let Some(id) = known {
            self.check_calls_on_port(id)?;
        }
        let id = match known {
            Some(id) => id,
            None => self.enter_unbound(channel, &target, descriptor)?,
        };
        if let Err(errno) = self.give_udp_endpoint(id, &path) {
            if known.is_none() {
                self.forget(id);
            }
            return Err(errno.into());
        }
        self.input(Input::Unsteer(id));
        let session = self.control.registry.session_mut(id).ok_or(Errno::BADF)?;
        session.remote = Some(target.remote);
        session.life = Life::Connected;
        session.choose(&target.options);
        let local = session.local;
        let generation = self.steer(id, Holder::Process(channel, target.slot));
        self.control.counters.handoffs += 1;
        let connected = ReplyBody::Connected {
            session: id,
            local,
            generation,
        };
        Ok(self.tell_kernel_of_peer(id, Some(target.remote), connected)?)
    }

    /// Assigns an address, and a port if there is none yet. Ports of our own range need no kernel
    /// socket: the kernel does not use that range.
    fn give_udp_endpoint(&mut self, id: SessionId, path: &Path) -> Result<(), Errno> {
        let random = random_u32();
        let session = self.control.registry.session_mut(id).ok_or(Errno::BADF)?;
        if session.local.port() == 0 {
            let claim = PortClaim {
                protocol: Protocol::Udp,
                local: session.local,
                reuse: Reuse::default(),
                v6_only: false,
                uid: session.uid,
            };
            let (claim, local) = self
                .control
                .ports
                .bind(claim, random)
                .map_err(|e| e.errno())?;
            session.claim = Some(claim);
            session.local = local;
        }
        if session.local.ip().is_unspecified() {
            let source = path.source.ok_or(Errno::ADDRNOTAVAIL)?;
            let port = session.local.port();
            // The binding row is removed before the address that identifies it changes.
            self.input(Input::Unsteer(id));
            if let Some(session) = self.control.registry.session_mut(id) {
                session.local = scoped(source, port, path.interface);
            }
        }
        Ok(())
    }

    /// Removes the peer: the binding is restored, at the address that `bind` gave.
    pub(crate) fn disconnect_udp(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        slot: Slot,
    ) -> Result<Answer, Errno> {
        self.control
            .registry
            .admit(channel, Command::Disconnect, id)?;
        self.check_calls_on_port(id)?;
        let session = self.control.registry.session(id);
        if let Some(flow) = session.and_then(SessionEntry::flow) {
            self.end_guarantees_of_flow(&flow);
        }
        self.input(Input::Unsteer(id));
        let bound = self.control.claim_of(id);
        let session = self.control.registry.session_mut(id).ok_or(Errno::BADF)?;
        session.remote = None;
        session.life = Life::Bound;
        if let Some(claim) = bound {
            session.local = claim.local;
        }
        let local = session.local;
        let generation = self.steer(id, Holder::Process(channel, slot));
        let bound = ReplyBody::Bound {
            session: id,
            local,
            generation,
        };
        self.tell_kernel_of_peer(id, None, bound)
    }

    /// What comes from others is the kernel's: its socket on the port refuses it unless another
    /// socket fits. Then `answer` is given.
    fn tell_kernel_of_peer(
        &mut self,
        id: SessionId,
        peer: Option<SocketAddr>,
        answer: ReplyBody,
    ) -> Result<Answer, Errno> {
        if self.handles.port(id).is_none() {
            return Ok(answer.into());
        }
        self.call_on_port(id, move |port| {
            set_peer(port, peer);
            Box::new(move |_| Ok(answer.into()))
        })
    }

    /// May one more call be made on the kernel's socket on a UDP port?
    fn check_calls_on_port(&self, id: SessionId) -> Result<(), Errno> {
        match self.handles.port(id) {
            Some(port) if port.is_shared => self.calls.check(port.owner.0, WaitsFor::Socket),
            _ => Ok(()),
        }
    }

    /// Makes a call on the kernel's socket on a UDP port. If a program has that too, a thread makes it.
    pub(crate) fn call_on_port(
        &mut self,
        id: SessionId,
        make: impl FnOnce(&PortReservation) -> Sequel + Send + 'static,
    ) -> Result<Answer, Errno> {
        let port = self.handles.port(id).ok_or(Errno::BADF)?;
        if !port.is_shared {
            return make(&port.socket)(self);
        }
        self.have_called(id, WaitsFor::Socket, make)
    }

    /// Has a thread make a call on it.
    pub(crate) fn have_called(
        &self,
        id: SessionId,
        waits_for: WaitsFor,
        make: impl FnOnce(&PortReservation) -> Sequel + Send + 'static,
    ) -> Result<Answer, Errno> {
        let port = self.handles.port(id).ok_or(Errno::BADF)?;
        let (uid, _) = port.owner;
        self.calls.check(uid, waits_for)?;
        let socket = port.socket.try_clone().map_err(|_| Errno::NOBUFS)?;
        Ok(Answer::Call(Call {
            uid,
            waits_for,
            make: Box::new(move || make(&socket)),
        }))
    }
}

pub(crate) fn set_peer(port: &PortReservation, peer: Option<SocketAddr>) {
    if let Err(errno) = port.set_peer(peer) {
        debug!(
            errno = errno.0,
            "the kernel's socket on a UDP port keeps its peer"
        );
    }
}
