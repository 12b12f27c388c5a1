//! Active demultiplexing (MS §VI, Fig. 8): a TCP option that advertises a connection's handle to the peer, and its
//! enclosure in each packet, as an IPv4 option or as a destination options header of IPv6.

use portolan_types::Handle;

/// Length of the IPv4 option that encloses a handle; always the first option.
pub const ENCLOSED_V4_LEN: usize = 12;
/// Length of the IPv6 header that encloses a handle; always the first after the IPv6 header.
pub const ENCLOSED_V6_LEN: usize = 16;

/// RFC 4727 §3.2: an experimental option, copied to fragments.
const ENCLOSED_V4: u8 = 158;
/// RFC 4727 §3.4: an experimental option; a host that does not know it skips it.
const ENCLOSED_V6: u8 = 0x1e;
/// Next-header value of a destination options header.
pub const DESTINATION_OPTIONS: u8 = 60;
const TCP: u8 = 6;
/// RFC 8200 §4.2.
const PAD_N: u8 = 1;

/// RFC 6994: distinguishes this use of the experimental kind from others. Not registered.
pub(crate) const EXPERIMENT: [u8; 2] = *b"PL";

const ABLE_LEN: usize = 4;
const ADVERTISE_LEN: usize = 16;
const REVOKE_LEN: usize = 5;

/// The IPv4 option that encloses a handle.
pub fn enclose_v4(handle: Handle) -> [u8; ENCLOSED_V4_LEN] {
    let mut option = [0; ENCLOSED_V4_LEN];
    option[0] = ENCLOSED_V4;
    option[1] = ENCLOSED_V4_LEN as u8;
    put(handle, &mut option[2..]);
    option
}

/// The destination options header that encloses a handle before a TCP segment. Padding comes first, to align the nonce.
pub fn enclose_v6(handle: Handle) -> [u8; ENCLOSED_V6_LEN] {
    let mut header = [0; ENCLOSED_V6_LEN];
    header[0] = TCP;
    header[1] = (ENCLOSED_V6_LEN / 8 - 1) as u8;
    header[2] = PAD_N;
    header[4] = ENCLOSED_V6;
    header[5] = (ENCLOSED_V6_LEN - 6) as u8;
    put(handle, &mut header[6..]);
    header
}

fn put(handle: Handle, out: &mut [u8]) {
    out[..2].copy_from_slice(&handle.index.to_be_bytes());
    out[2..].copy_from_slice(&handle.nonce.to_be_bytes());
}

/// A TCP option of active demultiplexing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemuxOption {
    /// In a SYN: the sender knows the other options.
    Able,
    /// Replaces earlier ones.
    Advertise {
        sequence: u8,
        handle: Handle,
    },
    Revoke {
        sequence: u8,
    },
}

impl DemuxOption {
    /// Length with padding.
    pub fn padded_len(&self) -> usize {
        self.len().next_multiple_of(4)
    }

    fn len(&self) -> usize {
        match self {
            DemuxOption::Able => ABLE_LEN,
            DemuxOption::Advertise { .. } => ADVERTISE_LEN,
            DemuxOption::Revoke { .. } => REVOKE_LEN,
        }
    }

    /// Parses what follows kind and length of an experimental option.
    pub(crate) fn parse(value: &[u8], syn: bool) -> Option<DemuxOption> {
        let body = value.strip_prefix(&EXPERIMENT)?;
        match (syn, body) {
            (true, []) => Some(DemuxOption::Able),
            (false, &[sequence]) => Some(DemuxOption::Revoke { sequence }),
            (false, &[sequence, marker, high, low, ref nonce @ ..]) => {
                let handle = Handle {
                    index: u16::from_be_bytes([high, low]),
                    nonce: u64::from_be_bytes(nonce.try_into().ok()?),
                    marker,
                };
                Some(DemuxOption::Advertise { sequence, handle })
            }
            _ => None,
        }
    }

    /// Writes the option with that kind to `out`, which has [`DemuxOption::padded_len`] bytes of no-operation.
    pub(crate) fn emit(&self, kind: u8, out: &mut [u8]) {
        out[0] = kind;
        out[1] = self.len() as u8;
        out[2..4].copy_from_slice(&EXPERIMENT);
        match *self {
            DemuxOption::Able => {}
            DemuxOption::Advertise { sequence, handle } => {
                out[4] = sequence;
                out[5] = handle.marker;
                out[6..8].copy_from_slice(&handle.index.to_be_bytes());
                out[8..16].copy_from_slice(&handle.nonce.to_be_bytes());
            }
            DemuxOption::Revoke { sequence } => out[4] = sequence,
        }
    }
}

#[cfg(test)]
mod tests {
    use arrayvec::ArrayVec;

    use super::*;

    const HANDLE: Handle = Handle {
        index: 0x0102,
        nonce: 0x1122_3344_5566_7788,
        marker: 0x0c,
    };

    fn emitted(option: DemuxOption) -> ArrayVec<u8, ADVERTISE_LEN> {
        let mut out: ArrayVec<u8, ADVERTISE_LEN> = [1; ADVERTISE_LEN].into();
        out.truncate(option.padded_len());
        option.emit(254, &mut out);
        out
    }

    #[test]
    fn every_option_comes_back_as_it_was_emitted() {
        let advertise = DemuxOption::Advertise {
            sequence: 9,
            handle: HANDLE,
        };
        let revoke = DemuxOption::Revoke { sequence: 10 };
        for (option, syn) in [
            (DemuxOption::Able, true),
            (advertise, false),
            (revoke, false),
        ] {
            let out = emitted(option);
            let length = usize::from(out[1]);
            assert_eq!(DemuxOption::parse(&out[2..length], syn), Some(option));
            assert_eq!(DemuxOption::parse(&out[2..length], !syn), None);
            assert!(out[length..].iter().all(|&byte| byte == 1));
        }
    }

    #[test]
    fn other_experiments_and_lengths_are_not_ours() {
        assert_eq!(DemuxOption::parse(&[0xf9, 0x89], true), None);
        assert_eq!(DemuxOption::parse(b"PL12", false), None);
        assert_eq!(DemuxOption::parse(b"P", true), None);
        assert_eq!(DemuxOption::parse(b"PL1234567890123", false), None);
    }

    #[test]
    fn an_enclosed_handle_lies_as_the_filter_reads_it() {
        let bytes = [
            158, 12, 1, 2, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88,
        ];
        assert_eq!(enclose_v4(HANDLE), bytes);
        let bytes = [
            6, 1, 1, 0, 0x1e, 10, 1, 2, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88,
        ];
        assert_eq!(enclose_v6(HANDLE), bytes);
    }
}
