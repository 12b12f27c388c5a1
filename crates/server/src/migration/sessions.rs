//! Common parts of operations on sessions: steering their rows, keeping their sockets, forgetting them.

use std::os::fd::OwnedFd;

use portolan_control::{Errno, Holder, Input, Life, SessionEntry, SessionPhase};
use portolan_proto::filter::{BindingKey, FlowRow};
use portolan_sys::unix;
use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, Slot};
use rustix::event::epoll::EventFlags;
use tracing::warn;

use crate::handles::{DescriptorPeer, HeldPort};
use crate::requests::NewDescriptor;
use crate::reservation::PortReservation;
use crate::server::{Server, Source};

impl Server {
    /// Takes the far and near end that a request carried.
    pub(crate) fn take_new_descriptor(
        &mut self,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<NewDescriptor, Errno> {
        if fds.len() != 2 {
            return Err(Errno::INVAL);
        }
        let near = fds.remove(1);
        let far = fds.remove(0);
        // With a control connection as far end, its process would look alive indefinitely. With the near end of one
        // session as far end of another, each would keep the other.
        let are_pair = match self.holder_count.as_mut() {
            Some(count) => count.are_pair(&far, &near),
            None => [&far, &near].into_iter().all(unix::is_pair_end),
        };
        if !are_pair {
            return Err(Errno::INVAL);
        }
        let cookie = unix::cookie(&near).map_err(|_| Errno::INVAL)?;
        let far_cookie = unix::cookie(&far).map_err(|_| Errno::INVAL)?;
        let is_known = |cookie| self.control.registry.by_cookie(cookie).is_some();
        if far_cookie == cookie || is_known(cookie) || is_known(far_cookie) {
            return Err(Errno::INVAL);
        }
        unix::refuse_descriptors(&far);
        // Earlier messages could carry descriptors.
        if unix::is_empty(&far) {
            Ok(NewDescriptor { far, cookie })
        } else {
            Err(Errno::INVAL)
        }
    }

    /// Watches `far`, which accepts no descriptors, for the session; replaces an earlier one.
    pub(crate) fn watch_peer_end(&mut self, id: SessionId, far: OwnedFd) -> Result<(), Errno> {
        // Without any interest, epoll still reports hang-ups.
        self.watch_peer_end_for(id, far, EventFlags::empty())
    }

    /// As [`Server::watch_peer_end`], for a session that is parked: what is written to its descriptor begins a relay.
    pub(crate) fn watch_peer_end_of_parked(
        &mut self,
        id: SessionId,
        far: OwnedFd,
    ) -> Result<(), Errno> {
        self.watch_peer_end_for(id, far, EventFlags::IN | EventFlags::RDHUP)
    }

    fn watch_peer_end_for(
        &mut self,
        id: SessionId,
        far: OwnedFd,
        interest: EventFlags,
    ) -> Result<(), Errno> {
        self.drop_far(id);
        self.note_descriptor(&far);
        let token = self
            .poll
            .add_to_crowd(&far, Source::Descriptor(id), interest)
            .map_err(|_| Errno::NOBUFS)?;
        self.handles.of(id).peer_end = Some(DescriptorPeer {
            fd: far,
            token,
            is_ours: false,
            relays_writes: interest.contains(EventFlags::IN),
        });
        self.note_peer_end(id, true);
        Ok(())
    }

    pub(crate) fn drop_far(&mut self, id: SessionId) {
        if let Some(far) = self.take_far(id) {
            self.sink.close(far);
        }
    }

    /// Stops watching the far end.
    pub(crate) fn take_far(&mut self, id: SessionId) -> Option<OwnedFd> {
        let far = self.handles.take_peer_end(id)?;
        self.note_peer_end(id, false);
        self.poll.remove(&far.fd, far.token);
        Some(far.fd)
    }

    fn note_peer_end(&mut self, id: SessionId, is_there: bool) {
        if let Some(session) = self.control.registry.session_mut(id) {
            session.has_descriptor = is_there;
        }
    }

    pub(crate) fn watch_far(&self, id: SessionId, flags: EventFlags) {
        if let Some(far) = self.handles.peer_end(id)
            && let Err(errno) = self.poll.modify(&far.fd, far.token, flags)
        {
            warn!(%errno, "cannot watch a descriptor");
        }
    }

    /// Sends the session's packets to `holder` from now on.
    pub(crate) fn steer(&mut self, id: SessionId, holder: Holder) -> Generation {
        self.free_ring_unless(id, holder);
        let generation = self.control.registry.steer(id, holder);
        let Some(session) = self.control.registry.session(id) else {
            return generation;
        };
        let Some(row) = self.row_of(session) else {
            return generation;
        };
        let set = match session.flow() {
            Some(flow) => self.filter.steer(&flow, row),
            None if session.protocol == Protocol::Udp => Ok(()),
            None => {
                let key = BindingKey::new(session.protocol, session.local);
                self.filter.bind(&key, row)
            }
        };
        let is_udp = session.protocol == Protocol::Udp;
        if let Err(error) = set {
            warn!(%error, session = id.0, "cannot aim a session");
        }
        if is_udp {
            self.enter_endpoint(id);
        }
        if let Holder::Process(channel, _) = holder {
            self.note_arrival(id, channel);
        }
        generation
    }

    /// Returns the row of the session's packets; `None` if it has no holder, or is local.
    pub(crate) fn row_of(&self, session: &SessionEntry) -> Option<FlowRow> {
        // These have no packets, and removals of rows skip them.
        if session.is_local() || session.is_flow_reused {
            return None;
        }
        let (channel, slot, generation) = match (session.awaited, session.holder) {
            (Some((slot, generation)), _) => (ChannelId::SERVER, slot, generation),
            (None, Holder::Process(channel, slot)) => (channel, slot, session.generation),
            (None, Holder::Server(slot)) => (ChannelId::SERVER, slot, session.generation),
            (None, Holder::None) => return None,
        };
        Some(FlowRow {
            channel: channel.0,
            slot: slot.0,
            generation: generation.0,
            flags: self.extension_flags(session, channel) | self.delivery_flags(session),
            class: self.class_in_row(session),
            ring: match session.holder {
                Holder::Process(..) => self.ring_of(session.id),
                Holder::Server(_) | Holder::None => 0,
            },
            budget: self.budget_of(session),
            reserved: 0,
        })
    }

    /// Rewrites the session's rows, whose contents besides the holder have changed.
    pub(crate) fn renew_rows(&mut self, id: SessionId) {
        let Some(session) = self.control.registry.session(id) else {
            return;
        };
        if session.phase() == SessionPhase::Listening {
            return self.steer_listener(id);
        }
        let Some(row) = self.row_of(session) else {
            return;
        };
        let is_udp = session.protocol == Protocol::Udp;
        if let Some(flow) = session.flow()
            && let Err(error) = self.filter.steer(&flow, row)
        {
            warn!(%error, session = id.0, "cannot aim a session");
        }
        if is_udp {
            self.enter_endpoint(id);
        }
    }

    pub(crate) fn remove_row(&self, flow: &FlowKey) {
        if let Err(error) = self.filter.unsteer(flow) {
            warn!(%error, %flow, "cannot remove a row of the filter");
        }
    }

    pub(crate) fn forget(&mut self, id: SessionId) {
        self.input(Input::Forget(id));
    }

    /// Releases the server's descriptors for a removed session.
    pub(crate) fn release_handles(&mut self, id: SessionId) {
        let Some(handles) = self.handles.remove(id) else {
            return;
        };
        if let Some(far) = handles.peer_end {
            self.poll.remove(&far.fd, far.token);
            self.sink.close(far.fd);
        }
        if let Some(port) = handles.port {
            self.close_port(port);
        }
        if let Some(rejoining) = handles.rejoining {
            self.sink.close(rejoining.into_near());
        }
        if let Some(ring) = handles.ring {
            self.directs.free(ring);
        }
    }

    /// Holds the claim's port on the kernel's side.
    pub(crate) fn keep_reservation(&mut self, id: SessionId, socket: PortReservation) {
        let owner = self.owner_of_port(id);
        self.handles.of(id).port = Some(HeldPort::new(socket, None, owner));
    }

    /// Whose the session is, and its port.
    pub(crate) fn owner_of_port(&self, id: SessionId) -> (u32, u16) {
        let session = self.control.registry.session(id);
        session.map_or((0, 0), |session| (session.uid, session.local.port()))
    }

    /// Closes the kernel's socket on a session's port, if it has one.
    pub(crate) fn drop_reservation(&mut self, id: SessionId) {
        if let Some(port) = self.handles.take_port(id) {
            self.close_port(port);
        }
    }

    /// The last close of a socket leaves its groups, for which the kernel waits until nobody else changes the network's
    /// configuration.
    fn close_port(&mut self, port: HeldPort) {
        if let Some(token) = port.token {
            self.poll.remove(&port.socket, token);
        }
        if port.is_shared || port.has_groups {
            let (uid, number) = port.owner;
            self.sink.close_port(uid, port.socket.into_fd(), number);
        }
    }

    pub(crate) fn holder(&self, id: SessionId) -> Option<Holder> {
        self.control
            .registry
            .session(id)
            .map(|session| session.holder)
    }

    pub(crate) fn server_slot(&self, id: SessionId) -> Option<Slot> {
        self.control.registry.session(id)?.server_slot()
    }

    pub(crate) fn set_life(&mut self, id: SessionId, life: Life) {
        if let Some(session) = self.control.registry.session_mut(id) {
            session.life = life;
        }
    }

    pub(crate) fn phase(&self, id: SessionId) -> Option<SessionPhase> {
        self.control.registry.session(id).map(SessionEntry::phase)
    }
}
