//! Why a connection ended, and the ICMP errors that may affect it.

use portolan_types::SeqNum;

use crate::encoding;

/// Why a connection ended, or is expected to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    #[error("connection refused")]
    Refused,
    #[error("connection reset by peer")]
    Reset,
    #[error("connection timed out")]
    TimedOut,
    #[error("host is unreachable")]
    HostUnreachable,
    #[error("network is unreachable")]
    NetworkUnreachable,
    #[error("protocol not available")]
    ProtocolUnreachable,
    #[error("operation not supported")]
    Unsupported,
    #[error("host is down")]
    HostDown,
    #[error("machine is not on the network")]
    NoNetwork,
    #[error("administratively prohibited")]
    Prohibited,
    #[error("connection aborted")]
    Aborted,
    #[error("broken pipe")]
    BrokenPipe,
}

encoding::variants!(Error {
    0 => Refused,
    1 => Reset,
    2 => TimedOut,
    3 => HostUnreachable,
    4 => NetworkUnreachable,
    5 => ProtocolUnreachable,
    6 => Unsupported,
    7 => HostDown,
    8 => NoNetwork,
    9 => Prohibited,
    10 => Aborted,
    11 => BrokenPipe,
});

impl Error {
    /// The Linux error number of this error.
    pub const fn errno(self) -> i32 {
        match self {
            Error::Prohibited => 13,
            Error::BrokenPipe => 32,
            Error::NoNetwork => 64,
            Error::ProtocolUnreachable => 92,
            Error::Unsupported => 95,
            Error::NetworkUnreachable => 101,
            Error::Aborted => 103,
            Error::Reset => 104,
            Error::TimedOut => 110,
            Error::Refused => 111,
            Error::HostDown => 112,
            Error::HostUnreachable => 113,
        }
    }
}

/// An ICMP error that quotes a segment of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IcmpError {
    /// Sequence number in the quoted header (RFC 5927 §4).
    pub quoted: SeqNum,
    pub kind: IcmpKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpKind {
    /// `hard` errors end a connection that is still opening; all others are reported if it times out.
    Unreachable { hard: bool, error: Error },
    /// The path carries segments of at most this payload (without options).
    TooBig { mtu_payload: u16 },
}
