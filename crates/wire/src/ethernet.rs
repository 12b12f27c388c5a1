//! The Ethernet II header.

use portolan_types::MacAddr;
use zerocopy::byteorder::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Malformed, put};

/// Bytes of the header.
pub const HEADER_LEN: usize = 14;

/// The protocol that an Ethernet frame carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EtherType(pub u16);

impl EtherType {
    pub const IPV4: EtherType = EtherType(0x0800);
    pub const ARP: EtherType = EtherType(0x0806);
    pub const IPV6: EtherType = EtherType(0x86dd);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EthernetHeader {
    pub destination: MacAddr,
    pub source: MacAddr,
    pub ether_type: EtherType,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    destination: [u8; 6],
    source: [u8; 6],
    ether_type: U16,
}

impl EthernetHeader {
    /// Splits a frame into its header and its payload, including padding.
    pub fn parse(frame: &[u8]) -> Result<(EthernetHeader, &[u8]), Malformed> {
        let (raw, payload) = Raw::ref_from_prefix(frame).map_err(|_| Malformed)?;
        let header = EthernetHeader {
            destination: MacAddr(raw.destination),
            source: MacAddr(raw.source),
            ether_type: EtherType(raw.ether_type.get()),
        };
        Ok((header, payload))
    }

    /// Writes [`HEADER_LEN`] bytes to the front of `out`, which must have room.
    pub fn emit(&self, out: &mut [u8]) {
        let raw = Raw {
            destination: self.destination.0,
            source: self.source.0,
            ether_type: self.ether_type.0.into(),
        };
        put(&raw, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_as_it_was_emitted_and_as_etherparse_reads_it() {
        let header = EthernetHeader {
            destination: MacAddr([2, 0, 0, 0, 0, 1]),
            source: MacAddr([2, 0, 0, 0, 0, 2]),
            ether_type: EtherType::IPV6,
        };
        let mut frame = [0xaa; HEADER_LEN + 3];
        header.emit(&mut frame);
        assert_eq!(EthernetHeader::parse(&frame), Ok((header, &[0xaa; 3][..])));
        let (oracle, _) = etherparse::Ethernet2Header::from_slice(&frame).unwrap();
        assert_eq!(oracle.source, header.source.0);
        assert_eq!(oracle.ether_type, etherparse::EtherType::IPV6);
    }

    #[test]
    fn a_short_frame_is_malformed() {
        assert_eq!(EthernetHeader::parse(&[0; HEADER_LEN - 1]), Err(Malformed));
    }
}
