//! Local sessions as the segments that TCP would have sent: a session in shared memory has none. Sequence numbers are
//! positions in the streams, so that programs which read captures follow the streams, and find what was lost.

use std::net::{IpAddr, SocketAddr};

use portolan_proto::capture::{CapturedEnd, RecordHeader, flags};
use portolan_proto::local::Side;
use portolan_types::{MacAddr, SeqNum, canonical};
use portolan_wire::checksum::Sum;
use portolan_wire::ethernet::{self, EtherType, EthernetHeader};
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::tcp::{self, TcpFlags, TcpHeader, TcpOptions};

const TCP: u8 = 6;
const HOPS: u8 = 64;
/// No position of a stream gets this far.
const POSITION_MAX: u64 = 1 << 62;

/// An Ethernet frame, as far as its bytes were captured.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub from: Side,
    pub bytes: Vec<u8>,
    pub length: u32,
}

impl Segment {
    /// Its length, and the bytes that were captured.
    pub(super) fn into_data(self) -> (u32, Vec<u8>) {
        (self.length, self.bytes)
    }
}

/// The stream from one end to the other.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Position behind what was shown.
    next: u64,
    has_fin: bool,
    has_reset: bool,
}

/// Both streams of a session. Either end, or both, may record them.
#[derive(Debug)]
pub(super) struct Conversation {
    opener: SocketAddr,
    accepter: SocketAddr,
    from_opener: Stream,
    from_accepter: Stream,
}

/// The part of a segment that depends on its stream.
struct Text<'a> {
    flags: TcpFlags,
    sequence: u32,
    bytes: &'a [u8],
    length: u32,
}

impl Text<'_> {
    fn none(flags: TcpFlags, sequence: u32) -> Text<'static> {
        Text {
            flags,
            sequence,
            bytes: &[],
            length: 0,
        }
    }
}

impl Conversation {
    pub(super) fn new(end: &CapturedEnd) -> Conversation {
        let stream = |next| Stream {
            next,
            ..Stream::default()
        };
        Conversation {
            opener: canonical(end.opener),
            accepter: canonical(end.accepter),
            from_opener: stream(end.from_opener),
            from_accepter: stream(end.from_accepter),
        }
    }

    /// The handshake, if the session is shown from its start.
    pub(super) fn handshake(&self) -> Vec<Segment> {
        if self.from_opener.next > 0 || self.from_accepter.next > 0 {
            return Vec::new();
        }
        let opening = |from, flags, sequence| self.segment(from, &Text::none(flags, sequence));
        vec![
            opening(Side::Opener, TcpFlags::SYN, 0),
            opening(Side::Accepter, TcpFlags::SYN.with(TcpFlags::ACK), 0),
            opening(Side::Opener, TcpFlags::ACK, 1),
        ]
    }

    /// Shows a record of what `from` has sent, but for what was shown already: the other end records it, too.
    pub(super) fn record(
        &mut self,
        from: Side,
        header: &RecordHeader,
        bytes: &[u8],
    ) -> Vec<Segment> {
        let stream = *self.stream(from);
        if stream.has_reset || header.position > POSITION_MAX {
            return Vec::new();
        }
        let end = header.position + u64::from(header.length);
        let known = stream.next.saturating_sub(header.position);
        let start = header.position.max(stream.next);
        let length = u64::from(header.length).saturating_sub(known) as u32;
        let bytes = bytes.get(known as usize..).unwrap_or_default();
        let has_fin = header.flags & flags::FIN != 0 && !stream.has_fin && end >= stream.next;
        let mut shown = Vec::new();
        if (length > 0 && !stream.has_fin) || has_fin {
            let mut flags = TcpFlags::ACK;
            if length > 0 {
                flags = flags.with(TcpFlags::PSH);
            }
            if has_fin {
                flags = flags.with(TcpFlags::FIN);
            }
            let text = Text {
                flags,
                sequence: sequence(start),
                bytes,
                length,
            };
            shown.push(self.segment(from, &text));
            let stream = self.stream_mut(from);
            stream.next = stream.next.max(end);
            stream.has_fin |= has_fin;
        }
        if header.flags & flags::RESET != 0 {
            shown.extend(self.reset(from));
        }
        shown
    }

    /// Shows the end of a stream, unless it was shown.
    pub(super) fn close(&mut self, from: Side, is_reset: bool) -> Option<Segment> {
        let stream = *self.stream(from);
        if is_reset {
            return self.reset(from);
        }
        if stream.has_fin || stream.has_reset {
            return None;
        }
        let text = Text::none(TcpFlags::FIN.with(TcpFlags::ACK), sequence(stream.next));
        let segment = self.segment(from, &text);
        self.stream_mut(from).has_fin = true;
        Some(segment)
    }

    fn reset(&mut self, from: Side) -> Option<Segment> {
        let stream = *self.stream(from);
        if stream.has_reset {
            return None;
        }
        let next = sequence(stream.next).wrapping_add(stream.has_fin.into());
        let text = Text::none(TcpFlags::RST.with(TcpFlags::ACK), next);
        let segment = self.segment(from, &text);
        self.stream_mut(from).has_reset = true;
        Some(segment)
    }

    fn stream(&self, from: Side) -> &Stream {
        match from {
            Side::Opener => &self.from_opener,
            Side::Accepter => &self.from_accepter,
        }
    }

    fn stream_mut(&mut self, from: Side) -> &mut Stream {
        match from {
            Side::Opener => &mut self.from_opener,
            Side::Accepter => &mut self.from_accepter,
        }
    }

    fn segment(&self, from: Side, text: &Text<'_>) -> Segment {
        let (source, destination) = match from {
            Side::Opener => (self.opener, self.accepter),
            Side::Accepter => (self.accepter, self.opener),
        };
        let other = self.stream(from.other());
        let acknowledged = if text.flags.contains(TcpFlags::ACK) {
            sequence(other.next).wrapping_add(other.has_fin.into())
        } else {
            0
        };
        let header = TcpHeader {
            source_port: source.port(),
            destination_port: destination.port(),
            seq: SeqNum(text.sequence),
            ack: SeqNum(acknowledged),
            flags: text.flags,
            window: u16::MAX,
            urgent: 0,
            options: TcpOptions::default(),
        };
        let mut bytes = link(source.ip(), destination.ip(), text.length);
        let start = bytes.len();
        bytes.resize(start + tcp::HEADER_LEN, 0);
        header.emit(&mut bytes[start..]);
        bytes.extend(text.bytes);
        if text.bytes.len() == text.length as usize {
            let length = bytes.len() - start;
            let sum = Sum::pseudo_header(source.ip(), destination.ip(), TCP, length);
            let checksum = sum.over(&bytes[start..]).checksum();
            let at = start + tcp::CHECKSUM_AT;
            bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        }
        let missing = text.length - text.bytes.len() as u32;
        Segment {
            from,
            length: bytes.len() as u32 + missing,
            bytes,
        }
    }
}

/// The sequence number of a byte: the SYN has the one before the first.
fn sequence(position: u64) -> u32 {
    (position as u32).wrapping_add(1)
}

/// The headers of Ethernet, as on Linux's loopback device, and IP.
fn link(source: IpAddr, destination: IpAddr, length: u32) -> Vec<u8> {
    let none = MacAddr([0; 6]);
    let payload_len = (tcp::HEADER_LEN as u32 + length) as u16;
    let mut bytes = vec![0; ethernet::HEADER_LEN + ipv6::HEADER_LEN];
    let (link, network) = bytes.split_at_mut(ethernet::HEADER_LEN);
    let (ether_type, network_len) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let header = Ipv4Header {
                traffic_class: 0,
                identification: 0,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                ttl: HOPS,
                protocol: TCP,
                source,
                destination,
                payload_len,
            };
            header.emit(network);
            (EtherType::IPV4, ipv4::HEADER_LEN)
        }
        (source, destination) => {
            let v6 = |address| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            };
            let header = Ipv6Header {
                traffic_class: 0,
                flow_label: 0,
                hop_limit: HOPS,
                protocol: TCP,
                source: v6(source),
                destination: v6(destination),
                payload_len,
                fragment: None,
            };
            header.emit(network);
            (EtherType::IPV6, ipv6::HEADER_LEN)
        }
    };
    let header = EthernetHeader {
        destination: none,
        source: none,
        ether_type,
    };
    header.emit(link);
    bytes.truncate(ethernet::HEADER_LEN + network_len);
    bytes
}

#[cfg(test)]
mod tests;
