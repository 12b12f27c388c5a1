//! The IPv6 header, and parsing of its extension headers (RFC 8200), which are never sent.

use core::net::Ipv6Addr;

use zerocopy::byteorder::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Malformed, put};

/// Bytes of the header, as [`Ipv6Header::emit`] writes it.
pub const HEADER_LEN: usize = 40;

/// Bytes of the fragment header.
pub const FRAGMENT_HEADER_LEN: usize = 8;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// Maximum number of extension headers; more count as an attack.
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
    /// Length after the fixed header, according to the length field.
    pub payload_len: u16,
    pub fragment: Option<Ipv6Fragment>,
}

/// The fragment header (RFC 8200 §4.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Fragment {
    pub identification: u32,
    /// In bytes.
    pub offset: u16,
    pub more: bool,
}

/// A fragment of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ipv6Piece<'a> {
    /// `protocol` is the first header of the first fragment's body.
    pub header: Ipv6Header,
    pub fragment: Ipv6Fragment,
    pub body: &'a [u8],
}

/// How far to follow extension headers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Walk {
    ToTransport,
    UpToFragment,
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
    /// Splits a packet into its header and its upper-layer payload; skips extension headers, and removes
    /// link-layer padding.
    pub fn parse(packet: &[u8]) -> Result<(Ipv6Header, &[u8]), Malformed> {
        let (mut header, rest) = Ipv6Header::parse_fixed(packet)?;
        let rest = rest
            .get(..usize::from(header.payload_len))
            .ok_or(Malformed)?;
        let payload = header.walk(rest, Walk::ToTransport)?;
        Ok((header, payload))
    }

    /// As [`Ipv6Header::parse`], for a packet quoted in an ICMPv6 error, which may be truncated.
    pub fn parse_quoted(packet: &[u8]) -> Result<(Ipv6Header, &[u8]), Malformed> {
        let (mut header, rest) = Ipv6Header::parse_fixed(packet)?;
        let payload = header.walk(rest, Walk::ToTransport)?;
        Ok((header, payload))
    }

    /// Whether it is one of several fragments. A fragment header on a whole packet has no meaning (RFC 6946).
    pub fn is_fragment(&self) -> bool {
        self.fragment
            .is_some_and(|fragment| fragment.more || fragment.offset != 0)
    }

    /// Parses a fragment without its contents; `None` if it is a whole packet.
    pub fn parse_piece(packet: &[u8]) -> Result<Option<Ipv6Piece<'_>>, Malformed> {
        let (mut header, rest) = Ipv6Header::parse_fixed(packet)?;
        let rest = rest
            .get(..usize::from(header.payload_len))
            .ok_or(Malformed)?;
        let body = header.walk(rest, Walk::UpToFragment)?;
        if !header.is_fragment() {
            return Ok(None);
        }
        Ok(header.fragment.map(|fragment| Ipv6Piece {
            header,
            fragment,
            body,
        }))
    }

    /// Writes [`HEADER_LEN`] bytes to the front of `out`, which must have room. Extension headers
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

    /// Advances `protocol` past the extension headers at the front of `bytes` and returns what follows
    /// them.
    fn walk<'a>(&mut self, mut bytes: &'a [u8], walk: Walk) -> Result<&'a [u8], Malformed> {
        for index in 0..MAX_EXTENSIONS {
            match self.protocol {
                // RFC 8200 §4.1: hop-by-hop options come first or not at all.
                HOP_BY_HOP if index > 0 => return Err(Malformed),
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    let [next, length, ..] = *bytes else {
                        return Err(Malformed);
                    };
                    let length = (usize::from(length) + 1) * 8;
                    let extension = bytes.get(..length).ok_or(Malformed)?;
                    check_extension(self.protocol, extension)?;
                    bytes = &bytes[length..];
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
                    if offset_and_more & 0xfff8 != 0 || walk == Walk::UpToFragment {
                        // Not the first fragment: no header follows.
                        return Ok(bytes);
                    }
                }
                _ => return Ok(bytes),
            }
        }
        Err(Malformed)
    }
}

/// Checks an extension header of valid length for contents that a host must refuse.
fn check_extension(kind: u8, extension: &[u8]) -> Result<(), Malformed> {
    match kind {
        // RFC 8200 §4.4, RFC 5095: this host does not forward by routing headers.
        ROUTING => match extension {
            [_, _, _, 0, ..] => Ok(()),
            _ => Err(Malformed),
        },
        _ => check_options(extension.get(2..).ok_or(Malformed)?),
    }
}

/// RFC 8200 §4.2: unknown options are skipped, unless their type forbids it.
fn check_options(mut options: &[u8]) -> Result<(), Malformed> {
    const PAD1: u8 = 0;
    const MUST_DISCARD: u8 = 0xc0;
    while let [kind, rest @ ..] = options {
        if *kind == PAD1 {
            options = rest;
            continue;
        }
        let [length, rest @ ..] = rest else {
            return Err(Malformed);
        };
        if kind & MUST_DISCARD != 0 {
            return Err(Malformed);
        }
        options = rest.get(usize::from(*length)..).ok_or(Malformed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::vec;

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

    fn with_extension(kind: u8, extension: &[u8]) -> Result<u8, Malformed> {
        let mut packet = vec![0; HEADER_LEN];
        Ipv6Header {
            protocol: kind,
            ..header(extension.len() as u16)
        }
        .emit(&mut packet);
        packet.extend(extension);
        Ipv6Header::parse(&packet).map(|(header, _)| header.protocol)
    }

    #[test]
    fn a_route_that_goes_on_is_refused() {
        assert_eq!(with_extension(ROUTING, &[17, 0, 0, 0, 0, 0, 0, 0]), Ok(17));
        assert_eq!(
            with_extension(ROUTING, &[17, 0, 0, 1, 0, 0, 0, 0]),
            Err(Malformed)
        );
    }

    #[test]
    fn unknown_options_are_skipped_unless_their_type_forbids_it() {
        for kind in [HOP_BY_HOP, DESTINATION_OPTIONS] {
            // PadN of four bytes; then option 0x1e, which may be skipped.
            assert_eq!(with_extension(kind, &[17, 0, 1, 4, 0, 0, 0, 0]), Ok(17));
            assert_eq!(with_extension(kind, &[17, 0, 0x1e, 4, 0, 0, 0, 0]), Ok(17));
            for forbidding in [0x5e, 0x9e, 0xde] {
                let extension = [17, 0, forbidding, 4, 0, 0, 0, 0];
                assert_eq!(with_extension(kind, &extension), Err(Malformed));
            }
            // A length beyond the header.
            assert_eq!(
                with_extension(kind, &[17, 0, 1, 5, 0, 0, 0, 0]),
                Err(Malformed)
            );
        }
    }

    #[test]
    fn hop_by_hop_options_come_first() {
        let second = [
            HOP_BY_HOP, 0, 1, 4, 0, 0, 0, 0, //
            17, 0, 1, 4, 0, 0, 0, 0,
        ];
        assert_eq!(with_extension(DESTINATION_OPTIONS, &second), Err(Malformed));
    }

    #[test]
    fn a_piece_is_split_at_its_fragment_header() {
        let mut packet = vec![0; HEADER_LEN];
        Ipv6Header {
            protocol: FRAGMENT,
            ..header(24)
        }
        .emit(&mut packet);
        packet.extend([DESTINATION_OPTIONS, 0, 0, 1, 0, 0, 0, 9]);
        packet.extend([17, 0, 1, 4, 0, 0, 0, 0]);
        packet.extend([7; 8]);
        let piece = Ipv6Header::parse_piece(&packet).unwrap().unwrap();
        assert_eq!(piece.header.protocol, DESTINATION_OPTIONS);
        assert_eq!(piece.body, &packet[48..]);
        assert!(piece.fragment.more);
        // The same header on a whole packet (RFC 6946).
        packet[43] = 0;
        assert_eq!(Ipv6Header::parse_piece(&packet), Ok(None));
        let (whole, payload) = Ipv6Header::parse(&packet).unwrap();
        assert_eq!((whole.is_fragment(), whole.protocol), (false, 17));
        assert_eq!(payload, [7; 8]);
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
    fn no_bytes_make_the_parser_panic() {
        portolan_fuzz::check!(2000).for_each(|bytes| {
            let _ = Ipv6Header::parse(bytes);
            let _ = Ipv6Header::parse_quoted(bytes);
            let _ = Ipv6Header::parse_piece(bytes);
        });
    }
}
