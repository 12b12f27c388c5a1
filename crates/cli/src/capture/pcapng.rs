//! Writes pcap-ng (draft-ietf-opsawg-pcapng): one section, an interface for each process, and its statistics at the end.
//! All interfaces have the same link type and snapshot length, since libpcap reads no other files.

use std::io::{self, Write};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;

const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const UNKNOWN_LENGTH: u64 = u64::MAX;
const LINKTYPE_ETHERNET: u16 = 1;
/// As tcpdump's.
const SNAPSHOT_LENGTH: u32 = 262_144;

/// Options. The numbers depend on the block.
const USER_APPLICATION: u16 = 4;
const NAME: u16 = 2;
const TIME_RESOLUTION: u16 = 9;
const FLAGS: u16 = 2;
const RECEIVED: u16 = 4;
const DROPPED: u16 = 5;

const NANOSECONDS: u8 = 9;

/// The direction of a packet, seen from its interface (bits 0 and 1 of the flags).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    In = 1,
    Out = 2,
}

/// A captured packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// Nanoseconds since 1970.
    pub at: u64,
    pub way: Way,
    /// With the bytes that were not captured.
    pub length: u32,
    pub bytes: Vec<u8>,
}

pub(super) struct PcapNg<W> {
    out: W,
    interfaces: u32,
}

impl<W: Write> PcapNg<W> {
    /// Begins a file.
    pub(super) fn begin(out: W, application: &str) -> io::Result<PcapNg<W>> {
        let mut file = PcapNg { out, interfaces: 0 };
        let mut body = Vec::new();
        body.extend(BYTE_ORDER.to_le_bytes());
        // Version 1.0.
        body.extend(1u16.to_le_bytes());
        body.extend(0u16.to_le_bytes());
        body.extend(UNKNOWN_LENGTH.to_le_bytes());
        option(&mut body, USER_APPLICATION, application.as_bytes());
        end_of_options(&mut body);
        file.block(SECTION_HEADER, &body)?;
        Ok(file)
    }

    /// Adds an interface and returns its number.
    pub(super) fn interface(&mut self, name: &str) -> io::Result<u32> {
        let mut body = Vec::new();
        body.extend(LINKTYPE_ETHERNET.to_le_bytes());
        body.extend(0u16.to_le_bytes());
        body.extend(SNAPSHOT_LENGTH.to_le_bytes());
        option(&mut body, NAME, name.as_bytes());
        option(&mut body, TIME_RESOLUTION, &[NANOSECONDS]);
        end_of_options(&mut body);
        self.block(INTERFACE_DESCRIPTION, &body)?;
        self.interfaces += 1;
        Ok(self.interfaces - 1)
    }

    pub(super) fn packet(&mut self, interface: u32, packet: &Packet) -> io::Result<()> {
        let mut body = Vec::with_capacity(packet.bytes.len() + 64);
        body.extend(interface.to_le_bytes());
        time(&mut body, packet.at);
        body.extend((packet.bytes.len() as u32).to_le_bytes());
        body.extend(packet.length.to_le_bytes());
        padded(&mut body, &packet.bytes);
        option(&mut body, FLAGS, &(packet.way as u32).to_le_bytes());
        end_of_options(&mut body);
        self.block(ENHANCED_PACKET, &body)
    }

    /// Writes the figures of an interface, up to `at`.
    pub(super) fn statistics(
        &mut self,
        interface: u32,
        at: u64,
        (received, dropped): (u64, u64),
    ) -> io::Result<()> {
        let mut body = Vec::new();
        body.extend(interface.to_le_bytes());
        time(&mut body, at);
        option(&mut body, RECEIVED, &received.to_le_bytes());
        option(&mut body, DROPPED, &dropped.to_le_bytes());
        end_of_options(&mut body);
        self.block(INTERFACE_STATISTICS, &body)
    }

    #[cfg(test)]
    pub(super) fn into_inner(self) -> W {
        self.out
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn block(&mut self, kind: u32, body: &[u8]) -> io::Result<()> {
        // Type and length before the body, and the length once more after it.
        let length = (body.len() + 12) as u32;
        self.out.write_all(&kind.to_le_bytes())?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(body)?;
        self.out.write_all(&length.to_le_bytes())
    }
}

fn padded(body: &mut Vec<u8>, bytes: &[u8]) {
    body.extend(bytes);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(u16::MAX.into())];
    body.extend(code.to_le_bytes());
    body.extend((value.len() as u16).to_le_bytes());
    padded(body, value);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend([0; 4]);
}

/// The high half comes first.
fn time(body: &mut Vec<u8>, at: u64) {
    body.extend(((at >> 32) as u32).to_le_bytes());
    body.extend((at as u32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Splits a file into its blocks' types and bodies, as a reader would.
    fn blocks(mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let length = word(bytes, 4) as usize;
            assert_eq!(length % 4, 0);
            assert_eq!(word(bytes, length - 4) as usize, length);
            found.push((word(bytes, 0), bytes[8..length - 4].to_vec()));
            bytes = &bytes[length..];
        }
        found
    }

    #[test]
    fn a_file_consists_of_whole_blocks() {
        let mut bytes = Vec::new();
        let mut file = PcapNg::begin(&mut bytes, "portolan").unwrap();
        let interface = file.interface("odd[1]").unwrap();
        for length in 0..9u8 {
            let packet = Packet {
                at: (7 << 32) | 5,
                way: Way::In,
                length: 100,
                bytes: (0..length).collect(),
            };
            file.packet(interface, &packet).unwrap();
        }
        file.statistics(interface, 9, (9, 2)).unwrap();
        let blocks = blocks(&bytes);
        let kinds: Vec<u32> = blocks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds[..2], [SECTION_HEADER, INTERFACE_DESCRIPTION]);
        assert_eq!(kinds[2..11], [ENHANCED_PACKET; 9]);
        assert_eq!(kinds[11..], [INTERFACE_STATISTICS]);
        let (_, packet) = &blocks[5];
        let words = [0, 4, 8, 12, 16].map(|at| word(packet, at));
        assert_eq!(words, [0, 7, 5, 3, 100]);
        assert_eq!(packet[20..24], [0, 1, 2, 0]);
        assert_eq!(word(packet, 28), 1, "flags");
    }
}
