//! Explicit congestion notification (RFC 3168): the codepoints of IP headers, and what a connection
//! that negotiated it must echo.

use portolan_types::Instant;
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use crate::config::EcnMode;
use crate::connection::Connection;
use crate::encoding;
use crate::receive::AckSchedule;

/// The two low bits of the traffic class (RFC 3168 §5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Codepoint {
    #[default]
    NotEct,
    Ect1,
    Ect0,
    /// Congestion experienced.
    Ce,
}

impl Codepoint {
    /// The codepoint in an IPv4 TOS byte or an IPv6 traffic class.
    pub const fn of_traffic_class(class: u8) -> Codepoint {
        match class & 3 {
            0 => Codepoint::NotEct,
            1 => Codepoint::Ect1,
            2 => Codepoint::Ect0,
            _ => Codepoint::Ce,
        }
    }

    pub const fn bits(self) -> u8 {
        match self {
            Codepoint::NotEct => 0,
            Codepoint::Ect1 => 1,
            Codepoint::Ect0 => 2,
            Codepoint::Ce => 3,
        }
    }
}

/// State of a connection that negotiated ECN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ecn {
    /// Acknowledgements echo a mark until the peer reports that it has reduced its window.
    pub(crate) echo: bool,
}

encoding::fields!(Ecn { echo });

impl Ecn {
    const ASK: TcpFlags = TcpFlags::ECE.with(TcpFlags::CWR);

    /// RFC 3168 §6.1.1: the flags of a SYN.
    pub(crate) const fn syn_flags(answer: bool) -> TcpFlags {
        if answer { TcpFlags::ECE } else { Ecn::ASK }
    }

    /// Whether `mode` accepts the request of a SYN.
    pub(crate) fn accepts(mode: EcnMode, syn: &TcpHeader) -> bool {
        mode != EcnMode::Off && syn.flags.contains(Ecn::ASK)
    }

    /// Whether a SYN+ACK agrees; both bits together are an echo from a peer that supports neither.
    pub(crate) fn agreed(header: &TcpHeader) -> bool {
        header.flags.contains(TcpFlags::ECE) && !header.flags.contains(TcpFlags::CWR)
    }
}

impl Connection {
    /// Like `on_segment`, for a segment whose IP header carried `codepoint`.
    pub fn on_marked_segment(
        &mut self,
        now: Instant,
        codepoint: Codepoint,
        header: &TcpHeader,
        payload: &[u8],
    ) {
        let notable = codepoint == Codepoint::Ce || header.flags.contains(TcpFlags::CWR);
        if notable && self.ecn.is_some() {
            self.note_congestion(codepoint, header, payload.len() as u32);
        }
        self.on_segment(now, header, payload);
    }

    /// RFC 3168 §6.1.3: the receiving side.
    fn note_congestion(&mut self, codepoint: Codepoint, header: &TcpHeader, len: u32) {
        let text = len > 0 && self.receive.acceptable(header.seq, header.seq + len);
        let Some(ecn) = self.ecn.as_mut().filter(|_| text) else {
            return;
        };
        let before = ecn.echo;
        ecn.echo &= !header.flags.contains(TcpFlags::CWR);
        ecn.echo |= codepoint == Codepoint::Ce;
        if ecn.echo != before {
            // The peer's window may have become small: acknowledge at once.
            self.receive.want_ack(AckSchedule::Now);
        }
    }
}
