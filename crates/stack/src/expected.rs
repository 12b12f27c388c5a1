//! The precomputed header filter (BR §3.2): one masked compare over the Ethernet, IP and TCP headers
//! tells whether a frame is what an undisturbed connection expects next. If so, nothing needs to be parsed:
//! endpoints, protocol, lengths, flags and options are known to match the last frame. Everything else takes
//! the slow path: fragments, IP options and extension headers, congestion marks, urgent data, SYN, FIN, RST,
//! other TCP options, holes. Both paths verify checksums; the TCP engine rejects old timestamps.

use portolan_tcp::Codepoint;
use portolan_types::{Protocol, SeqNum};
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::tcp::{self, TcpFlags, TcpHeader, TcpOptions, Timestamps};

use self::pattern::{IP, LONGEST, Pattern, START, is_plain_v4, mask_of_ip, transport_at};
use crate::packet::{Packet, Transport};

mod datagram;
mod pattern;

pub(crate) use datagram::ExpectedDatagram;

/// Lengths of the TCP header without options, and with timestamps aligned as RFC 7323 appendix A recommends.
const BARE: usize = 20;
const STAMPED: usize = 32;
const ALIGNED: [u8; 4] = [1, 1, 8, 10];

/// The expected headers of the next frame.
#[derive(Debug)]
pub(crate) struct Expected {
    pattern: Pattern,
    source_port: u16,
    destination_port: u16,
    /// Checksum of both addresses and the protocol.
    pseudo: Sum,
    seq: SeqNum,
}

/// An expected segment, with the fields that [`Packet::parse`] would have returned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    pub(crate) header: TcpHeader,
    pub(crate) payload: &'a [u8],
    pub(crate) codepoint: Codepoint,
}

impl Expected {
    /// Learns from a frame of the connection; returns none if its headers have an unusual form.
    pub(crate) fn after(frame: &[u8], packet: &Packet<'_>, next: SeqNum) -> Option<Expected> {
        let Transport::Tcp { header, .. } = &packet.transport else {
            return None;
        };
        let is_v4 = is_plain_v4(frame, Protocol::Tcp.number())?;
        let tcp = transport_at(is_v4);
        let length = match frame.get(tcp + 12)? >> 4 {
            5 => BARE,
            8 if frame.get(tcp + BARE..tcp + BARE + 4)? == ALIGNED => STAMPED,
            _ => return None,
        };
        let (mask, payload) = (mask_of(is_v4, length), tcp + length);
        let mut value = [0; LONGEST];
        let compared = payload - START;
        value[..compared].copy_from_slice(frame.get(START..payload)?);
        if is_v4 {
            // Clear the ECN bits and the fragment fields.
            value[IP - START + 1] = 0;
            value[IP - START + 6] = 0;
            value[IP - START + 7] = 0;
        } else {
            value[IP - START + 1] &= !0x30;
        }
        value[tcp - START + 13] = TcpFlags::ACK.0;
        Some(Expected {
            pattern: Pattern::new(&value, &mask, (tcp, payload)),
            source_port: header.source_port,
            destination_port: header.destination_port,
            pseudo: Sum::pseudo_header(
                packet.source.ip(),
                packet.destination.ip(),
                Protocol::Tcp.number(),
                0,
            ),
            seq: next,
        })
    }

    /// Sets the sequence number of the next expected byte.
    pub(crate) fn expect(&mut self, next: SeqNum) {
        self.seq = next;
    }

    /// Extracts the segment if the frame is as expected.
    pub(crate) fn meet<'a>(&self, frame: &'a [u8]) -> Option<Segment<'a>> {
        if !self.pattern.fits(frame) {
            return None;
        }
        let tcp = frame.get(self.pattern.transport..)?;
        let number = |at: usize| tcp.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let seq = SeqNum(number(4)?);
        if seq != self.seq || !self.pattern.is_whole(frame) || !self.is_sound(tcp) {
            return None;
        }
        let flags = TcpFlags(*tcp.get(13)?);
        let window = u16::from_be_bytes(tcp.get(14..16)?.try_into().ok()?);
        let urgent = u16::from_be_bytes(tcp.get(18..20)?.try_into().ok()?);
        let timestamps = match self.pattern.payload - self.pattern.transport {
            STAMPED => Some(Timestamps {
                value: number(24)?,
                echo: number(28)?,
            }),
            _ => None,
        };
        Some(Segment {
            header: TcpHeader {
                source_port: self.source_port,
                destination_port: self.destination_port,
                seq,
                ack: SeqNum(number(8)?),
                flags,
                window,
                urgent,
                options: TcpOptions {
                    timestamps,
                    ..TcpOptions::default()
                },
            },
            payload: frame.get(self.pattern.payload..)?,
            codepoint: Codepoint::NotEct,
        })
    }

    fn is_sound(&self, segment: &[u8]) -> bool {
        let length = u32::try_from(segment.len()).unwrap_or(u32::MAX);
        let pseudo = self.pseudo.over(&length.to_be_bytes());
        verify(pseudo, segment, tcp::CHECKSUM_AT, Offload::MayBePartial)
    }
}

/// The bits that must not change. Excluded, besides those [`mask_of_ip`] leaves out, are: sequence and acknowledgement
/// numbers, PSH, window, urgent pointer, timestamps, checksum. Congestion marks are included.
fn mask_of(is_v4: bool, length: usize) -> [u8; LONGEST] {
    let mut mask = [0; LONGEST];
    let tcp = mask_of_ip(&mut mask, is_v4);
    mask[IP - START + 1] = if is_v4 { 0x03 } else { 0x30 };
    mask[tcp..tcp + 4].fill(0xff);
    mask[tcp + 12] = 0xff;
    mask[tcp + 13] = !TcpFlags::PSH.0;
    if length == STAMPED {
        mask[tcp + BARE..tcp + BARE + 4].fill(0xff);
    }
    mask
}

#[cfg(test)]
mod tests;
