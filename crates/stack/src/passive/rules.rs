//! What the server tells a library that performs handshakes or opens connections. The number of the protocol stands for it, too.

use portolan_tcp::Config;
use serde::{Deserialize, Serialize};

/// What holds for all handshakes of a host, as the server tells it to a library that performs some.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Of connections before their path and their listener are known.
    pub config: Config,
    pub cookies: CookieUse,
    pub syn_ack_retries: u8,
    /// For cookies and initial numbers of the port. The server knows it, and goes on with it.
    pub secret: [u8; 16],
}

/// What holds for connections that a library opens itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRules {
    /// Of connections before their path and the application's options are known.
    pub config: Config,
    pub syn_retries: u8,
    /// For initial numbers: the same for all processes of a user, so that they do not go back when another process has a
    /// port.
    pub secret: [u8; 16],
    /// For the offsets of timestamps: the same for all connections that are opened from this host.
    pub timestamp_secret: [u8; 16],
}

/// When SYNs are answered by cookies; Linux's `tcp_syncookies`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CookieUse {
    /// A SYN that finds the queue full is dropped.
    Never,
    #[default]
    WhenFull,
    Always,
}
