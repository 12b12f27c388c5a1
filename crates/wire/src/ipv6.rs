//! The IPv6 header and the walk over its extension headers (RFC 8200). None is ever sent.

use core::net::Ipv6Addr;

use zerocopy::byteorder::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Malformed, put};

/// Octets of the header, as [`Ipv6Header::emit`] writes it.
pub const HEADER_LEN: usize = 40;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// Extension headers that a packet may have before it counts as an attack.
const MAX_EXTENSIONS: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Header {
    /// Differentiated services code point and ECN bits.
    pub traffic_class: u8,
    pub flow_label: u32,
    pub hop_limit: u8,
    /// The upper-layer protocol, after all extension headers.
    pub protocol: u8,
    pub source: Ipv6Addr,
    pub destination: Ipv6Addr,
    /// Octets after the fixed header, as its length field says.
    pub payload_len: u16,
    pub fragment: Option<Ipv6Fragment>,
}

/// The fragment header (RFC 8200 §4.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Fragment {
    pub identification: u32,
    /// In octets.
    pub offset: u16,
    pub more: bool,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    version_class_flow: U32,
    payload_len: U16,
    next_header: u8,
    hop_limit: u8,
    source: [u8; 16],
    destination: [u8; 16],
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFragment {
    next_header: u8,
    reserved: u8,
    offset_and_more: U16,
    identification: U32,
}

impl Ipv6Header {
    /// Splits a packet into its header and its upper-layer payload; extension headers are walked
    /// over, link-layer padding is cut off.
    pub fn parse(packet: &[u8]) -> Result<(Ipv6Header, &[u8]), Malformed> {
        let (mut header, rest) = Ipv6Header::parse_fixed(packet)?;
        let rest = rest
            .get(..usize::from(header.payload_len))
            .ok_or(Malformed)?;
        let payload = header.walk_extensions(rest)?;
        Ok((header, payload))
    }

    /// As [`Ipv6Header::parse`], for a packet quoted in an ICMPv6 error, which may be cut short.
    pub fn parse_quoted(packet: &[u8]) -> Result<(Ipv6Header, &[u8]), Malformed> {
        let (mut header, rest) = Ipv6Header::parse_fixed(packet)?;
        let payload = header.walk_extensions(rest)?;
        Ok((header, payload))
    }

    pub fn is_fragment(&self) -> bool {
        self.fragment.is_some()
    }

    /// Writes [`HEADER_LEN`] octets to the front of `out`, which must have room. Extension headers
    /// are not written, so `fragment` must be `None`.
    pub fn emit(&self, out: &mut [u8]) {
        debug_assert!(self.fragment.is_none());
        let raw = Raw {
            version_class_flow: (6 << 28
                | u32::from(self.traffic_class) << 20
                | self.flow_label & 0xf_ffff)
                .into(),
            payload_len: self.payload_len.into(),
            next_header: self.protocol,
            hop_limit: self.hop_limit,
            source: self.source.octets(),
            destination: self.destination.octets(),
        };
        put(&raw, out);
    }

    fn parse_fixed(packet: &[u8]) -> Result<(Ipv6Header, &[u8]), Malformed> {
        let (raw, rest) = Raw::ref_from_prefix(packet).map_err(|_| Malformed)?;
        let first = raw.version_class_flow.get();
        if first >> 28 != 6 {
            return Err(Malformed);
        }
        let header = Ipv6Header {
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0xf_ffff,
            hop_limit: raw.hop_limit,
            protocol: raw.next_header,
            source: raw.source.into(),
            destination: raw.destination.into(),
            payload_len: raw.payload_len.get(),
            fragment: None,
        };
        Ok((header, rest))
    }

    /// Moves `protocol` past the extension headers at the front of `bytes` and answers what
    /// follows them.
    fn walk_extensions<'a>(&mut self, mut bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        for _ in 0..MAX_EXTENSIONS {
            match self.protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    let [next, length, ..] = *bytes else {
                        return Err(Malformed);
                    };
                    bytes = bytes
                        .get((usize::from(length) + 1) * 8..)
                        .ok_or(Malformed)?;
                    self.protocol = next;
                }
                FRAGMENT => {
                    let (raw, rest) = RawFragment::ref_from_prefix(bytes).map_err(|_| Malformed)?;
                    let offset_and_more = raw.offset_and_more.get();
                    self.fragment = Some(Ipv6Fragment {
                        identification: raw.identification.get(),
                        offset: offset_and_more & 0xfff8,
                        more: offset_and_more & 1 != 0,
                    });
                    self.protocol = raw.next_header;
                    bytes = rest;
                    if offset_and_more & 0xfff8 != 0 {
                        // Not the first fragment: what follows is no header.
                        return Ok(bytes);
                    }
                }
                _ => return Ok(bytes),
            }
        }
        Err(Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(payload_len: u16) -> Ipv6Header {
        Ipv6Header {
            traffic_class: 0xb8,
            flow_label: 0x12345,
            hop_limit: 64,
            protocol: 17,
            source: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1),
            destination: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
            payload_len,
            fragment: None,
        }
    }

    #[test]
    fn a_header_comes_back_as_it_was_emitted_and_as_etherparse_reads_it() {
        let mut packet = [7; HEADER_LEN + 9];
        header(5).emit(&mut packet);
        assert_eq!(Ipv6Header::parse(&packet), Ok((header(5), &[7; 5][..])));
        let (oracle, _) = etherparse::Ipv6Header::from_slice(&packet).unwrap();
        assert_eq!(oracle.traffic_class, 0xb8);
        assert_eq!(oracle.flow_label.value(), 0x12345);
        assert_eq!(oracle.payload_length, 5);
        assert_eq!(oracle.destination, header(5).destination.octets());
    }

    #[test]
    fn extension_headers_are_walked_over() {
        let mut packet = [0; HEADER_LEN + 8 + 16 + 8 + 3];
        Ipv6Header {
            protocol: HOP_BY_HOP,
            ..header(35)
        }
        .emit(&mut packet);
        packet[40..42].copy_from_slice(&[DESTINATION_OPTIONS, 0]);
        packet[48..50].copy_from_slice(&[FRAGMENT, 1]);
        packet[64..72].copy_from_slice(&[17, 0, 0, 1, 0, 0, 0, 9]);
        packet[72..].copy_from_slice(b"abc");
        let (parsed, payload) = Ipv6Header::parse(&packet).unwrap();
        assert_eq!((parsed.protocol, payload), (17, &b"abc"[..]));
        let fragment = Ipv6Fragment {
            identification: 9,
            offset: 0,
            more: true,
        };
        assert_eq!(parsed.fragment, Some(fragment));
    }

    #[test]
    fn a_later_fragment_is_not_walked_into() {
        let mut packet = [0; HEADER_LEN + 8 + 2];
        Ipv6Header {
            protocol: FRAGMENT,
            ..header(10)
        }
        .emit(&mut packet);
        packet[40..48].copy_from_slice(&[DESTINATION_OPTIONS, 0, 0, 16, 0, 0, 0, 9]);
        let (parsed, payload) = Ipv6Header::parse(&packet).unwrap();
        assert_eq!((parsed.protocol, payload.len()), (DESTINATION_OPTIONS, 2));
        assert_eq!(parsed.fragment.map(|fragment| fragment.offset), Some(16));
    }

    #[test]
    fn an_endless_chain_of_extension_headers_is_malformed() {
        let mut packet = [0; HEADER_LEN + 8 * 16];
        Ipv6Header {
            protocol: HOP_BY_HOP,
            ..header(128)
        }
        .emit(&mut packet);
        assert_eq!(Ipv6Header::parse(&packet), Err(Malformed));
    }

    #[test]
    fn a_cut_packet_is_malformed_but_may_be_quoted() {
        let mut packet = [0; HEADER_LEN + 5];
        header(5).emit(&mut packet);
        assert_eq!(Ipv6Header::parse(&packet[..HEADER_LEN + 4]), Err(Malformed));
        assert!(Ipv6Header::parse_quoted(&packet[..HEADER_LEN + 4]).is_ok());
    }

    #[test]
    fn no_octets_make_the_parser_panic() {
        portolan_fuzz::check!(2000).for_each(|bytes| {
            let _ = Ipv6Header::parse(bytes);
            let _ = Ipv6Header::parse_quoted(bytes);
        });
    }
}
