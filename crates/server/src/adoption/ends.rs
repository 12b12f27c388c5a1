//! Leaving the ends of descriptors to the next server, and continuing with those of the preceding one.

use std::os::fd::OwnedFd;

use portolan_control::{Errno, Holder, Life};
use portolan_proto::control::{DescriptorOfAdopted, RequestBody};
use portolan_sys::unix;
use portolan_types::{ChannelId, Protocol, SessionId};

use crate::adoption::left_ends::{Identity, LeftEnd, Waiting};
use crate::adoption::unpaired::MemoryKey;
use crate::calls::RequestId;
use crate::requests::{Answer, NewDescriptor};
use crate::server::Server;

/// The descriptor of an adopted connection: that of before, if the service manager has kept the end, or a new one.
#[derive(Debug)]
pub(crate) struct AdoptedDescriptor {
    pub which: DescriptorOfAdopted,
    pub cookie: u64,
    far: OwnedFd,
    relays_writes: bool,
}

impl Server {
    /// Takes the ends that the next server is to have: of all connections that processes hold.
    pub(crate) fn take_ends(&mut self) -> Vec<(LeftEnd, OwnedFd)> {
        let mut ends = self.inheritance.ends.take_all();
        if !self.supervisor.keeps() {
            return Vec::new();
        }
        let sessions = self.control.registry.sessions();
        let held = sessions.filter_map(|session| {
            let is_held = session.protocol == Protocol::Tcp
                && matches!(session.life, Life::Connected)
                && matches!(session.holder, Holder::Process(..));
            let identity = match self.handles.local(session.id) {
                Some(end) => Identity::Memory(MemoryKey::of(&end.memory.fd).ok()?),
                None => Identity::Flow(session.flow()?),
            };
            is_held.then_some(LeftEnd {
                session: session.id,
                identity,
                uid: session.uid,
                cookie: session.cookie,
                relays_writes: self.handles.peer_end(session.id)?.relays_writes,
            })
        });
        for end in held.collect::<Vec<_>>() {
            ends.extend(self.take_far(end.session).map(|far| (end, far)));
        }
        ends
    }

    pub(crate) fn descriptor_of_adopted(
        &mut self,
        channel: ChannelId,
        whose: (SessionId, Identity),
        fds: &mut Vec<OwnedFd>,
    ) -> Result<AdoptedDescriptor, Errno> {
        let process = self.control.registry.process(channel);
        let uid = process.ok_or(Errno::PERM)?.uid;
        // One that the program has closed meanwhile would end the connection before that is handed in.
        let is_in_use =
            |(end, far): &(LeftEnd, OwnedFd)| end.relays_writes || !unix::has_hung_up(far);
        let left = self.inheritance.ends.take(whose, uid);
        if let Some((end, far)) = left.filter(is_in_use) {
            return Ok(AdoptedDescriptor {
                which: DescriptorOfAdopted::Kept,
                cookie: end.cookie,
                far,
                relays_writes: end.relays_writes,
            });
        }
        let NewDescriptor { far, cookie } = self.take_new_descriptor(fds)?;
        Ok(AdoptedDescriptor {
            which: DescriptorOfAdopted::New,
            cookie,
            far,
            relays_writes: false,
        })
    }

    pub(crate) fn watch_adopted(
        &mut self,
        id: SessionId,
        descriptor: AdoptedDescriptor,
    ) -> Result<(), Errno> {
        if descriptor.relays_writes {
            self.watch_peer_end_of_parked(id, descriptor.far)
        } else {
            self.watch_peer_end(id, descriptor.far)
        }
    }

    /// Defers a request until the session whose descriptor it shows is adopted.
    pub(crate) fn await_adoption(
        &mut self,
        from: RequestId,
        session: SessionId,
        (body, fds): (RequestBody, Vec<OwnedFd>),
    ) -> Result<Answer, Errno> {
        let request = Waiting { from, body, fds };
        if self.inheritance.ends.wait(session, request) {
            Ok(Answer::Silence)
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// Answers the requests that have waited for a connection, which is adopted, or will not be.
    pub(crate) fn answer_waiting(&mut self, session: SessionId) {
        for Waiting { from, body, fds } in self.inheritance.ends.take_waiting(session) {
            let answer = self.perform_now(from.0, from.1, body, fds);
            self.answer(from, answer);
        }
    }

    /// The holders of what is left have not come: the other processes see the end of their descriptors.
    pub(crate) fn close_ends(&mut self) {
        for (_, far) in self.inheritance.ends.take_all() {
            self.sink.close(far);
        }
        for session in self.inheritance.ends.awaited() {
            self.answer_waiting(session);
        }
    }
}
