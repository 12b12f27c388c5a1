//! Fragmented datagrams: reassembly, and keeping early fragments for the filter.

mod early;
mod reassembly;

pub use early::EarlyFragments;
pub(crate) use reassembly::Reassembly;
pub use reassembly::{FragmentCounters, Reassembled, Whole};

use core::net::IpAddr;

use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::ipv4::Ipv4Header;
use portolan_wire::ipv6::Ipv6Header;

/// What the fragments of a datagram have in common (RFC 791 §3.2, RFC 8200 §4.5: in IPv6 the protocol is not
/// part of the key and is 0 here).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    source: IpAddr,
    destination: IpAddr,
    identification: u32,
    protocol: u8,
}

/// A fragment.
#[derive(Clone, Copy, Debug)]
struct Piece<'a> {
    key: Key,
    header: Header,
    offset: usize,
    more: bool,
    body: &'a [u8],
}

#[derive(Clone, Copy, Debug)]
enum Header {
    V4(Ipv4Header),
    V6(Ipv6Header),
}

impl<'a> Piece<'a> {
    /// Returns `None` if the frame is not a valid fragment.
    fn of(frame: &'a [u8]) -> Option<Piece<'a>> {
        let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
        match ethernet.ether_type {
            EtherType::IPV4 => {
                let (header, body) = Ipv4Header::parse(packet).ok()?;
                header.is_fragment().then_some(Piece {
                    key: Key {
                        source: header.source.into(),
                        destination: header.destination.into(),
                        identification: u32::from(header.identification),
                        protocol: header.protocol,
                    },
                    header: Header::V4(header),
                    offset: usize::from(header.fragment_offset),
                    more: header.more_fragments,
                    body,
                })
            }
            EtherType::IPV6 => {
                let piece = Ipv6Header::parse_piece(packet).ok()??;
                Some(Piece {
                    key: Key {
                        source: piece.header.source.into(),
                        destination: piece.header.destination.into(),
                        identification: piece.fragment.identification,
                        protocol: 0,
                    },
                    header: Header::V6(piece.header),
                    offset: usize::from(piece.fragment.offset),
                    more: piece.fragment.more,
                    body: piece.body,
                })
            }
            _ => None,
        }
    }

    fn end(&self) -> usize {
        self.offset + self.body.len()
    }
}

#[cfg(test)]
mod tests;
