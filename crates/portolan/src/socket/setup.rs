//! What a socket knows of its session besides its phase: addresses, the session's number, descriptors for the server.

use std::net::SocketAddr;

use portolan_types::SessionId;

use crate::descriptors::InternalFd;
use crate::socket::pair::Pair;

/// State for opening, binding and closing; locked across calls to the server.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// Set once the server knows the socket.
    pub(crate) session: Option<SessionId>,
    /// Of a connection that the server does not know yet.
    pub(crate) unregistered: Option<Unregistered>,
    /// Incarnation of the server under which it was opened; 0 if unknown.
    pub(crate) incarnation: u64,
    /// For a listener: a kernel socket on its port, to listen on while there is no server.
    pub(crate) port_token: Option<InternalFd>,
    /// For a listener or an open whose server is gone: the other end of a descriptor that nobody writes to.
    pub(crate) silent_far: Option<InternalFd>,
    /// Its descriptor preserves message boundaries: a bound TCP socket's does, so that all processes with a
    /// copy find the connections to accept there, whichever of them calls `listen`.
    pub(crate) carries_messages: bool,
    /// The near end, if the application has closed it during a call that still needs it.
    pub(crate) kept: Option<InternalFd>,
    pub(crate) local: Option<SocketAddr>,
    /// The application chose `local`.
    pub(crate) is_bound: bool,
    /// The application chose the port, too: it is kept when the connection ends or the listener stops.
    pub(crate) has_chosen_port: bool,
    /// `local` is the socket's last address; as on Linux `getsockname` still shows it.
    pub(crate) is_local_stale: bool,
    pub(crate) remote: Option<SocketAddr>,
    /// Destination of an open that waits for data for its SYN (`TCP_FASTOPEN_CONNECT`).
    pub(crate) deferred: Option<SocketAddr>,
    /// The server has the connection, and relays it when something is written to its descriptor.
    pub(crate) relays_writes: bool,
    /// An active open that brings nothing but its SYN, from a port that the server chooses: the next server can try again.
    pub(crate) is_open_repeatable: bool,
    /// Of the last `listen`.
    pub(crate) backlog: u32,
}

/// What a connection needs when it is registered.
#[derive(Debug)]
pub(crate) struct Unregistered {
    /// The listener, or the leased port.
    pub(crate) port: SessionId,
    /// Those of its descriptor.
    pub(crate) pair: Pair,
}

impl Setup {
    /// The connection failed, or the listener stopped; the server has released a port that it had chosen itself.
    pub(crate) fn give_up_unchosen_port(&mut self) {
        if !self.has_chosen_port {
            self.is_local_stale = true;
            self.is_bound = false;
        }
    }

    /// Sets the endpoint that the session has from now on.
    pub(crate) fn set_local(&mut self, local: SocketAddr) {
        self.local = Some(local);
        self.is_local_stale = false;
    }

    pub(crate) fn has_port(&self) -> bool {
        self.local.is_some() && !self.is_local_stale
    }
}
