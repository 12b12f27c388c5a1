//! `SO_PRIORITY` of sessions: with which priority their frames leave, for queueing disciplines of the user's. Rows say
//! it where they say no class, since a reservation goes before.

use portolan_control::Session;
use portolan_proto::control::HandshakeOptions;
use portolan_proto::filter::CHOSEN_PRIORITY;
use portolan_types::{ChannelId, SessionId};

use crate::server::Server;

impl Server {
    /// The session has chosen as it was opened or accepted. What needs privileges is not to be had in this way.
    pub fn choose_priority(&mut self, id: SessionId, priority: u8) {
        match priority {
            1..=HandshakeOptions::PRIORITY_MAX => drop(self.priorities.insert(id, priority)),
            _ => drop(self.priorities.remove(&id)),
        }
    }

    /// `Prioritize`.
    pub fn prioritize(&mut self, channel: ChannelId, id: SessionId, priority: u8) {
        if self.is_held_by(id, channel) {
            self.choose_priority(id, priority);
            self.renew_rows(id);
            self.classify_kernel_socket(id);
        }
    }

    pub(crate) fn priority(&self, id: SessionId) -> u8 {
        self.priorities.get(&id).copied().unwrap_or(0)
    }

    /// What the row of a session says.
    pub fn class_in_row(&self, session: &Session) -> u16 {
        match (self.row_class(session), self.priority(session.id)) {
            (0, 0) => 0,
            (0, chosen) => CHOSEN_PRIORITY | u16::from(chosen),
            (class, _) => class,
        }
    }
}
