//! UDP sessions: cached at bind and at connect, so the server only handles rows and ports.

pub mod datagrams;
pub mod sharing;
pub mod unread;

use std::net::SocketAddr;

use portolan_control::{Command, Errno, Fallback, Holder, Input, Life, PortClaim, SessionEntry};
use portolan_proto::control::{ReplyBody, Reuse};
use portolan_stack::Path;
use portolan_types::{ChannelId, Protocol, SessionId, Slot, scoped};
use tracing::debug;

use crate::random::random_u32;
use crate::requests::Answer;
use crate::requests::NewDescriptor;
use crate::requests::Target;
use crate::server::Server;

impl Server {
    /// Sets the peer: an exact flow replaces the binding.
    pub fn connect_udp(
        &mut self,
        channel: ChannelId,
        known: Option<SessionId>,
        target: Target,
        path: Path,
        descriptor: Option<NewDescriptor>,
    ) -> Result<Answer, Fallback> {
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
        self.tell_kernel_of_peer(id, Some(target.remote));
        let generation = self.steer(id, Holder::Process(channel, target.slot));
        self.control.counters.handoffs += 1;
        Ok(ReplyBody::Connected {
            session: id,
            local,
            generation,
        }
        .into())
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
    pub fn disconnect_udp(
        &mut self,
        channel: ChannelId,
        id: SessionId,
        slot: Slot,
    ) -> Result<Answer, Errno> {
        self.control
            .registry
            .admit(channel, Command::Disconnect, id)?;
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
        self.tell_kernel_of_peer(id, None);
        let generation = self.steer(id, Holder::Process(channel, slot));
        Ok(ReplyBody::Bound {
            session: id,
            local,
            generation,
        }
        .into())
    }

    /// Leaves datagrams from others to the kernel: its socket on the port refuses them unless
    /// another socket matches.
    pub fn tell_kernel_of_peer(&self, id: SessionId, peer: Option<SocketAddr>) {
        if let Some(port) = self.handles.port(id)
            && let Err(errno) = port.socket.set_peer(peer)
        {
            debug!(
                errno = errno.0,
                "the kernel's socket on a UDP port keeps its peer"
            );
        }
    }
}
