//! Sessions within the host after a restart: both ends have the memory, by which the server finds out which belong
//! together. An end that is alone for too long hears that its peer has ended.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use portolan_control::{Adopted, Errno, Timer};
use portolan_proto::control::DescriptorOfAdopted;
use portolan_proto::local::Side;
use portolan_sys::shm::Rings;
use portolan_types::{ChannelId, SessionId};

use crate::adoption::TIMEOUT;
use crate::adoption::left_ends::Identity;
use crate::adoption::unpaired::{First, MemoryKey};
use crate::local_ends::{LocalEnd, Memory};
use crate::server::Server;

impl Server {
    /// `Adopt` of an end that a process holds.
    pub(crate) fn adopt_end(
        &mut self,
        channel: ChannelId,
        (adopted, side): (Adopted, Side),
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(SessionId, DescriptorOfAdopted), Errno> {
        let memory = fds.pop().ok_or(Errno::INVAL)?;
        let key = MemoryKey::of(&memory).map_err(|_| Errno::INVAL)?;
        let whose = (adopted.id, Identity::Memory(key));
        let descriptor = self.descriptor_of_adopted(channel, whose, fds)?;
        let which = descriptor.which;
        let id = self.control.adopt(channel, adopted, descriptor.cookie)?;
        let entered = self
            .enter_end(id, side, memory)
            .and_then(|()| self.watch_adopted(id, descriptor));
        entered.inspect_err(|_| self.forget(id))?;
        if let (Some(end), Some(channel)) = (self.handles.local(id), self.channels.get(&channel)) {
            end.give_to(channel.notifier.number);
        }
        self.announce_end(id, channel);
        self.tell_of_end_later(id);
        Ok((id, which))
    }

    /// Gives a session that is entered its end again, and its peer if that is here already.
    pub(crate) fn enter_end(
        &mut self,
        id: SessionId,
        side: Side,
        memory: OwnedFd,
    ) -> Result<(), Errno> {
        let key = MemoryKey::of(&memory).map_err(|_| Errno::INVAL)?;
        let unpaired = &mut self.locals.unpaired;
        let end = match unpaired.first(key) {
            None => {
                let until = self.now + TIMEOUT;
                let memory = self.map_memory(memory)?;
                self.locals.unpaired.wait(key, id, until);
                self.control.timers.arm_once(Timer::LocalPeers, until);
                LocalEnd {
                    unpaired: Some(key),
                    ..LocalEnd::new(side, SessionId::NONE, memory)
                }
            }
            Some(First::Waits(other)) => {
                let first = self.handles.local_mut(other).ok_or(Errno::INVAL)?;
                if first.side == side {
                    return Err(Errno::INVAL);
                }
                (first.peer, first.unpaired) = (id, None);
                let memory = Arc::clone(&first.memory);
                unpaired.forget(key);
                self.control.pair_again(id, other);
                LocalEnd::new(side, other, memory)
            }
            Some(First::Ended(other)) if other == side => return Err(Errno::INVAL),
            Some(First::Ended(_)) => {
                unpaired.forget(key);
                LocalEnd {
                    peer_has_ended: true,
                    ..LocalEnd::new(side, SessionId::NONE, self.map_memory(memory)?)
                }
            }
        };
        self.handles.of(id).local = Some(Box::new(end));
        Ok(())
    }

    fn map_memory(&mut self, fd: OwnedFd) -> Result<Arc<Memory>, Errno> {
        let rings = Rings::map_strangers(&fd).map_err(|_| Errno::INVAL)?;
        Ok(self.locals.note_memory(fd, rings))
    }

    /// Ends whose peers have not come hear that those have ended.
    pub(crate) fn look_at_unpaired(&mut self) {
        for id in self.locals.unpaired.take_due(self.now) {
            if let Some(end) = self.handles.local_mut(id) {
                end.unpaired = None;
                self.note_peer_has_ended(id);
            }
        }
        if let Some(until) = self.locals.unpaired.next() {
            self.control.timers.arm_once(Timer::LocalPeers, until);
        }
    }
}
