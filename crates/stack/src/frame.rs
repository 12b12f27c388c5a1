//! Building frames: a header template per destination, completed for each segment.

use core::net::IpAddr;

use portolan_proto::ip::IpOptions;
use portolan_tcp::Codepoint;
use portolan_types::{Handle, MacAddr, Protocol, Slot};
use portolan_wire::checksum::Sum;
use portolan_wire::demux::{
    DESTINATION_OPTIONS, ENCLOSED_V4_LEN, ENCLOSED_V6_LEN, enclose_v4, enclose_v6,
};
use portolan_wire::ethernet::{self, EtherType};
use portolan_wire::tcp::{self, TcpHeader};
use portolan_wire::vnet::{self, Gso, VnetHeader};
use portolan_wire::{ipv4, ipv6, udp};

/// Bytes of the virtio-net header that a tap expects before each frame.
const VNET: usize = vnet::HEADER_LEN;
const ETHERNET: usize = ethernet::HEADER_LEN;
const IPV4: usize = ipv4::HEADER_LEN;
const IPV6: usize = ipv6::HEADER_LEN;
const TCP_MAX: usize = 60;
const UDP: usize = udp::HEADER_LEN;

/// DF, in the seventh byte of an IPv4 header (path MTU discovery, RFC 1191).
const DONT_FRAGMENT: u8 = 0x40;

/// The longest head without transport header: virtio-net, Ethernet, IPv6 with a handle.
const TEMPLATE_MAX: usize = VNET + ETHERNET + IPV6 + ENCLOSED_V6_LEN;
/// The longest head of a frame, with all TCP options.
pub(crate) const HEAD_MAX: usize = TEMPLATE_MAX + TCP_MAX;

/// A frame to send: headers (virtio-net header first), then the payload in two slices.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub head: &'a [u8],
    pub payload: [&'a [u8]; 2],
}

impl Frame<'_> {
    pub fn length(&self) -> usize {
        self.head.len() + self.payload[0].len() + self.payload[1].len()
    }
}

/// A transmit queue: a path from a holder of sessions to the device. Frames waiting in one do not delay
/// those in others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TxQueueId(pub u8);

impl TxQueueId {
    /// The queue of all sessions without one of their own.
    pub const MAIN: TxQueueId = TxQueueId(0);
}

/// Sends frames to the device. It never refuses a frame: while the device is busy it keeps the frame,
/// and [`Wire::is_full`] returns true until it is sent.
pub trait Wire {
    fn transmit(&mut self, frame: &Frame<'_>);
    fn is_full(&self) -> bool;

    /// Selects the transmit queue of the following calls. Most wires have only one.
    fn choose(&mut self, _tx_queue: TxQueueId) {}

    /// The following frames belong to the session at `slot`.
    fn serve(&mut self, _slot: Slot) {}

    /// Whether it segments a UDP payload into datagrams (USO).
    fn cuts_datagrams(&self) -> bool {
        false
    }
}

/// How the kernel cuts a datagram when it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segmentation {
    Not,
    /// Datagrams with this payload.
    Datagrams(u16),
    /// Fragments with this much IP payload.
    Fragments(u16),
}

/// The part of the head that all packets between two addresses share, with its checksum sums.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    bytes: [u8; TEMPLATE_MAX],
    length: usize,
    /// One's complement sum of addresses and protocol (the pseudo header without its length).
    pseudo_sum: u32,
    /// Sum of the IPv4 header with total length 0; unused for IPv6.
    header_sum: u32,
    source: IpAddr,
    is_ipv4: bool,
    /// The device does not segment or complete these packets: each must be final.
    is_final: bool,
}

impl Template {
    /// `None` if the addresses are of different families.
    pub(crate) fn new(
        protocol: Protocol,
        source: IpAddr,
        destination: IpAddr,
        source_mac: MacAddr,
        destination_mac: MacAddr,
        options: IpOptions,
    ) -> Option<Template> {
        // TCP sets the two low bits for each segment.
        let tos = match protocol {
            Protocol::Tcp => options.tos & !3,
            Protocol::Udp => options.tos,
        };
        let mut bytes = [0; TEMPLATE_MAX];
        bytes[VNET..VNET + 6].copy_from_slice(&destination_mac.0);
        bytes[VNET + 6..VNET + 12].copy_from_slice(&source_mac.0);
        let (ethertype, ip) = bytes[VNET + 12..].split_at_mut(2);
        let mut pseudo_sum = u32::from(protocol.number());
        let (length, header_sum, is_ipv4) = match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                ethertype.copy_from_slice(&EtherType::IPV4.0.to_be_bytes());
                ip[0] = 0x45;
                ip[1] = tos;
                if options.discovery.forbids_routers() {
                    ip[6] = DONT_FRAGMENT;
                }
                ip[8] = options.ttl;
                ip[9] = protocol.number();
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                pseudo_sum += sum(&ip[12..20]);
                (VNET + ETHERNET + IPV4, sum(&ip[..IPV4]), true)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                ethertype.copy_from_slice(&EtherType::IPV6.0.to_be_bytes());
                ip[0] = 0x60 | tos >> 4;
                ip[1] = tos << 4;
                ip[6] = protocol.number();
                ip[7] = options.ttl;
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
                pseudo_sum += sum(&ip[8..40]);
                (VNET + ETHERNET + IPV6, 0, false)
            }
            _ => return None,
        };
        Some(Template {
            bytes,
            length,
            pseudo_sum,
            header_sum,
            source,
            is_ipv4,
            is_final: false,
        })
    }

    pub(crate) fn source(&self) -> IpAddr {
        self.source
    }

    /// The template with a handle in its first option or extension header, and the handle's marker. `None` if the
    /// application has chosen a traffic class.
    pub(crate) fn enclosing(&self, handle: Handle) -> Option<Template> {
        if self.is_ipv4 {
            self.enclosing_v4(handle)
        } else {
            self.enclosing_v6(handle)
        }
    }

    fn enclosing_v4(&self, handle: Handle) -> Option<Template> {
        let mut enclosing = self.clone();
        let ip = &mut enclosing.bytes[VNET + ETHERNET..];
        if ip[1] != 0 {
            return None;
        }
        ip[0] = 0x48;
        ip[1] = handle.marker;
        ip[IPV4..][..ENCLOSED_V4_LEN].copy_from_slice(&enclose_v4(handle));
        enclosing.header_sum = sum(&ip[..IPV4 + ENCLOSED_V4_LEN]);
        enclosing.length += ENCLOSED_V4_LEN;
        Some(enclosing)
    }

    fn enclosing_v6(&self, handle: Handle) -> Option<Template> {
        let mut enclosing = self.clone();
        let ip = &mut enclosing.bytes[VNET + ETHERNET..];
        if ip[0] != 0x60 || ip[1] != 0 {
            return None;
        }
        ip[0] |= handle.marker >> 4;
        ip[1] = handle.marker << 4;
        ip[6] = DESTINATION_OPTIONS;
        ip[IPV6..][..ENCLOSED_V6_LEN].copy_from_slice(&enclose_v6(handle));
        enclosing.length += ENCLOSED_V6_LEN;
        enclosing.is_final = true;
        Some(enclosing)
    }

    /// Whether a segment with `payload` bytes can be sent with this template.
    pub(crate) fn takes(&self, payload: usize, segment_size: u16) -> bool {
        !self.is_final || !is_cut(payload, segment_size)
    }

    /// The head of a TCP segment; a nonzero `segment_size` requests segmentation by the device.
    pub(crate) fn tcp_head<'a>(
        &self,
        head: &'a mut [u8; HEAD_MAX],
        header: &TcpHeader,
        payload: [&[u8]; 2],
        segment_size: u16,
        codepoint: Codepoint,
    ) -> &'a [u8] {
        let [first, second] = payload;
        let payload = first.len() + second.len();
        let tcp_length = header.emit(&mut head[self.length..]);
        let end = self.length + tcp_length;
        self.fill(head, tcp_length + payload, tcp::CHECKSUM_AT);
        if codepoint != Codepoint::NotEct {
            self.mark(head, codepoint);
        }
        if self.is_final {
            VnetHeader::NONE.emit(head);
            complete(&mut head[self.length..end], [first, second]);
        } else if is_cut(payload, segment_size) {
            let gso = if self.is_ipv4 { Gso::TcpV4 } else { Gso::TcpV6 };
            let start = to_u16(self.length - VNET);
            VnetHeader::segments(gso, to_u16(end - VNET), start, segment_size).emit(head);
        }
        &head[..end]
    }

    /// Sets the two low bits of the traffic class, which are clear for TCP (RFC 3168 §5).
    fn mark(&self, head: &mut [u8; HEAD_MAX], codepoint: Codepoint) {
        let ip = &mut head[VNET + ETHERNET..];
        if !self.is_ipv4 {
            ip[1] |= codepoint.bits() << 4;
            return;
        }
        ip[1] |= codepoint.bits();
        let total = u32::from(u16::from_be_bytes([ip[2], ip[3]]));
        let checksum = !fold(self.header_sum + total + u32::from(codepoint.bits()));
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    }

    /// The head of a UDP datagram whose payload is cut as requested.
    pub(crate) fn udp_head<'a>(
        &self,
        head: &'a mut [u8; HEAD_MAX],
        (source_port, destination_port): (u16, u16),
        payload: usize,
        cut: Segmentation,
        no_checksum: bool,
    ) -> &'a [u8] {
        let end = self.length + UDP;
        let udp = &mut head[self.length..end];
        udp[0..2].copy_from_slice(&source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&destination_port.to_be_bytes());
        udp[4..6].copy_from_slice(&to_u16(UDP + payload).to_be_bytes());
        self.fill(head, UDP + payload, udp::CHECKSUM_AT);
        let start = to_u16(self.length - VNET);
        match cut {
            Segmentation::Not if no_checksum => {
                VnetHeader::NONE.emit(head);
                head[self.length + udp::CHECKSUM_AT..][..2].fill(0);
            }
            Segmentation::Not => {}
            Segmentation::Datagrams(size) => {
                VnetHeader::segments(Gso::UdpL4, to_u16(end - VNET), start, size).emit(head);
            }
            Segmentation::Fragments(size) => {
                VnetHeader::segments(Gso::UdpFragments, to_u16(end - VNET), start, size).emit(head);
                if self.is_ipv4 {
                    Self::allow_fragments(&mut head[VNET + ETHERNET..]);
                }
            }
        }
        &head[..end]
    }

    fn allow_fragments(ip: &mut [u8]) {
        ip[6] &= !DONT_FRAGMENT;
        ip[10..12].fill(0);
        let checksum = Sum::default().over(&ip[..IPV4]).checksum();
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Writes everything below the transport header, and the initial value of the transport checksum,
    /// which the device completes (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
    fn fill(&self, head: &mut [u8; HEAD_MAX], transport_length: usize, checksum_at: usize) {
        head[..self.length].copy_from_slice(&self.bytes[..self.length]);
        let start = to_u16(self.length - VNET);
        VnetHeader::partial_checksum(start, to_u16(checksum_at)).emit(head);
        let ip = &mut head[VNET + ETHERNET..];
        if self.is_ipv4 {
            let total = to_u16(self.length - VNET - ETHERNET + transport_length);
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            let checksum = !fold(self.header_sum + u32::from(total));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            let length = self.length - VNET - ETHERNET - IPV6 + transport_length;
            ip[4..6].copy_from_slice(&to_u16(length).to_be_bytes());
        }
        let start = fold(self.pseudo_sum + u32::from(to_u16(transport_length)));
        let at = self.length + checksum_at;
        head[at..at + 2].copy_from_slice(&start.to_be_bytes());
    }
}

fn is_cut(payload: usize, segment_size: u16) -> bool {
    segment_size != 0 && payload > usize::from(segment_size)
}

/// Completes the checksum of a TCP segment that holds the sum of the pseudo header.
fn complete(tcp: &mut [u8], payload: [&[u8]; 2]) {
    let [first, second] = payload;
    let checksum = Sum::default().over(tcp).over(first).over(second).checksum();
    tcp[tcp::CHECKSUM_AT..][..2].copy_from_slice(&checksum.to_be_bytes());
}

/// Lengths here come from segments limited by MTU or GSO; a larger one saturates, so that the device
/// drops it, instead of wrapping to a valid smaller one.
fn to_u16(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use portolan_types::SeqNum;
    use portolan_wire::checksum::{Offload, verify};
    use portolan_wire::ipv6::Ipv6Header;
    use portolan_wire::tcp::TcpFlags;

    use super::*;

    const HANDLE: Handle = Handle {
        index: 7,
        nonce: 8,
        marker: 0x0c,
    };

    fn enclosing(source: &str, destination: &str) -> Template {
        let template = Template::new(
            Protocol::Tcp,
            source.parse().unwrap(),
            destination.parse().unwrap(),
            MacAddr([2; 6]),
            MacAddr([4; 6]),
            IpOptions::default(),
        );
        template.unwrap().enclosing(HANDLE).unwrap()
    }

    fn header() -> TcpHeader {
        TcpHeader {
            source_port: 1,
            destination_port: 2,
            seq: SeqNum(3),
            ack: SeqNum(4),
            flags: TcpFlags::ACK,
            window: 5,
            urgent: 0,
            options: Default::default(),
        }
    }

    #[test]
    fn over_ipv6_no_device_has_to_do_with_a_segment_that_encloses_a_handle() {
        let template = enclosing("fd00::1", "fd00::2");
        let mut head = [0xee; HEAD_MAX];
        let payload: [&[u8]; 2] = [b"odd", b"even"];
        let head = template.tcp_head(&mut head, &header(), payload, 1400, Codepoint::Ect0);
        let mut vnet = [0xff; VNET];
        VnetHeader::NONE.emit(&mut vnet);
        assert_eq!(head[..VNET], vnet);
        let packet = [&head[VNET + ETHERNET..], &payload.concat()].concat();
        assert_eq!(packet[6], DESTINATION_OPTIONS);
        assert_eq!(packet[IPV6..][..ENCLOSED_V6_LEN], enclose_v6(HANDLE));
        let (ip, segment) = Ipv6Header::parse(&packet).unwrap();
        assert_eq!((ip.protocol, ip.traffic_class), (6, 0x0c | 2));
        let pseudo = Sum::pseudo_header(ip.source.into(), ip.destination.into(), 6, segment.len());
        let is_right = verify(pseudo, segment, tcp::CHECKSUM_AT, Offload::Complete);
        assert!(is_right && segment.ends_with(b"oddeven"));
    }

    #[test]
    fn what_a_device_is_to_cut_encloses_nothing_over_ipv6() {
        let [v4, v6] = [
            enclosing("10.0.0.1", "10.0.0.2"),
            enclosing("fd00::1", "fd00::2"),
        ];
        assert!(v6.takes(1400, 1400) && v6.takes(3000, 0));
        assert!(!v6.takes(1401, 1400));
        assert!(v4.takes(1401, 1400));
    }
}
