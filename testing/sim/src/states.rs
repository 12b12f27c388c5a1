//! Connections in given states, for tests of single segments.

use portolan_tcp::{Config, Connection, StateName};
use portolan_types::SeqNum;
use portolan_wire::tcp::TcpFlags;

use crate::{START, segment};

/// The connection's initial sequence number.
pub const ISS: SeqNum = SeqNum(1000);
/// The peer's initial sequence number.
pub const IRS: SeqNum = SeqNum(5000);

/// All states of a connection before it is closed.
pub const STATES: [StateName; 9] = [
    StateName::SynSent,
    StateName::SynReceived,
    StateName::Established,
    StateName::FinWait1,
    StateName::FinWait2,
    StateName::CloseWait,
    StateName::Closing,
    StateName::LastAck,
    StateName::TimeWait,
];

/// Returns a connection from port 1 to port 2 on its way to `state`: an active open for SYN-SENT, otherwise
/// a passive one. Also returns the sequence number that its peer uses next.
pub fn begin(state: StateName) -> (Connection, SeqNum) {
    let config = Config {
        timestamps: false,
        ..Config::default()
    };
    match state {
        StateName::SynSent => (Connection::connect(&config, 1, 2, ISS, START), IRS),
        _ => {
            let syn = segment(2, 1, IRS, TcpFlags::SYN);
            (Connection::accept(&config, &syn, ISS, START), IRS + 1)
        }
    }
}
