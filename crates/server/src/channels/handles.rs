//! Active demultiplexing (MS §VI): the demux handles of sessions that processes hold. Only TCP sessions are certain
//! to have an exclusive receiver: one process, or the server, which uses no handles itself.

use portolan_stack::TcpSession;
use portolan_types::{FlowKey, Handle};
use portolan_wire::demux::{ENCLOSED_V4_LEN, ENCLOSED_V6_LEN};
use tracing::warn;

use crate::random::random_u64;
use crate::server::Server;

impl Server {
    /// Returns how many bytes of each packet of a connection a handle would take; 0 if it is to offer none.
    pub(crate) fn handle_room(&self, flow: &FlowKey) -> u16 {
        match (self.config.demux.active, flow.local.is_ipv4()) {
            (false, _) => 0,
            (true, true) => ENCLOSED_V4_LEN as u16,
            (true, false) => ENCLOSED_V6_LEN as u16,
        }
    }

    /// Gives a session that moves to a process a handle by which its peer can name the session's row. The filter
    /// removes the handle with the row.
    pub(crate) fn give_handle(&mut self, session: &mut TcpSession) {
        let Some(marker) = self.config.demux.traffic_class() else {
            return;
        };
        if !session.connection.takes_handles() {
            return;
        }
        let row = self.control.registry.session(session.id);
        let Some(row) = row.and_then(|entry| self.row_of(entry)) else {
            return;
        };
        // Zero means none.
        let nonce = random_u64() | 1;
        match self.filter.give_handle(&session.flow, row, nonce) {
            Ok(Some(index)) => {
                self.control.counters.handles_given += 1;
                session.connection.advertise(Handle {
                    index,
                    nonce,
                    marker,
                });
            }
            Ok(None) => self.control.counters.handles_lacking += 1,
            Err(error) => warn!(%error, session = session.id.0, "cannot make a handle"),
        }
    }
}
