//! Activity on the far ends of descriptors: events sent, hang-ups received.

use std::os::fd::BorrowedFd;

use portolan_control::{Holder, Input, SessionPhase};
use portolan_proto::control::DescriptorEvent;
use portolan_proto::encode;
use portolan_sys::unix::{self, SendError};
use portolan_types::SessionId;
use rustix::event::epoll::EventFlags;

use crate::server::Server;

/// Requests read from a process before its descriptor's hang-up is handled.
const REQUESTS_BEFORE_HANGUP: usize = 1024;

/// Limit of nested reads: a request can lead to the discovery of a hang-up, before which other requests are read. At
/// the limit the hang-up waits for the next turn, so that programs cannot exhaust the server's stack.
const NESTED_READS_MAX: u32 = 4;

impl Server {
    /// Reads all clients, since any process may have accepted. Messages sent before the pending hang-ups are read once
    /// for all of them.
    fn read_all_clients(&mut self) {
        if std::mem::replace(&mut self.are_all_clients_read, true) {
            return;
        }
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            self.read_client(client, REQUESTS_BEFORE_HANGUP);
        }
    }

    /// Leaves an event on the session's descriptor. Returns false on failure.
    pub(crate) fn send_event(
        &mut self,
        id: SessionId,
        event: &DescriptorEvent,
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        self.try_send_event(id, event, fds).is_ok()
    }

    pub(crate) fn try_send_event(
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

    /// Handles an epoll event of a far end.
    pub(crate) fn on_descriptor(&mut self, id: SessionId, flags: EventFlags) {
        match self.phase(id) {
            Some(SessionPhase::Relayed) if !self.is_udp(id) => self.on_relay(id, flags),
            Some(SessionPhase::Listening) if !flags.contains(EventFlags::HUP) => self.announce(id),
            Some(_) if self.begins_relay(id, flags) => self.relay_what_is_written(id),
            Some(_) if flags.intersects(EventFlags::HUP | EventFlags::ERR) => self.on_hangup(id),
            _ => {}
        }
    }

    /// Returns whether the last descriptor of the session is closed.
    pub(crate) fn has_hung_up(&self, id: SessionId) -> bool {
        let far = self.handles.peer_end(id);
        far.is_none_or(|far| unix::has_hung_up(&far.fd))
    }

    /// Handles the close of the session's last descriptor. An earlier message, `Flush` or `Accepted`, may still be
    /// queued in the control connection of a process: it is handled first.
    pub(crate) fn on_hangup(&mut self, id: SessionId) {
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
        self.probe_unregistered_of(id);
        self.drop_far(id);
        self.input(Input::HungUp(id));
    }
}
