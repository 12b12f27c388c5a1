//! The precomputed header filter (BR §3.2): one masked compare over the headers of Ethernet, IP and TCP
//! says whether a frame is what an undisturbed connection expects next. Then nothing needs to be taken
//! apart: endpoints, protocol, lengths, flags and options are known to be as in the last one. Everything
//! else takes the standard path: fragments, IP options and extension headers, congestion marks, urgent data, SYN,
//! FIN, RST, other TCP options, holes. Checksums are verified on both, and old timestamps are the engine's to refuse.

use portolan_tcp::Codepoint;
use portolan_types::{Protocol, SeqNum};
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::tcp::{self, TcpFlags, TcpHeader, TcpOptions, Timestamps};

use crate::packet::{Packet, Transport};

/// What is compared begins with the type of Ethernet.
const START: usize = 12;
const IP: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;

/// Of TCP: without options, and with timestamps aligned as RFC 7323 appendix A has them.
const BARE: usize = 20;
const STAMPED: usize = 32;
const ALIGNED: [u8; 4] = [1, 1, 8, 10];

const WORD: usize = 8;
/// Ethernet's type, the longest headers, and what fills the last word.
const LONGEST: usize = (2 + IPV6 + STAMPED).next_multiple_of(WORD);
const WORDS: usize = LONGEST / WORD;

/// What the headers of the next frame are to be.
#[derive(Debug)]
pub(crate) struct Expected {
    /// Which bits count, and what they are.
    masks: [u64; WORDS],
    values: [u64; WORDS],
    words: usize,
    /// Where TCP's header begins, and the payload.
    tcp: usize,
    payload: usize,
    source_port: u16,
    destination_port: u16,
    /// Of both addresses and the protocol.
    pseudo: Sum,
    seq: SeqNum,
}

/// A segment that was expected, as [`Packet::parse`] would have told it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    pub(crate) header: TcpHeader,
    pub(crate) payload: &'a [u8],
    pub(crate) codepoint: Codepoint,
}

impl Expected {
    /// Learns from a frame of the connection; none if it is of a shape that is seldom seen.
    pub(crate) fn after(frame: &[u8], packet: &Packet<'_>, next: SeqNum) -> Option<Expected> {
        let Transport::Tcp { header, .. } = &packet.transport else {
            return None;
        };
        let is_v4 = match (frame.get(START..IP)?, frame.get(IP)?) {
            ([0x08, 0x00], 0x45) => true,
            ([0x86, 0xdd], first) if first >> 4 == 6 && frame.get(IP + 6) == Some(&6) => false,
            _ => return None,
        };
        let tcp = IP + if is_v4 { IPV4 } else { IPV6 };
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
            // Of the ECN bits and the fragment's place: none.
            value[IP - START + 1] = 0;
            value[IP - START + 6] = 0;
            value[IP - START + 7] = 0;
        } else {
            value[IP - START + 1] &= !0x30;
        }
        value[tcp - START + 13] = TcpFlags::ACK.0;
        let words = compared.div_ceil(WORD);
        let masks = words_of(&mask);
        let values = words_of(&value);
        Some(Expected {
            masks,
            values: core::array::from_fn(|i| values[i] & masks[i]),
            words,
            tcp,
            payload,
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

    /// The next octet that is expected.
    pub(crate) fn expect(&mut self, next: SeqNum) {
        self.seq = next;
    }

    /// Takes the frame apart if it is as expected.
    pub(crate) fn meet<'a>(&self, frame: &'a [u8]) -> Option<Segment<'a>> {
        let headers = frame.get(START..self.payload)?;
        if !self.is_like(headers) {
            return None;
        }
        let tcp = frame.get(self.tcp..)?;
        let number = |at: usize| tcp.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        let seq = SeqNum(number(4)?);
        if seq != self.seq || !self.has_right_length(frame) || !self.is_sound(frame) {
            return None;
        }
        let flags = TcpFlags(*tcp.get(13)?);
        let window = u16::from_be_bytes(tcp.get(14..16)?.try_into().ok()?);
        let urgent = u16::from_be_bytes(tcp.get(18..20)?.try_into().ok()?);
        let timestamps = match self.payload - self.tcp {
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
            payload: frame.get(self.payload..)?,
            codepoint: Codepoint::NotEct,
        })
    }

    fn is_like(&self, headers: &[u8]) -> bool {
        let mut differs = 0;
        let mut chunks = headers.chunks_exact(WORD);
        let mut index = 0;
        for chunk in &mut chunks {
            let word = u64::from_ne_bytes(chunk.try_into().unwrap_or([0; WORD]));
            differs |= (word & self.masks[index]) ^ self.values[index];
            index += 1;
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut last = [0; WORD];
            last[..rest.len()].copy_from_slice(rest);
            differs |= (u64::from_ne_bytes(last) & self.masks[index]) ^ self.values[index];
            index += 1;
        }
        differs == 0 && index == self.words
    }

    /// Neither padded nor cut short.
    fn has_right_length(&self, frame: &[u8]) -> bool {
        let (at, before) = match self.tcp - IP {
            IPV4 => (IP + 2, IP),
            _ => (IP + 4, IP + IPV6),
        };
        let said = u16::from_be_bytes([frame[at], frame[at + 1]]);
        usize::from(said) == frame.len() - before
    }

    fn is_sound(&self, frame: &[u8]) -> bool {
        let (headers, segment) = frame.split_at(self.tcp);
        let is_v4 = self.tcp - IP == IPV4;
        if is_v4 && Sum::default().over(&headers[IP..]).folded() != 0xffff {
            return false;
        }
        let length = u32::try_from(segment.len()).unwrap_or(u32::MAX);
        let pseudo = self.pseudo.over(&length.to_be_bytes());
        verify(pseudo, segment, tcp::CHECKSUM_AT, Offload::MayBePartial)
    }
}

/// Which bits are to be as they were. Not: lengths, identification, DF, TTL, code point, checksums, sequence and
/// acknowledgement numbers, PSH, window, urgent pointer, time stamps.
fn mask_of(is_v4: bool, length: usize) -> [u8; LONGEST] {
    let mut mask = [0; LONGEST];
    mask[..2].fill(0xff);
    let ip = IP - START;
    let tcp = if is_v4 {
        mask[ip] = 0xff;
        mask[ip + 1] = 0x03;
        mask[ip + 6] = 0xbf;
        mask[ip + 7] = 0xff;
        mask[ip + 9] = 0xff;
        mask[ip + 12..ip + 20].fill(0xff);
        ip + IPV4
    } else {
        mask[ip] = 0xf0;
        mask[ip + 1] = 0x30;
        mask[ip + 6] = 0xff;
        mask[ip + 8..ip + 40].fill(0xff);
        ip + IPV6
    };
    mask[tcp..tcp + 4].fill(0xff);
    mask[tcp + 12] = 0xff;
    mask[tcp + 13] = !TcpFlags::PSH.0;
    if length == STAMPED {
        mask[tcp + BARE..tcp + BARE + 4].fill(0xff);
    }
    mask
}

fn words_of(octets: &[u8; LONGEST]) -> [u64; WORDS] {
    core::array::from_fn(|i| {
        let mut word = [0; WORD];
        word.copy_from_slice(&octets[i * WORD..(i + 1) * WORD]);
        u64::from_ne_bytes(word)
    })
}

#[cfg(test)]
mod tests;
