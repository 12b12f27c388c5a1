//! Handles, by which active demultiplexing finds a receiver (MS §VI).

use serde::{Deserialize, Serialize};

/// Where packets of a connection are delivered, and a nonce that proves its validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// Index of a row in the receiver's filter.
    pub index: u16,
    pub nonce: u64,
    /// The traffic class of packets that enclose it.
    pub marker: u8,
}

impl Handle {
    /// Whether the marker is a code point for local use (RFC 2474 §6, pool 2). A peer may request no other treatment.
    pub fn has_local_marker(self) -> bool {
        self.marker & 0x0f == 0x0c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_points_for_local_use_mark_a_packet() {
        let is_local = |marker| {
            let (index, nonce) = (0, 1);
            let handle = Handle {
                index,
                nonce,
                marker,
            };
            handle.has_local_marker()
        };
        assert!(is_local(0x0c) && is_local(0xfc));
        // Best effort, expedited forwarding, congestion marks, pools 1 and 3.
        for marker in [0, 0xb8, 0x0d, 0x0f, 0x08, 0x04] {
            assert!(!is_local(marker), "{marker:#x}");
        }
    }
}
