//! How packets reach the sessions that processes hold: as a session has chosen, or its listener, else as the
//! configuration says.

use portolan_control::{Holder, Session};
use portolan_proto::control::Delivery;
use portolan_proto::filter::FlowRow;
use portolan_types::SessionId;

use crate::server::Server;

impl Server {
    /// The session has chosen, or has not.
    pub fn choose_delivery(&mut self, id: SessionId, chosen: Option<Delivery>) {
        match chosen {
            Some(form) => self.deliveries.insert(id, form),
            None => self.deliveries.remove(&id),
        };
    }

    /// What the session's row says of it. The server's own packets come as they always do.
    pub fn delivery_flags(&self, session: &Session) -> u16 {
        let chosen = self.deliveries.get(&session.id).copied();
        let form = chosen.unwrap_or(self.config.delivery.form);
        let is_elsewhere = matches!(session.holder, Holder::Process(..));
        match form {
            Delivery::Ipc if is_elsewhere => FlowRow::BY_TAP,
            Delivery::Ipc | Delivery::Shm | Delivery::Server => 0,
        }
    }
}
