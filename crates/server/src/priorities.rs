//! `SO_PRIORITY` of sessions: the priority with which their frames leave, for queueing disciplines of the user's. Rows
//! carry it only where they carry no class, since a reservation takes precedence.

use portolan_control::SessionEntry;
use portolan_proto::filter::CHOSEN_PRIORITY;
use portolan_types::{ChannelId, SessionId};

use crate::server::Server;

impl Server {
    /// `Prioritize`: sets the priority of a session.
    pub(crate) fn prioritize(&mut self, channel: ChannelId, id: SessionId, priority: u8) {
        if self.is_held_by(id, channel) {
            if let Some(session) = self.control.registry.session_mut(id) {
                session.set_priority(priority);
            }
            self.renew_rows(id);
            self.classify_kernel_socket(id);
        }
    }

    /// Returns the class or priority in the row of a session.
    pub(crate) fn class_in_row(&self, session: &SessionEntry) -> u16 {
        match (self.row_class(session), session.priority) {
            (0, 0) => 0,
            (0, chosen) => CHOSEN_PRIORITY | u16::from(chosen),
            (class, _) => class,
        }
    }
}
