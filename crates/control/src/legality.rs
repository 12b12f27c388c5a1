//! The table of commands and of when each is legal. Every request about a session is checked
//! against it first.

use portolan_proto::control::RequestBody;
use portolan_types::Protocol;

use crate::errno::Errno;

/// The requests that name a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Bind,
    Connect,
    Listen,
    Accept,
    Cache,
    Flush,
    Release,
    Disconnect,
    KernelSocket,
    Group,
    /// Actions of the process that performs a listener's handshakes.
    Serve,
    /// A process hands over a connection that it has opened itself.
    Register,
    StopListening,
}

impl Command {
    pub const ALL: [Command; 13] = [
        Command::Bind,
        Command::Connect,
        Command::Listen,
        Command::Accept,
        Command::Cache,
        Command::Flush,
        Command::Release,
        Command::Disconnect,
        Command::KernelSocket,
        Command::Group,
        Command::Serve,
        Command::Register,
        Command::StopListening,
    ];

    pub fn of(body: &RequestBody) -> Option<Command> {
        Some(match body {
            RequestBody::Bind { .. }
            | RequestBody::ReplaceDescriptor { .. }
            | RequestBody::Describe { .. } => Command::Bind,
            RequestBody::Connect { .. } => Command::Connect,
            RequestBody::Listen { .. } | RequestBody::PortToken { .. } => Command::Listen,
            RequestBody::StopListening { .. } => Command::StopListening,
            RequestBody::Accepted { .. } => Command::Accept,
            RequestBody::Cache { .. } => Command::Cache,
            RequestBody::BeginFlush { .. }
            | RequestBody::AbortFlush { .. }
            | RequestBody::Flush { .. } => Command::Flush,
            RequestBody::Release { .. } => Command::Release,
            RequestBody::Disconnect { .. } => Command::Disconnect,
            RequestBody::KernelSocket { .. } => Command::KernelSocket,
            RequestBody::Group { .. } => Command::Group,
            RequestBody::Register { .. } | RequestBody::ReturnClosed { .. } => Command::Register,
            RequestBody::ReturnPending { .. }
            | RequestBody::Flooded { .. }
            | RequestBody::ExemptFlows { .. }
            | RequestBody::TakePart { .. }
            | RequestBody::EndDelegation { .. } => Command::Serve,
            _ => return None,
        })
    }
}

/// Phase of a session's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionPhase {
    /// Does not exist yet: `SessionRef::New`.
    New,
    /// Has a local endpoint and no peer.
    Bound,
    /// A port from which its process opens connections itself.
    Leased,
    Listening,
    /// The server performs an active open.
    Connecting,
    /// The server performs a passive open; no process knows the session.
    Handshake,
    /// In an accept queue.
    Offered,
    /// Held by a process; TCP is connected, UDP has a peer.
    Connected,
    /// Held by the server and moved through its descriptor.
    Relayed,
    /// Held by the server for the next process that asks for it.
    Parked,
    /// The server finishes the session; no process has it any more.
    Closing,
}

impl SessionPhase {
    pub const ALL: [SessionPhase; 11] = [
        SessionPhase::New,
        SessionPhase::Bound,
        SessionPhase::Leased,
        SessionPhase::Listening,
        SessionPhase::Connecting,
        SessionPhase::Handshake,
        SessionPhase::Offered,
        SessionPhase::Connected,
        SessionPhase::Relayed,
        SessionPhase::Parked,
        SessionPhase::Closing,
    ];
}

/// Checks whether `command` is legal for a session of `protocol` in `phase`. The errno is Linux's.
pub fn check(command: Command, protocol: Protocol, phase: SessionPhase) -> Result<(), Errno> {
    use Command as C;
    use Protocol::{Tcp, Udp};
    use SessionPhase as P;
    match (command, protocol, phase) {
        // No process may refer to these.
        (_, _, P::Handshake | P::Closing) => Err(Errno::BADF),

        // Only the port is there, for connections of their own.
        (C::Register, Tcp, P::Leased | P::Listening) => Ok(()),
        (C::Register, _, _) => Err(Errno::INVAL),
        (_, _, P::Leased) => Err(Errno::INVAL),

        // A session that has a port already is refused where the port is checked.
        (C::Bind, _, P::New) | (C::Bind, Tcp, P::Bound) => Ok(()),
        (C::Bind, _, _) => Err(Errno::INVAL),

        (C::Connect, _, P::New | P::Bound) => Ok(()),
        (C::Connect, Udp, P::Connected) => Ok(()),
        (C::Connect, Tcp, P::Connecting) => Err(Errno::ALREADY),
        (C::Connect, _, _) => Err(Errno::ISCONN),

        (C::Listen, Udp, _) => Err(Errno::OPNOTSUPP),
        (C::Listen, Tcp, P::New | P::Bound | P::Listening) => Ok(()),
        (C::Listen, Tcp, _) => Err(Errno::INVAL),

        (C::Accept, Tcp, P::Offered) => Ok(()),
        (C::Accept, _, _) => Err(Errno::INVAL),

        (C::Cache, Tcp, P::Offered | P::Relayed | P::Parked | P::Connected) => Ok(()),
        (C::Cache, _, _) => Err(Errno::INVAL),

        (C::Flush, Tcp, P::Connected) => Ok(()),
        (C::Flush, Udp, P::Connected | P::Bound) => Ok(()),
        (C::Flush, _, _) => Err(Errno::NOTCONN),

        (C::Release, _, P::New) => Err(Errno::BADF),
        // A connected TCP session has state for a capsule: it must be flushed.
        (C::Release, Tcp, P::Connected) => Err(Errno::INVAL),
        (C::Release, _, _) => Ok(()),

        (C::Disconnect, Udp, P::Connected | P::Bound) => Ok(()),
        (C::Disconnect, _, _) => Err(Errno::INVAL),

        (C::KernelSocket | C::Group, Udp, P::Connected | P::Bound) => Ok(()),
        (C::KernelSocket | C::Group, _, _) => Err(Errno::INVAL),

        (C::Serve | C::StopListening, Tcp, P::Listening) => Ok(()),
        (C::Serve | C::StopListening, _, _) => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legal(command: Command, protocol: Protocol) -> Vec<SessionPhase> {
        SessionPhase::ALL
            .into_iter()
            .filter(|&phase| check(command, protocol, phase).is_ok())
            .collect()
    }

    #[test]
    fn the_table_for_tcp_reads_as_written() {
        use SessionPhase as P;
        let expected: [(Command, &[SessionPhase]); 12] = [
            (Command::Bind, &[P::New, P::Bound]),
            (Command::Connect, &[P::New, P::Bound]),
            (Command::Listen, &[P::New, P::Bound, P::Listening]),
            (
                Command::Cache,
                &[P::Offered, P::Connected, P::Relayed, P::Parked],
            ),
            (Command::Flush, &[P::Connected]),
            (
                Command::Release,
                &[
                    P::Bound,
                    P::Listening,
                    P::Connecting,
                    P::Offered,
                    P::Relayed,
                    P::Parked,
                ],
            ),
            (Command::Disconnect, &[]),
            (Command::KernelSocket, &[]),
            (Command::Group, &[]),
            (Command::Serve, &[P::Listening]),
            (Command::Register, &[P::Leased, P::Listening]),
            (Command::StopListening, &[P::Listening]),
        ];
        for (command, phases) in expected {
            assert_eq!(legal(command, Protocol::Tcp), phases, "{command:?}");
        }
    }

    #[test]
    fn udp_never_listens_and_may_change_its_peer() {
        assert!(legal(Command::Listen, Protocol::Udp).is_empty());
        assert!(legal(Command::Connect, Protocol::Udp).contains(&SessionPhase::Connected));
        assert!(legal(Command::Disconnect, Protocol::Udp).contains(&SessionPhase::Connected));
    }

    #[test]
    fn nobody_touches_a_session_that_the_server_finishes() {
        for command in Command::ALL {
            for phase in [SessionPhase::Closing, SessionPhase::Handshake] {
                assert!(check(command, Protocol::Tcp, phase).is_err());
            }
        }
    }
}
