//! Reassembles fragments that the stack under test has sent.

use std::time::Duration;

use super::read::{FragmentPlace, IpPacket, Seen, ip_packet, transport};

/// The fragments of one script, which are few.
#[derive(Debug, Default)]
pub struct Reassembly {
    /// Fragments of incomplete packets.
    pieces: Vec<(FragmentPlace, Vec<u8>)>,
}

impl Reassembly {
    /// Adds a packet from the link and returns the packet that is complete.
    pub fn take(&mut self, packet: &[u8], at: Duration) -> Option<Seen> {
        let ip = ip_packet(packet)?;
        let Some(place) = ip.fragment else {
            return transport(&ip, at);
        };
        self.pieces.push((place, ip.content.to_vec()));
        let (content, fragments) = self.complete(place.identification)?;
        let whole = IpPacket {
            content: &content,
            fragment: None,
            ..ip
        };
        let mut seen = transport(&whole, at)?;
        seen.fragments = fragments;
        Some(seen)
    }

    fn complete(&mut self, identification: u32) -> Option<(Vec<u8>, usize)> {
        let mine = |place: &FragmentPlace| place.identification == identification;
        let mut parts: Vec<_> = self.pieces.iter().filter(|(p, _)| mine(p)).collect();
        parts.sort_by_key(|(place, _)| place.offset);
        let mut content = Vec::new();
        for (place, piece) in &parts {
            if place.offset != content.len() {
                return None;
            }
            content.extend(piece);
        }
        let complete = parts.last().is_some_and(|(place, _)| !place.more);
        let fragments = parts.len();
        if !complete {
            return None;
        }
        self.pieces.retain(|(place, _)| !mine(place));
        Some((content, fragments))
    }
}
