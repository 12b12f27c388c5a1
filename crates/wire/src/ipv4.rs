//! The IPv4 header (RFC 791). Options are skipped on receipt and never sent.

use core::net::Ipv4Addr;

use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::Sum;
use crate::{Malformed, put};

/// Bytes of a header without options, as [`Ipv4Header::emit`] writes it.
pub const HEADER_LEN: usize = 20;

const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET_MASK: u16 = 0x1fff;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv4Header {
    /// Differentiated services code point and ECN bits.
    pub traffic_class: u8,
    pub identification: u16,
    pub dont_fragment: bool,
    pub more_fragments: bool,
    /// In bytes.
    pub fragment_offset: u16,
    pub ttl: u8,
    pub protocol: u8,
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    /// Length of the payload, according to the length field.
    pub payload_len: u16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    version_and_length: u8,
    traffic_class: u8,
    total_length: U16,
    identification: U16,
    fragment: U16,
    ttl: u8,
    protocol: u8,
    checksum: U16,
    source: [u8; 4],
    destination: [u8; 4],
}

impl Ipv4Header {
    /// Splits a packet into its header and its payload; removes link-layer padding.
    pub fn parse(packet: &[u8]) -> Result<(Ipv4Header, &[u8]), Malformed> {
        let (header, payload) = Ipv4Header::parse_quoted(packet)?;
        let header_len = packet.len() - payload.len();
        // RFC 1122 §3.2.1.2: a header with a bad checksum is silently discarded.
        if Sum::default().over(&packet[..header_len]).folded() != 0xffff {
            return Err(Malformed);
        }
        let payload = payload
            .get(..usize::from(header.payload_len))
            .ok_or(Malformed)?;
        Ok((header, payload))
    }

    /// As [`Ipv4Header::parse`], for a packet quoted in an ICMP error: it may be truncated, and routers have
    /// changed it, so that neither length nor checksum is verified.
    pub fn parse_quoted(packet: &[u8]) -> Result<(Ipv4Header, &[u8]), Malformed> {
        let (raw, _) = Raw::ref_from_prefix(packet).map_err(|_| Malformed)?;
        let header_len = usize::from(raw.version_and_length & 0x0f) * 4;
        if raw.version_and_length >> 4 != 4 || header_len < HEADER_LEN {
            return Err(Malformed);
        }
        let payload = packet.get(header_len..).ok_or(Malformed)?;
        let payload_len = raw
            .total_length
            .get()
            .checked_sub(header_len as u16)
            .ok_or(Malformed)?;
        let fragment = raw.fragment.get();
        let header = Ipv4Header {
            traffic_class: raw.traffic_class,
            identification: raw.identification.get(),
            dont_fragment: fragment & DONT_FRAGMENT != 0,
            more_fragments: fragment & MORE_FRAGMENTS != 0,
            fragment_offset: (fragment & OFFSET_MASK) << 3,
            ttl: raw.ttl,
            protocol: raw.protocol,
            source: raw.source.into(),
            destination: raw.destination.into(),
            payload_len,
        };
        Ok((header, payload))
    }

    pub fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// Writes [`HEADER_LEN`] bytes, checksum included, to the front of `out`, which must have
    /// room. The maximum payload is 65,515 bytes.
    pub fn emit(&self, out: &mut [u8]) {
        let mut fragment = self.fragment_offset >> 3;
        if self.dont_fragment {
            fragment |= DONT_FRAGMENT;
        }
        if self.more_fragments {
            fragment |= MORE_FRAGMENTS;
        }
        let mut raw = Raw {
            version_and_length: 0x45,
            traffic_class: self.traffic_class,
            total_length: (self.payload_len + HEADER_LEN as u16).into(),
            identification: self.identification.into(),
            fragment: fragment.into(),
            ttl: self.ttl,
            protocol: self.protocol,
            checksum: 0.into(),
            source: self.source.octets(),
            destination: self.destination.octets(),
        };
        raw.checksum = Sum::default().over(raw.as_bytes()).checksum().into();
        put(&raw, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Ipv4Header {
        Ipv4Header {
            traffic_class: 2,
            identification: 77,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 64,
            protocol: 6,
            source: Ipv4Addr::new(10, 1, 2, 3),
            destination: Ipv4Addr::new(192, 168, 0, 9),
            payload_len: 5,
        }
    }

    #[test]
    fn a_header_comes_back_as_it_was_emitted_and_padding_is_cut() {
        let mut packet = [7; HEADER_LEN + 9];
        header().emit(&mut packet);
        assert_eq!(Ipv4Header::parse(&packet), Ok((header(), &[7; 5][..])));
    }

    #[test]
    fn etherparse_reads_the_same_fields_and_the_same_checksum() {
        let fragment = Ipv4Header {
            dont_fragment: false,
            more_fragments: true,
            fragment_offset: 1480,
            ..header()
        };
        for header in [header(), fragment] {
            let mut packet = [0; HEADER_LEN + 5];
            header.emit(&mut packet);
            let (oracle, _) = etherparse::Ipv4Header::from_slice(&packet).unwrap();
            assert_eq!(oracle.calc_header_checksum(), oracle.header_checksum);
            assert_eq!(oracle.source, header.source.octets());
            assert_eq!(oracle.fragment_offset.value() * 8, header.fragment_offset);
            assert_eq!(oracle.dont_fragment, header.dont_fragment);
            assert_eq!(oracle.more_fragments, header.more_fragments);
            assert_eq!(Ipv4Header::parse(&packet).unwrap().0, header);
        }
    }

    #[test]
    fn options_are_skipped() {
        let oracle = etherparse::Ipv4Header {
            options: [1, 1, 1, 0].into(),
            ..etherparse::Ipv4Header::new(2, 9, etherparse::IpNumber::UDP, [1; 4], [2; 4]).unwrap()
        };
        let mut packet = [0; 26];
        let mut cursor = &mut packet[..];
        let mut oracle = oracle;
        oracle.set_payload_len(2).unwrap();
        oracle.header_checksum = oracle.calc_header_checksum();
        oracle.write(&mut cursor).unwrap();
        let (header, payload) = Ipv4Header::parse(&packet).unwrap();
        assert_eq!(
            (header.payload_len, payload.len(), header.protocol),
            (2, 2, 17)
        );
    }

    #[test]
    fn a_cut_or_corrupted_packet_is_malformed_but_may_be_quoted() {
        let mut packet = [0; HEADER_LEN + 5];
        header().emit(&mut packet);
        assert_eq!(Ipv4Header::parse(&packet[..HEADER_LEN + 4]), Err(Malformed));
        packet[8] -= 1;
        assert_eq!(Ipv4Header::parse(&packet), Err(Malformed));
        let (quoted, payload) = Ipv4Header::parse_quoted(&packet[..HEADER_LEN + 4]).unwrap();
        assert_eq!((quoted.payload_len, payload.len()), (5, 4));
    }

    #[test]
    fn no_bytes_make_the_parser_panic() {
        portolan_fuzz::check!(2000).for_each(|bytes| {
            let _ = Ipv4Header::parse(bytes);
            let _ = Ipv4Header::parse_quoted(bytes);
        });
    }
}
