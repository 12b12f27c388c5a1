//! The Internet checksum (RFC 1071): sums over slices, the pseudo-header of both IP versions, and
//! verification under checksum offload.

use core::net::IpAddr;

/// A one's complement sum in progress. Slices are added in wire order; after one of odd length, the next
/// continues at the odd position.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Sum of 16-bit words in the machine's byte order, which RFC 1071 §2(B) allows; 32-bit words
    /// are added whole, so 2^32 of them fit before it overflows.
    total: u64,
    odd: bool,
}

/// Whether the checksum may have been left to hardware that did not process the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// The field must be right.
    Complete,
    /// A field with only the folded pseudo-header sum is accepted, too: Linux leaves this in a packet whose
    /// checksum a device should have completed, if it arrives over a veth or from the same host without
    /// passing a wire.
    MayBePartial,
}

impl Sum {
    /// The sum over the pseudo-header of TCP, UDP (RFC 9293 §3.1) and ICMPv6 (RFC 8200 §8.1). `length` counts
    /// the upper-layer header and payload. Addresses of different families do not occur in one packet; each is
    /// summed as it is.
    pub fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> Sum {
        let length = length as u32;
        Sum::default()
            .add_address(source)
            .add_address(destination)
            .over(&length.to_be_bytes())
            .over(&[0, protocol])
    }

    /// Continues the sum over `bytes`.
    #[must_use]
    pub fn over(self, bytes: &[u8]) -> Sum {
        let words = bytes.chunks_exact(4);
        let rest = words.remainder();
        let mut piece: u64 = words
            .map(|word| u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]])))
            .sum();
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        piece += u64::from(u32::from_ne_bytes(last));
        let piece = if self.odd {
            // RFC 1071 §2(B): a sum at an odd position is the sum with its bytes swapped.
            u64::from(fold(piece).swap_bytes())
        } else {
            piece
        };
        Sum {
            total: self.total + piece,
            odd: self.odd ^ (bytes.len() % 2 == 1),
        }
    }

    /// The sum, not complemented: the field of a packet whose checksum is left to the device.
    pub fn folded(self) -> u16 {
        u16::from_be(fold(self.total))
    }

    /// The checksum of the summed bytes, whose checksum field was zero.
    pub fn checksum(self) -> u16 {
        !self.folded()
    }

    fn add_address(self, address: IpAddr) -> Sum {
        match address {
            IpAddr::V4(v4) => self.over(&v4.octets()),
            IpAddr::V6(v6) => self.over(&v6.octets()),
        }
    }
}

/// Whether the checksum field, at `field_at` in `segment`, matches `segment` and its pseudo-header.
pub fn verify(pseudo_header: Sum, segment: &[u8], field_at: usize, offload: Offload) -> bool {
    let Some(field) = segment.get(field_at..field_at + 2) else {
        return false;
    };
    let field = u16::from_be_bytes([field[0], field[1]]);
    if offload == Offload::MayBePartial && field == pseudo_header.folded() {
        return true;
    }
    pseudo_header.over(segment).folded() == 0xffff
}

fn fold(total: u64) -> u16 {
    let mut total = (total >> 32) + (total & 0xffff_ffff);
    total = (total >> 16) + (total & 0xffff);
    total = (total >> 16) + (total & 0xffff);
    total = (total >> 16) + (total & 0xffff);
    total as u16
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;
    use std::vec::Vec;

    use super::*;

    /// RFC 1071 §4.1, word by word.
    fn reference(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            sum = (sum >> 16) + (sum & 0xffff);
        }
        sum as u16
    }

    #[test]
    fn the_example_of_rfc_1071_sums_to_ddf2() {
        let sum = Sum::default().over(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.folded(), 0xddf2);
        assert_eq!(sum.checksum(), 0x220d);
    }

    #[test]
    fn pieces_of_any_length_sum_to_the_same_as_the_whole() {
        portolan_fuzz::check!(2000)
            .with_type::<(Vec<u8>, u8)>()
            .for_each(|(bytes, cut)| {
                let whole = Sum::default().over(bytes).folded();
                assert_eq!(whole % 0xffff, reference(bytes) % 0xffff);
                let (front, back) = bytes.split_at(usize::from(*cut).min(bytes.len()));
                assert_eq!(Sum::default().over(front).over(back).folded(), whole);
            });
    }

    #[test]
    fn a_field_with_only_the_pseudo_header_sum_passes_when_offload_is_possible() {
        let pseudo = Sum::pseudo_header(
            Ipv4Addr::new(10, 0, 0, 1).into(),
            Ipv4Addr::new(10, 0, 0, 2).into(),
            17,
            10,
        );
        let mut segment = [0x12, 0x34, 0x56, 0x78, 0, 10, 0, 0, b'h', b'i'];
        segment[6..8].copy_from_slice(&pseudo.folded().to_be_bytes());
        assert!(verify(pseudo, &segment, 6, Offload::MayBePartial));
        assert!(!verify(pseudo, &segment, 6, Offload::Complete));

        segment[6..8].fill(0);
        let checksum = pseudo.over(&segment).checksum();
        segment[6..8].copy_from_slice(&checksum.to_be_bytes());
        assert!(verify(pseudo, &segment, 6, Offload::Complete));
        segment[9] ^= 1;
        assert!(!verify(pseudo, &segment, 6, Offload::MayBePartial));
    }

    #[test]
    fn a_field_beyond_the_segment_does_not_verify() {
        assert!(!verify(Sum::default(), &[0xff], 16, Offload::MayBePartial));
    }
}
