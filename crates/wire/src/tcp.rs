//! The TCP header (RFC 9293 §3.1) and the options Portolan supports: MSS, window scale and
//! timestamps (RFC 7323), SACK (RFC 2018), Fast Open (RFC 7413), active demultiplexing (MS §VI).

use arrayvec::ArrayVec;
use portolan_types::SeqNum;
use zerocopy::byteorder::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::demux::DemuxOption;
use crate::{Malformed, put};

/// Bytes of a header without options.
pub const HEADER_LEN: usize = 20;
/// Bytes of the longest header.
pub const MAX_HEADER_LEN: usize = 60;
/// Where the checksum field lies in the header.
pub const CHECKSUM_AT: usize = 16;

const MAX_OPTIONS: usize = MAX_HEADER_LEN - HEADER_LEN;

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;
const FAST_OPEN: u8 = 34;
/// Shared by experiments (RFC 6994).
const EXPERIMENTAL: u8 = 254;
/// Bytes of a Fast Open cookie (RFC 7413 §4.1.1).
const COOKIE_LENGTHS: core::ops::RangeInclusive<usize> = 4..=MAX_COOKIE;
/// Bytes of the longest Fast Open cookie.
pub const MAX_COOKIE: usize = 16;

/// What precedes the timestamps if they are the only option.
const ALIGNED_TIMESTAMPS: [u8; 4] = [NOP, NOP, TIMESTAMPS, 10];

/// A parsed TCP header. Unknown options are skipped.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TcpHeader {
    pub source_port: u16,
    pub destination_port: u16,
    pub seq: SeqNum,
    pub ack: SeqNum,
    pub flags: TcpFlags,
    /// As on the wire, unscaled.
    pub window: u16,
    pub urgent: u16,
    pub options: TcpOptions,
}

/// The options of one segment.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TcpOptions {
    pub mss: Option<u16>,
    /// Shift count; values above 14 are kept as read (RFC 7323 §2.3: the receiver limits them).
    pub window_scale: Option<u8>,
    pub sack_permitted: bool,
    pub timestamps: Option<Timestamps>,
    pub sack: ArrayVec<SackBlock, 4>,
    /// A Fast Open cookie (RFC 7413 §4.1.1); an empty one requests a cookie.
    pub fast_open: Option<ArrayVec<u8, MAX_COOKIE>>,
    /// Active demultiplexing.
    pub demux: Option<DemuxOption>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamps {
    pub value: u32,
    pub echo: u32,
}

/// Bytes `start..end` that the receiver has beyond its cumulative acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SackBlock {
    pub start: SeqNum,
    pub end: SeqNum,
}

/// The control bits.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    pub const FIN: TcpFlags = TcpFlags(0x01);
    pub const SYN: TcpFlags = TcpFlags(0x02);
    pub const RST: TcpFlags = TcpFlags(0x04);
    pub const PSH: TcpFlags = TcpFlags(0x08);
    pub const ACK: TcpFlags = TcpFlags(0x10);
    pub const URG: TcpFlags = TcpFlags(0x20);
    pub const ECE: TcpFlags = TcpFlags(0x40);
    pub const CWR: TcpFlags = TcpFlags(0x80);

    pub const fn contains(self, other: TcpFlags) -> bool {
        self.0 & other.0 == other.0
    }

    #[must_use]
    pub const fn with(self, other: TcpFlags) -> TcpFlags {
        TcpFlags(self.0 | other.0)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    source_port: U16,
    destination_port: U16,
    seq: U32,
    ack: U32,
    data_offset: u8,
    flags: u8,
    window: U16,
    checksum: U16,
    urgent: U16,
}

impl TcpHeader {
    /// Parses the header at the front of `segment`; also returns its length, where the payload begins. The
    /// caller verifies the checksum ([`crate::checksum::verify`]).
    pub fn parse(segment: &[u8]) -> Result<(TcpHeader, usize), Malformed> {
        let (raw, _) = Raw::ref_from_prefix(segment).map_err(|_| Malformed)?;
        let header_len = usize::from(raw.data_offset >> 4) * 4;
        let options = segment.get(HEADER_LEN..header_len).ok_or(Malformed)?;
        let flags = TcpFlags(raw.flags);
        let header = TcpHeader {
            source_port: raw.source_port.get(),
            destination_port: raw.destination_port.get(),
            seq: SeqNum(raw.seq.get()),
            ack: SeqNum(raw.ack.get()),
            flags,
            window: raw.window.get(),
            urgent: raw.urgent.get(),
            options: TcpOptions::parse(options, flags.contains(TcpFlags::SYN)),
        };
        Ok((header, header_len))
    }

    /// Bytes that [`TcpHeader::emit`] writes.
    pub fn header_len(&self) -> usize {
        HEADER_LEN + self.options.len()
    }

    /// Writes [`TcpHeader::header_len`] bytes to the front of `out`, which must have room, and returns
    /// their number. The checksum field is left zero.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let header_len = self.header_len();
        let raw = Raw {
            source_port: self.source_port.into(),
            destination_port: self.destination_port.into(),
            seq: self.seq.0.into(),
            ack: self.ack.0.into(),
            data_offset: ((header_len / 4) << 4) as u8,
            flags: self.flags.0,
            window: self.window.into(),
            checksum: 0.into(),
            urgent: self.urgent.into(),
        };
        put(&raw, out);
        self.options.emit(&mut out[HEADER_LEN..header_len]);
        header_len
    }
}

impl TcpOptions {
    /// Length of the options as emitted, padding included; a multiple of four, at most 40.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        let sack_blocks = self.sack_that_fit().len();
        self.len_before_sack()
            + if sack_blocks == 0 {
                0
            } else {
                4 + 8 * sack_blocks
            }
    }

    /// SACK blocks that fit beside the other options (RFC 2018 §3).
    fn sack_that_fit(&self) -> &[SackBlock] {
        let room = MAX_OPTIONS.saturating_sub(self.len_before_sack() + 4) / 8;
        &self.sack[..self.sack.len().min(room)]
    }

    fn len_before_sack(&self) -> usize {
        let mss = if self.mss.is_some() { 4 } else { 0 };
        let timestamps = if self.timestamps.is_some() { 12 } else { 0 };
        // Replaces the timestamps' padding if there are any.
        let sack_permitted = if self.sack_permitted && self.timestamps.is_none() {
            4
        } else {
            0
        };
        let window_scale = if self.window_scale.is_some() { 4 } else { 0 };
        let fast_open = self
            .fast_open
            .as_ref()
            .map_or(0, |cookie| (2 + cookie.len()).next_multiple_of(4));
        let demux = self.demux.as_ref().map_or(0, DemuxOption::padded_len);
        mss + timestamps + sack_permitted + window_scale + fast_open + demux
    }

    /// Parses options. MSS, window scale and SACK-permitted are valid in a SYN only (RFC 9293 §3.2 [MUST-65],
    /// RFC 7323 §2.2, RFC 2018 §2). Parsing ends at an option that does not fit, as in Linux; the options
    /// before it are valid (RFC 9293 §3.1 [MUST-7]).
    fn parse(bytes: &[u8], syn: bool) -> TcpOptions {
        let mut options = TcpOptions::default();
        if let Some((&ALIGNED_TIMESTAMPS, values)) = bytes.split_first_chunk()
            && values.len() == 8
        {
            options.timestamps = Timestamps::parse(values);
            return options;
        }
        let mut rest = bytes;
        loop {
            match *rest {
                [] | [END, ..] => return options,
                [NOP, ..] => rest = &rest[1..],
                [kind, length, ..] => {
                    let Some(value) = rest.get(2..usize::from(length)) else {
                        return options;
                    };
                    options.take(kind, value, syn);
                    rest = &rest[usize::from(length)..];
                }
                [_] => return options,
            }
        }
    }

    fn take(&mut self, kind: u8, value: &[u8], syn: bool) {
        match (kind, value) {
            (MSS, &[a, b]) if syn => {
                self.mss = Some(u16::from_be_bytes([a, b])).filter(|mss| *mss != 0);
            }
            (WINDOW_SCALE, &[shift]) if syn => self.window_scale = Some(shift),
            (SACK_PERMITTED, []) if syn => self.sack_permitted = true,
            (TIMESTAMPS, value) => {
                if let Some(timestamps) = Timestamps::parse(value) {
                    self.timestamps = Some(timestamps);
                }
            }
            (FAST_OPEN, cookie) if syn => {
                let fits = cookie.is_empty()
                    || (COOKIE_LENGTHS.contains(&cookie.len()) && cookie.len() % 2 == 0);
                self.fast_open = fits.then(|| cookie.iter().copied().collect());
            }
            (EXPERIMENTAL, value) => self.demux = DemuxOption::parse(value, syn).or(self.demux),
            (SACK, blocks) if blocks.len() % 8 == 0 => {
                self.sack = blocks
                    .chunks_exact(8)
                    .filter_map(SackBlock::parse)
                    .take(4)
                    .collect();
            }
            _ => {}
        }
    }

    /// Fills `out`, of length `len()`, in the order of Linux's `tcp_options_write`.
    fn emit(&self, out: &mut [u8]) {
        let mut writer = Writer { out, at: 0 };
        if let Some(mss) = self.mss {
            writer.put(&[MSS, 4]);
            writer.put(&mss.to_be_bytes());
        }
        match (self.timestamps, self.sack_permitted) {
            (Some(timestamps), sack_permitted) => {
                let padding = if sack_permitted {
                    [SACK_PERMITTED, 2]
                } else {
                    [NOP, NOP]
                };
                writer.put(&padding);
                writer.put(&[TIMESTAMPS, 10]);
                writer.put(&timestamps.value.to_be_bytes());
                writer.put(&timestamps.echo.to_be_bytes());
            }
            (None, true) => writer.put(&[NOP, NOP, SACK_PERMITTED, 2]),
            (None, false) => {}
        }
        if let Some(shift) = self.window_scale {
            writer.put(&[NOP, WINDOW_SCALE, 3, shift]);
        }
        if let Some(cookie) = &self.fast_open {
            writer.put(&[FAST_OPEN, 2 + cookie.len() as u8]);
            writer.put(cookie);
            if cookie.len() % 4 != 2 {
                writer.put(&[NOP, NOP]);
            }
        }
        if let Some(demux) = &self.demux {
            let out = writer.pad(demux.padded_len());
            demux.emit(EXPERIMENTAL, out);
        }
        let sack = self.sack_that_fit();
        if !sack.is_empty() {
            writer.put(&[NOP, NOP, SACK, 2 + 8 * sack.len() as u8]);
            for block in sack {
                writer.put(&block.start.0.to_be_bytes());
                writer.put(&block.end.0.to_be_bytes());
            }
        }
    }
}

impl Timestamps {
    fn parse(value: &[u8]) -> Option<Timestamps> {
        let (value, echo) = word_pair(value)?;
        Some(Timestamps { value, echo })
    }
}

impl SackBlock {
    fn parse(value: &[u8]) -> Option<SackBlock> {
        let (start, end) = word_pair(value)?;
        Some(SackBlock {
            start: SeqNum(start),
            end: SeqNum(end),
        })
    }
}

/// Two 32-bit numbers, if `value` has exactly that length.
fn word_pair(value: &[u8]) -> Option<(u32, u32)> {
    let value = u64::from_be_bytes(value.try_into().ok()?);
    Some(((value >> 32) as u32, value as u32))
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Writes no-operations as the next bytes.
    fn pad(&mut self, length: usize) -> &mut [u8] {
        let start = self.at;
        self.at += length;
        let out = &mut self.out[start..self.at];
        out.fill(NOP);
        out
    }
}

#[cfg(test)]
mod tests;
