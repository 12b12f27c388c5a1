//! The virtio_net_hdr that precedes each frame on a tap opened with `IFF_VNET_HDR`
//! (virtio 1.2 §5.1.6; 10 bytes, the machine's byte order): offloads left to the device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Malformed;
use crate::{tcp, udp};

/// Bytes of the header.
pub const HEADER_LEN: usize = size_of::<VnetHeader>();

const NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_UDP: u8 = 3;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// Offsets count from the start of the frame.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct VnetHeader {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

/// The kind of a frame to be segmented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gso {
    TcpV4,
    TcpV6,
    UdpL4,
    /// One datagram, to be sent in IP fragments. The size counts bytes of IP payload.
    UdpFragments,
}

impl VnetHeader {
    /// A complete frame.
    pub const NONE: VnetHeader = VnetHeader {
        flags: 0,
        gso_type: GSO_NONE,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
    };

    /// The checksum field at `start + offset` holds the pseudo-header sum; the device completes it
    /// over everything from `start`.
    pub const fn partial_checksum(start: u16, offset: u16) -> VnetHeader {
        VnetHeader {
            flags: NEEDS_CSUM,
            gso_type: GSO_NONE,
            hdr_len: 0,
            gso_size: 0,
            csum_start: start,
            csum_offset: offset,
        }
    }

    /// To be cut into segments of `size` payload bytes behind headers of `header_len` bytes, with the transport
    /// header at `start`. The checksum field holds the pseudo-header sum over the whole frame.
    pub const fn segments(gso: Gso, header_len: u16, start: u16, size: u16) -> VnetHeader {
        let (gso_type, csum_offset) = match gso {
            Gso::TcpV4 => (GSO_TCPV4, tcp::CHECKSUM_AT as u16),
            Gso::TcpV6 => (GSO_TCPV6, tcp::CHECKSUM_AT as u16),
            Gso::UdpL4 => (GSO_UDP_L4, udp::CHECKSUM_AT as u16),
            Gso::UdpFragments => (GSO_UDP, udp::CHECKSUM_AT as u16),
        };
        VnetHeader {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: header_len,
            gso_size: size,
            csum_start: start,
            csum_offset,
        }
    }

    /// Splits the bytes read from a tap into header and frame.
    pub fn parse(bytes: &[u8]) -> Result<(VnetHeader, &[u8]), Malformed> {
        VnetHeader::read_from_prefix(bytes).map_err(|_| Malformed)
    }

    /// Writes [`HEADER_LEN`] bytes to the front of `out`, which must have room.
    pub fn emit(&self, out: &mut [u8]) {
        crate::put(self, out);
    }

    /// Whether the checksum field holds only the pseudo-header sum.
    pub fn has_partial_checksum(&self) -> bool {
        self.flags & NEEDS_CSUM != 0
    }

    /// The kind and size of segments that the frame would be cut into.
    pub fn gso(&self) -> Option<(Gso, u16)> {
        let gso = match self.gso_type & !GSO_ECN {
            GSO_TCPV4 => Gso::TcpV4,
            GSO_TCPV6 => Gso::TcpV6,
            GSO_UDP_L4 => Gso::UdpL4,
            GSO_UDP => Gso::UdpFragments,
            _ => return None,
        };
        Some((gso, self.gso_size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segmented_frame_says_so_after_a_round_trip() {
        let header = VnetHeader::segments(Gso::TcpV6, 14 + 40 + 32, 54, 1428);
        let mut bytes = [0; HEADER_LEN + 1];
        header.emit(&mut bytes);
        let (parsed, frame) = VnetHeader::parse(&bytes).unwrap();
        assert_eq!((parsed, frame.len()), (header, 1));
        assert_eq!(parsed.gso(), Some((Gso::TcpV6, 1428)));
        assert!(parsed.has_partial_checksum());
        assert_eq!(VnetHeader::NONE.gso(), None);
    }

    #[test]
    fn the_layout_is_that_of_linux_virtio_net_h() {
        let bytes = VnetHeader::partial_checksum(0x0102, 0x0304);
        let [s0, s1] = 0x0102u16.to_ne_bytes();
        let [o0, o1] = 0x0304u16.to_ne_bytes();
        assert_eq!(bytes.as_bytes(), [1, 0, 0, 0, 0, 0, s0, s1, o0, o1]);
    }
}
