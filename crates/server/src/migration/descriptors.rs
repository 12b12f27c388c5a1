//! What happens on the far ends of descriptors: events out, hang-ups in.

use std::os::fd::BorrowedFd;

use portolan_control::{Holder, Input, SessionPhase};
use portolan_proto::control::DescriptorEvent;
use portolan_proto::encode;
use portolan_sys::unix::{self, SendError};
use portolan_types::SessionId;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::server::Server;

/// Requests read from a process before its descriptor's hang-up is believed.
const REQUESTS_BEFORE_HANGUP: usize = 1024;

/// A request can be what finds a hang-up, before which other requests are read. Deeper the hang-up waits for the next turn:
/// what programs send must not use up the server's stack.
const NESTED_READS_MAX: u32 = 4;

impl Server {
    /// Whichever process accepted. What was said before the hang-ups at hand is read once for all of them.
    fn read_all_clients(&mut self) {
        if std::mem::replace(&mut self.are_all_clients_read, true) {
            return;
        }
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            self.read_client(client, REQUESTS_BEFORE_HANGUP);
        }
    }

    /// Leaves an event on the session's descriptor. False if it cannot be left.
    pub fn send_event(
        &mut self,
        id: SessionId,
        event: &DescriptorEvent,
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        self.try_send_event(id, event, fds).is_ok()
    }

    pub fn try_send_event(
        &mut self,
        id: SessionId,
        event: &DescriptorEvent,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        match self.handles.peer_end(id) {
            Some(far) => unix::send(&far.fd, &encode(event), fds),
            None => Err(SendError::Closed),
        }
    }

    /// epoll says something about a far end.
    pub fn on_descriptor(&mut self, id: SessionId, flags: EventFlags) {
        match self.phase(id) {
            Some(SessionPhase::Relayed) if !self.is_udp(id) => self.on_relay(id, flags),
            Some(SessionPhase::Listening) if !flags.contains(EventFlags::HUP) => self.announce(id),
            Some(_) if flags.intersects(EventFlags::HUP | EventFlags::ERR) => self.on_hangup(id),
            _ => {}
        }
    }

    /// Is the last descriptor of the session closed?
    pub fn has_hung_up(&self, id: SessionId) -> bool {
        let Some(far) = self.handles.peer_end(id) else {
            return true;
        };
        let mut fds = [PollFd::new(&far.fd, PollFlags::empty())];
        let looked = poll(&mut fds, Some(&Timespec::default()));
        looked.is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// The last descriptor of the session is closed. What was said before, a `Flush` or `Accepted`,
    /// may still lie in the control connection of a process: it goes first.
    pub fn on_hangup(&mut self, id: SessionId) {
        if self.nested_reads >= NESTED_READS_MAX {
            // Reported again in the next turn.
            return;
        }
        let Some(session) = self.control.registry.session(id) else {
            self.drop_far(id);
            return;
        };
        match (session.holder, session.phase()) {
            (Holder::Process(channel, _), _) => {
                if let Some(client) = self.client_of(channel) {
                    // Reported again in the next turn.
                    if self.has_spent_slice(client) {
                        return;
                    }
                    self.read_client(client, REQUESTS_BEFORE_HANGUP);
                }
            }
            (_, SessionPhase::Offered | SessionPhase::Listening) => self.read_all_clients(),
            _ => {}
        }
        self.drop_far(id);
        self.input(Input::HungUp(id));
    }
}
