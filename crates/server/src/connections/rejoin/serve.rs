//! Requests of processes that reopen a session, and of those that find it reopened.

use portolan_control::{Command, Errno};
use portolan_proto::control::ReplyBody;
use portolan_types::{ChannelId, Protocol, SessionId};

use crate::requests::Answer;
use crate::server::Server;

impl Server {
    /// `Bind` of a session that another process may have reopened already; none if it has not.
    pub(crate) fn rejoin(
        &mut self,
        channel: ChannelId,
        id: SessionId,
    ) -> Result<Option<Answer>, Errno> {
        if id == SessionId::NONE {
            return Err(Errno::BADF);
        }
        let Some(session) = self.control.registry.session(id) else {
            return Ok(None);
        };
        let (protocol, local) = (session.protocol, session.local);
        if protocol != Protocol::Tcp {
            return Err(Errno::ADDRINUSE);
        }
        self.control.registry.admit(channel, Command::Listen, id)?;
        let handles = self.handles.of(id);
        let rejoining = handles.rejoining.as_mut().ok_or(Errno::ADDRINUSE)?;
        let near = rejoining.near.try_clone().map_err(|_| Errno::NOBUFS)?;
        rejoining.processes.insert(channel);
        self.control.registry.entitle(id, channel);
        self.control.counters.rejoined += 1;
        let rejoined = ReplyBody::Rejoined { local };
        Ok(Some(Answer::Reply(rejoined, vec![near])))
    }

    /// Handles a process that has closed the descriptor, or exited. After the last one the server closes its copy, so
    /// that the descriptor's hang-up is reported again.
    pub(crate) fn leave_rejoined(&mut self, id: SessionId, channel: ChannelId) {
        let Some(handles) = self.handles.get_mut(id) else {
            return;
        };
        let Some(rejoining) = &mut handles.rejoining else {
            return;
        };
        rejoining.processes.remove(&channel);
        if rejoining.processes.is_empty()
            && let Some(rejoining) = handles.rejoining.take()
        {
            self.sink.close(rejoining.into_near());
        }
    }

    /// `PortToken`: hands out a copy of the listener's port token.
    pub(crate) fn hand_out_port_token(
        &mut self,
        channel: ChannelId,
        id: SessionId,
    ) -> Result<Answer, Errno> {
        self.control.registry.admit(channel, Command::Listen, id)?;
        let port = self.handles.port(id).ok_or(Errno::INVAL)?;
        let token = port.token_socket.as_ref().ok_or(Errno::INVAL)?;
        let copy = token.try_clone().map_err(|_| Errno::NOBUFS)?;
        Ok(Answer::Reply(ReplyBody::PortToken, vec![copy]))
    }
}
