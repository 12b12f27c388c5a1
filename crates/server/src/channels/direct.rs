//! Direct mapping (ADR 20): sessions whose frames arrive by a ring and a notifier of their own. A ring belongs to one
//! process for that process's lifetime: when its session has ended, another session of the process gets it. The thread
//! that makes channels makes rings, since the kernel takes tens of milliseconds for one.

use portolan_bpf::ChannelMaps;
use portolan_control::{ClientId, Errno, Holder, SessionEntry};
use portolan_proto::control::{Delivery, ReplyBody};
use portolan_proto::report::{Mapping, SharedReason};
use portolan_types::{ChannelId, SessionId};
use tracing::error;

use crate::channels::rings::{RINGS, RingEntry, RingRequest, Stage};
use crate::requests::Answer;
use crate::server::Server;

impl Server {
    pub(crate) fn mapping_of(&self, session: &SessionEntry) -> Mapping {
        match (self.handles.ring(session.id), session.ring_refusal) {
            (Some(_), _) => Mapping::Direct,
            (None, Some(reason)) => Mapping::Refused(reason),
            (None, None) => Mapping::Shared,
        }
    }

    fn note_ring_refusal(&mut self, id: SessionId, refusal: Option<SharedReason>) {
        if let Some(session) = self.control.registry.session_mut(id) {
            session.ring_refusal = refusal;
        }
    }

    /// `Direct`: gives a session that its process holds a ring of its own.
    pub(crate) fn map_directly(
        &mut self,
        client: ClientId,
        request: u32,
        id: SessionId,
    ) -> Result<Answer, Errno> {
        let channel = self.clients.get(&client).and_then(|client| client.channel);
        let channel = channel.ok_or(Errno::PERM)?;
        if !self.is_held_by(id, channel) || self.handles.local(id).is_some() {
            return Err(Errno::BADF);
        }
        if self.handles.ring(id).is_some() {
            return Ok(ReplyBody::Direct { ring_size: None }.into());
        }
        if self.is_mapped_by_tap(id) {
            return Err(self.refuse_ring(id, SharedReason::Delivery));
        }
        if let Some(ring) = self.directs.free_of(channel) {
            self.take_ring(ring, id);
            return Ok(ReplyBody::Direct { ring_size: None }.into());
        }
        let request = RingRequest {
            session: id,
            client,
            request,
        };
        self.order_ring(channel, request)
    }

    pub(crate) fn is_held_by(&self, id: SessionId, channel: ChannelId) -> bool {
        let session = self.control.registry.session(id);
        session.is_some_and(|session| session.is_held_by(channel))
    }

    /// Returns whether each of the session's packets is a message, which uses no ring.
    fn is_mapped_by_tap(&self, id: SessionId) -> bool {
        self.form_of(id) == Delivery::Ipc
    }

    fn refuse_ring(&mut self, id: SessionId, reason: SharedReason) -> Errno {
        self.note_ring_refusal(id, Some(reason));
        self.control.counters.direct_refused(reason);
        Errno::NOBUFS
    }

    fn order_ring(&mut self, channel: ChannelId, request: RingRequest) -> Result<Answer, Errno> {
        if self.directs.count_of(channel) >= self.config.delivery.direct_per_process as usize {
            return Err(self.refuse_ring(request.session, SharedReason::ProcessLimit));
        }
        let Some(ring) = self.free_ring_number() else {
            return Err(self.refuse_ring(request.session, SharedReason::HostLimit));
        };
        let entry = RingEntry {
            owner: channel,
            stage: Stage::Ordered(request),
        };
        self.directs.rings.insert(ring, entry);
        let size = self.config.delivery.direct_ring_size;
        self.channel_pool.order_ring(ring, size);
        Ok(Answer::Silence)
    }

    fn free_ring_number(&self) -> Option<ChannelId> {
        let first = self.directs.first.0;
        let mut numbers = (first..first + RINGS).map(ChannelId);
        numbers.find(|number| !self.directs.rings.contains_key(number))
    }

    /// Handles a ring that was made, or could not be.
    pub(crate) fn enter_ring(&mut self, ring: ChannelId, maps: Option<ChannelMaps>) {
        let stage = self.directs.rings.get(&ring).map(|entry| &entry.stage);
        let request = match stage {
            Some(Stage::Ordered(request)) => Some(*request),
            _ => None,
        };
        let (Some(request), Some(maps)) = (request, maps) else {
            self.remove_ring(ring);
            if let Some(request) = request {
                let errno = self.refuse_ring(request.session, SharedReason::NotMade).0;
                let refusal = ReplyBody::Error { errno };
                self.reply(request.client, request.request, refusal, Vec::new());
            }
            return;
        };
        // The ring belongs to the process from now on, whether or not the session still exists.
        self.directs.set(ring, Stage::Free);
        let owner = self.directs.rings.get(&ring).map(|entry| entry.owner);
        if owner.is_some_and(|owner| self.is_held_by(request.session, owner)) {
            self.take_ring(ring, request.session);
        }
        let body = ReplyBody::Direct {
            ring_size: Some(self.config.delivery.direct_ring_size),
        };
        let fds = vec![maps.ring, maps.doorbell];
        self.reply(request.client, request.request, body, fds);
    }

    fn take_ring(&mut self, ring: ChannelId, id: SessionId) {
        self.note_ring_refusal(id, None);
        self.directs.set(ring, Stage::Taken);
        self.handles.of(id).ring = Some(ring);
        self.control.counters.direct_mappings += 1;
        self.renew_rows(id);
    }

    /// Frees the session's ring for another session of the process. The caller rewrites the session's row.
    fn free_ring(&mut self, id: SessionId) {
        self.note_ring_refusal(id, None);
        if let Some(ring) = self.handles.take_ring(id) {
            self.directs.free(ring);
        }
    }

    /// Like [`Server::free_ring`], if the session goes to another process, or to none.
    pub(crate) fn free_ring_unless(&mut self, id: SessionId, holder: Holder) {
        let ring = self.handles.ring(id);
        let owner = ring.and_then(|ring| Some(self.directs.rings.get(&ring)?.owner));
        let stays = matches!(holder, Holder::Process(channel, _) if Some(channel) == owner);
        if !stays {
            self.free_ring(id);
        }
    }

    /// `RefuseRing`: the process cannot use the ring that its session got.
    pub(crate) fn take_back_ring(&mut self, channel: ChannelId, id: SessionId) {
        if !self.is_held_by(id, channel) {
            return;
        }
        if let Some(ring) = self.handles.take_ring(id) {
            self.refuse_ring(id, SharedReason::NotMade);
            self.renew_rows(id);
            self.remove_ring(ring);
        }
    }

    /// Handles the end of a process and of its sessions.
    pub(crate) fn end_rings_of(&mut self, channel: ChannelId) {
        let owned = self.directs.rings.iter();
        let owned: Vec<_> = owned
            .filter(|(_, entry)| entry.owner == channel)
            .map(|(ring, entry)| (*ring, matches!(entry.stage, Stage::Ordered(_))))
            .collect();
        for (ring, is_ordered) in owned {
            if is_ordered {
                self.disown_ring(ring)
            } else {
                self.remove_ring(ring)
            }
        }
    }

    /// Marks a ring that nobody waits for any more; its number is freed once the ring is made.
    fn disown_ring(&mut self, ring: ChannelId) {
        if let Some(entry) = self.directs.rings.get_mut(&ring) {
            entry.owner = ChannelId::SERVER;
            entry.stage = Stage::Unwanted;
        }
    }

    fn remove_ring(&mut self, ring: ChannelId) {
        self.directs.rings.remove(&ring);
        if let Err(failure) = self.filter.remove_channel(ring) {
            error!(%failure, "cannot remove a ring");
        }
    }

    /// Returns the ring in the session's row; 0: its channel's.
    pub(crate) fn ring_of(&self, id: SessionId) -> u32 {
        self.handles.ring(id).map_or(0, |ring| ring.0)
    }
}
