//! The UDP header (RFC 768).

use core::net::IpAddr;

use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::{Offload, Sum};
use crate::{Malformed, put};

/// Bytes of the header.
pub const HEADER_LEN: usize = 8;
/// Where the checksum field lies in it.
pub const CHECKSUM_AT: usize = 6;

const PROTOCOL: u8 = 17;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdpHeader {
    pub source_port: u16,
    pub destination_port: u16,
    /// Length of the payload, according to the length field.
    pub payload_len: u16,
    /// As on the wire; 0 if the sender computed none.
    pub checksum: u16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    source_port: U16,
    destination_port: U16,
    length: U16,
    checksum: U16,
}

impl UdpHeader {
    /// Splits a datagram into its header and its payload; removes what exceeds its length.
    pub fn parse(datagram: &[u8]) -> Result<(UdpHeader, &[u8]), Malformed> {
        let (raw, rest) = Raw::ref_from_prefix(datagram).map_err(|_| Malformed)?;
        let payload_len = raw
            .length
            .get()
            .checked_sub(HEADER_LEN as u16)
            .ok_or(Malformed)?;
        let payload = rest.get(..usize::from(payload_len)).ok_or(Malformed)?;
        let header = UdpHeader {
            source_port: raw.source_port.get(),
            destination_port: raw.destination_port.get(),
            payload_len,
            checksum: raw.checksum.get(),
        };
        Ok((header, payload))
    }

    /// Whether the checksum matches the payload and the addresses.
    pub fn verify(
        &self,
        source: IpAddr,
        destination: IpAddr,
        payload: &[u8],
        offload: Offload,
    ) -> bool {
        if self.checksum == 0 {
            // RFC 768: none was computed. RFC 8200 §8.1: not permitted in IPv6.
            return source.is_ipv4();
        }
        let pseudo = Sum::pseudo_header(source, destination, PROTOCOL, self.length());
        if offload == Offload::MayBePartial && self.checksum == pseudo.folded() {
            return true;
        }
        pseudo.over(self.raw().as_bytes()).over(payload).folded() == 0xffff
    }

    /// This header with the checksum of `payload`, given in slices.
    #[must_use]
    pub fn with_checksum(self, source: IpAddr, destination: IpAddr, payload: &[&[u8]]) -> Self {
        let blank = UdpHeader {
            checksum: 0,
            ..self
        };
        let sum = payload.iter().fold(
            Sum::pseudo_header(source, destination, PROTOCOL, self.length())
                .over(blank.raw().as_bytes()),
            |sum, piece| sum.over(piece),
        );
        // RFC 768: a computed checksum of zero is sent as all ones.
        let checksum = match sum.checksum() {
            0 => 0xffff,
            checksum => checksum,
        };
        UdpHeader { checksum, ..self }
    }

    /// This header with the pseudo-header sum, for a device that completes the checksum.
    #[must_use]
    pub fn with_partial_checksum(self, source: IpAddr, destination: IpAddr) -> Self {
        let pseudo = Sum::pseudo_header(source, destination, PROTOCOL, self.length());
        UdpHeader {
            checksum: pseudo.folded(),
            ..self
        }
    }

    /// Writes [`HEADER_LEN`] bytes to the front of `out`, which must have room.
    pub fn emit(&self, out: &mut [u8]) {
        put(&self.raw(), out);
    }

    fn length(&self) -> usize {
        HEADER_LEN + usize::from(self.payload_len)
    }

    fn raw(&self) -> Raw {
        Raw {
            source_port: self.source_port.into(),
            destination_port: self.destination_port.into(),
            length: self.payload_len.wrapping_add(HEADER_LEN as u16).into(),
            checksum: self.checksum.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use core::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const HEADER: UdpHeader = UdpHeader {
        source_port: 53,
        destination_port: 4000,
        payload_len: 5,
        checksum: 0,
    };

    #[test]
    fn a_datagram_comes_back_as_it_was_emitted_with_etherparses_checksum() {
        let header = HEADER.with_checksum(A, B, &[b"hel", b"lo"]);
        let mut datagram = *b"........hello+padding";
        header.emit(&mut datagram);
        assert_eq!(UdpHeader::parse(&datagram), Ok((header, &b"hello"[..])));
        assert!(header.verify(A, B, b"hello", Offload::Complete));
        assert!(!header.verify(A, B, b"hellO", Offload::Complete));
        let (oracle, _) = etherparse::UdpHeader::from_slice(&datagram).unwrap();
        let expected = oracle.calc_checksum_ipv4_raw([10, 0, 0, 1], [10, 0, 0, 2], b"hello");
        assert_eq!(expected, Ok(header.checksum));
    }

    #[test]
    fn a_missing_checksum_passes_over_ipv4_only() {
        assert!(HEADER.verify(A, B, b"hello", Offload::Complete));
        let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert!(!HEADER.verify(v6, v6, b"hello", Offload::Complete));
    }

    #[test]
    fn a_partial_checksum_passes_only_where_offload_is_possible() {
        let header = HEADER.with_partial_checksum(A, B);
        assert!(header.verify(A, B, b"hello", Offload::MayBePartial));
        assert!(!header.verify(A, B, b"hello", Offload::Complete));
    }

    #[test]
    fn a_length_that_lies_is_malformed() {
        let mut datagram = [0; 10];
        HEADER.emit(&mut datagram);
        assert_eq!(UdpHeader::parse(&datagram), Err(Malformed));
        datagram[4..6].copy_from_slice(&7u16.to_be_bytes());
        assert_eq!(UdpHeader::parse(&datagram), Err(Malformed));
    }

    #[test]
    fn no_bytes_make_the_parser_panic() {
        portolan_fuzz::check!(2000).for_each(|bytes| {
            if let Ok((header, payload)) = UdpHeader::parse(bytes) {
                header.verify(A, B, payload, Offload::MayBePartial);
            }
        });
    }
}
