//! The expected headers of a frame, from the EtherType to the end of the transport header, and the mask of the bits
//! that are compared.

use portolan_wire::checksum::Sum;

/// The comparison starts at the EtherType.
pub(super) const START: usize = 12;
pub(super) const IP: usize = 14;
pub(super) const IPV4: usize = 20;
pub(super) const IPV6: usize = 40;

const WORD: usize = 8;
/// Longest transport header.
const TRANSPORT: usize = 32;
/// EtherType, the longest headers, and padding of the last word.
pub(super) const LONGEST: usize = (2 + IPV6 + TRANSPORT).next_multiple_of(WORD);
const WORDS: usize = LONGEST / WORD;

#[derive(Debug)]
pub(super) struct Pattern {
    masks: [u64; WORDS],
    values: [u64; WORDS],
    words: usize,
    /// Where the transport header and the payload begin.
    pub(super) transport: usize,
    pub(super) payload: usize,
}

/// Returns whether the frame is IPv4 without options (true) or IPv6 without extension headers (false); none if neither.
pub(super) fn is_plain_v4(frame: &[u8], protocol: u8) -> Option<bool> {
    match (frame.get(START..IP)?, frame.get(IP)?) {
        ([0x08, 0x00], 0x45) => Some(true),
        ([0x86, 0xdd], first) if first >> 4 == 6 && frame.get(IP + 6) == Some(&protocol) => {
            Some(false)
        }
        _ => None,
    }
}

/// Where the transport header begins.
pub(super) fn transport_at(is_v4: bool) -> usize {
    IP + if is_v4 { IPV4 } else { IPV6 }
}

/// Sets the mask of the Ethernet and IP headers, without lengths, identification, DF, TTL, traffic class, flow label
/// and checksum. Returns where the transport protocol's mask begins.
pub(super) fn mask_of_ip(mask: &mut [u8; LONGEST], is_v4: bool) -> usize {
    mask[..2].fill(0xff);
    let ip = IP - START;
    if is_v4 {
        mask[ip] = 0xff;
        mask[ip + 6] = 0xbf;
        mask[ip + 7] = 0xff;
        mask[ip + 9] = 0xff;
        mask[ip + 12..ip + 20].fill(0xff);
        ip + IPV4
    } else {
        mask[ip] = 0xf0;
        mask[ip + 6] = 0xff;
        mask[ip + 8..ip + 40].fill(0xff);
        ip + IPV6
    }
}

impl Pattern {
    /// A pattern for headers like these, which end at `payload`.
    pub(super) fn new(
        headers: &[u8; LONGEST],
        mask: &[u8; LONGEST],
        (transport, payload): (usize, usize),
    ) -> Pattern {
        let (masks, values) = (words_of(mask), words_of(headers));
        Pattern {
            masks,
            values: core::array::from_fn(|i| values[i] & masks[i]),
            words: (payload - START).div_ceil(WORD),
            transport,
            payload,
        }
    }

    /// Whether the headers of the frame match.
    pub(super) fn fits(&self, frame: &[u8]) -> bool {
        frame
            .get(START..self.payload)
            .is_some_and(|headers| self.is_like(headers))
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

    fn is_v4(&self) -> bool {
        self.transport - IP == IPV4
    }

    /// Whether a matching frame is neither padded nor truncated, by the length in its IP header, and that header is
    /// undamaged.
    pub(super) fn is_whole(&self, frame: &[u8]) -> bool {
        let (at, before) = if self.is_v4() {
            (IP + 2, IP)
        } else {
            (IP + 4, IP + IPV6)
        };
        let said = u16::from_be_bytes([frame[at], frame[at + 1]]);
        usize::from(said) == frame.len() - before
            && (!self.is_v4() || Sum::default().over(&frame[IP..self.transport]).folded() == 0xffff)
    }
}

fn words_of(bytes: &[u8; LONGEST]) -> [u64; WORDS] {
    core::array::from_fn(|i| {
        let mut word = [0; WORD];
        word.copy_from_slice(&bytes[i * WORD..(i + 1) * WORD]);
        u64::from_ne_bytes(word)
    })
}
