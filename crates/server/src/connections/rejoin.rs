//! Sessions of the previous server: processes that reopen them keep their numbers. Several processes may share the
//! descriptor of one listener, as forked workers do, and all find it dead. The first one reopens the listener, and the
//! others get its new descriptor from the server, which keeps a copy as long as one of these processes has it.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use portolan_control::{Command, Errno};
use portolan_proto::control::ReplyBody;
use portolan_types::{ChannelId, Protocol, SessionId};

use crate::requests::Answer;
use crate::server::Server;

/// The descriptor of a reopened session, for other processes that had it under the previous server.
#[derive(Debug)]
pub struct Rejoining {
    near: OwnedFd,
    processes: BTreeSet<ChannelId>,
}

impl Rejoining {
    pub fn new(near: OwnedFd, first: ChannelId) -> Rejoining {
        Rejoining {
            near,
            processes: BTreeSet::from([first]),
        }
    }

    pub fn into_near(self) -> OwnedFd {
        self.near
    }
}

impl Server {
    /// `Bind` of a session that another process may have reopened already; none if it has not.
    pub fn rejoin(&mut self, channel: ChannelId, id: SessionId) -> Result<Option<Answer>, Errno> {
        if id.0 == 0 {
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
    pub fn leave_rejoined(&mut self, id: SessionId, channel: ChannelId) {
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
    pub fn hand_out_port_token(
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
