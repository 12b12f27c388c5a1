//! Effects of a class on sessions whose frames do not leave by their process's tap: sessions held by the server
//! are paced, and the kernel sockets of others are put into the class.

use portolan_control::{Holder, SessionEntry};
use portolan_sys::descriptor::{priority_takes_lock, set_socket_option};
use portolan_sys::traffic;
use portolan_types::SessionId;
use tracing::warn;

use super::Class;
use crate::requests::Answer;
use crate::reservation::PortReservation;
use crate::server::Server;

impl Server {
    /// Applies a changed class to the session.
    pub(super) fn tell_session(&mut self, id: SessionId) {
        self.renew_rows(id);
        self.rx_throttle_held(id);
        self.classify_kernel_socket(id);
    }

    /// Paces a session held by the server to its class. The server sends everything by one tap, where a slow
    /// class would stop all other sessions.
    pub(crate) fn rx_throttle_held(&mut self, id: SessionId) {
        if self.qos.transmit.held.is_empty() && !self.handles.is_paced(id) {
            return;
        }
        let Some(slot) = self.server_slot(id) else {
            return;
        };
        let class = self
            .control
            .registry
            .session(id)
            .and_then(|session| self.class_over(session));
        let Some(session) = self.stack.tcp(slot) else {
            return;
        };
        let options = session.connection.options();
        match class {
            Some(class) => {
                let paced = &mut self.handles.of(id).paced;
                let own = *paced.get_or_insert(options.max_pacing);
                let most = class.terms.ceiling / 8;
                options.max_pacing = Some(own.map_or(most, |own| own.min(most)));
            }
            None => {
                if let Some(own) = self.handles.take_paced(id) {
                    options.max_pacing = own;
                }
            }
        }
    }

    pub(crate) fn has_reservations(&self) -> bool {
        !self.qos.transmit.held.is_empty()
    }

    /// Puts the kernel socket of a UDP session into the session's class.
    pub(crate) fn classify_kernel_socket(&mut self, id: SessionId) {
        if !self.is_udp(id) {
            return;
        }
        let session = self.control.registry.session(id);
        let class = session.and_then(|session| self.class_over(session));
        let Some(port) = self.handles.port(id) else {
            return;
        };
        let chosen = session.map_or(0, |session| u32::from(session.priority));
        let priority = class.map_or(chosen, |class| {
            u32::from(traffic::HANDLE) << 16 | u32::from(class.minor.0)
        });
        let set = move |port: &PortReservation| {
            let value = priority.to_ne_bytes();
            let set = set_socket_option(port, libc::SOL_SOCKET, libc::SO_PRIORITY, &value);
            if let Err(errno) = set {
                warn!(%errno, "what a kernel socket sends is in no class");
            }
        };
        if !priority_takes_lock() {
            set(&port.socket);
            return;
        }
        let call = self.call_on_port(id, move |port| {
            set(port);
            Box::new(|_| Ok(Answer::Silence))
        });
        if let Ok(Answer::Call(call)) = call {
            self.calls.begin(None, call);
        }
    }

    /// Returns the session's own class, or its process's.
    fn class_over(&self, session: &SessionEntry) -> Option<Class> {
        let of_process = || self.class_of_channel(session.owner()?);
        self.class_of(session).or_else(of_process)
    }

    /// Returns the class in the session's row: its own, or its process's while the server sends for it.
    pub(crate) fn row_class(&self, session: &SessionEntry) -> u16 {
        if self.qos.transmit.held.is_empty() {
            return 0;
        }
        let class = match session.holder {
            Holder::Server(_) => self.class_over(session),
            Holder::Process(channel, _) if self.goes_on_as_before(session, channel) => None,
            _ => self.class_of(session),
        };
        class.map_or(0, |class| class.minor.0)
    }
}
