//! The RST for a segment that belongs to no connection.

use portolan_types::SeqNum;
use portolan_wire::tcp::{TcpFlags, TcpHeader};

/// Returns the answer to a segment without a session, if there is one (RFC 9293 §3.10.7.1).
pub fn reset_for(header: &TcpHeader, payload_len: usize) -> Option<TcpHeader> {
    if header.flags.contains(TcpFlags::RST) {
        return None;
    }
    let (seq, ack, flags) = if header.flags.contains(TcpFlags::ACK) {
        (header.ack, SeqNum(0), TcpFlags::RST)
    } else {
        let controls = u32::from(header.flags.contains(TcpFlags::SYN))
            + u32::from(header.flags.contains(TcpFlags::FIN));
        let end = header.seq + payload_len as u32 + controls;
        (SeqNum(0), end, TcpFlags::RST.with(TcpFlags::ACK))
    };
    Some(TcpHeader {
        source_port: header.destination_port,
        destination_port: header.source_port,
        seq,
        ack,
        flags,
        ..TcpHeader::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(flags: TcpFlags) -> TcpHeader {
        TcpHeader {
            source_port: 1,
            destination_port: 2,
            seq: SeqNum(100),
            ack: SeqNum(200),
            flags,
            ..TcpHeader::default()
        }
    }

    #[test]
    fn a_reset_is_not_answered() {
        assert_eq!(reset_for(&segment(TcpFlags::RST), 0), None);
    }

    #[test]
    fn a_segment_with_an_acknowledgement_gets_a_reset_with_that_number() {
        let reset = reset_for(&segment(TcpFlags::ACK), 10).unwrap();
        assert_eq!((reset.seq, reset.flags), (SeqNum(200), TcpFlags::RST));
        assert_eq!((reset.source_port, reset.destination_port), (2, 1));
    }

    #[test]
    fn a_segment_without_one_gets_a_reset_that_acknowledges_all_of_it() {
        let reset = reset_for(&segment(TcpFlags::SYN), 10).unwrap();
        assert_eq!((reset.seq, reset.ack), (SeqNum(0), SeqNum(111)));
        assert_eq!(reset.flags, TcpFlags::RST.with(TcpFlags::ACK));
    }
}
