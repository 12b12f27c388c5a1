//! Built headers are parsed back unchanged, by this crate and by `etherparse`; and both parse bytes of
//! other origin alike.

use core::net::{Ipv4Addr, Ipv6Addr};

use bolero::TypeGenerator;
use portolan_types::{MacAddr, SeqNum};
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::ethernet::{EtherType, EthernetHeader};
use portolan_wire::icmp::{Echo, IcmpMessage};
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::tcp::{self, SackBlock, TcpFlags, TcpHeader, TcpOptions, Timestamps};
use portolan_wire::udp::UdpHeader;
use portolan_wire::vnet::VnetHeader;

#[derive(Clone, Debug, TypeGenerator)]
struct Segment {
    ports: (u16, u16),
    numbers: (u32, u32),
    flags: u8,
    window: u16,
    urgent: u16,
    mss: Option<u16>,
    window_scale: Option<u8>,
    sack_permitted: bool,
    timestamps: Option<(u32, u32)>,
    sack: [(u32, u32); 4],
    blocks: u8,
    payload: Vec<u8>,
}

impl Segment {
    fn header(&self) -> TcpHeader {
        let block = |&(start, end): &(u32, u32)| SackBlock {
            start: SeqNum(start),
            end: SeqNum(end),
        };
        let blocks = usize::from(self.blocks % 5);
        TcpHeader {
            source_port: self.ports.0,
            destination_port: self.ports.1,
            seq: SeqNum(self.numbers.0),
            ack: SeqNum(self.numbers.1),
            flags: TcpFlags(self.flags),
            window: self.window,
            urgent: self.urgent,
            options: TcpOptions {
                demux: None,
                mss: self.mss.filter(|mss| *mss != 0),
                window_scale: self.window_scale,
                sack_permitted: self.sack_permitted,
                timestamps: self
                    .timestamps
                    .map(|(value, echo)| Timestamps { value, echo }),
                sack: self.sack.iter().take(blocks).map(block).collect(),
                fast_open: None,
            },
        }
    }
}

/// The options as a receiver may see them: those of a SYN only in a SYN, and without the SACK blocks
/// for which there was no room.
fn as_received(header: &TcpHeader, blocks: usize) -> TcpHeader {
    let mut header = header.clone();
    if !header.flags.contains(TcpFlags::SYN) {
        header.options.mss = None;
        header.options.window_scale = None;
        header.options.sack_permitted = false;
    }
    header.options.sack.truncate(blocks);
    header
}

#[test]
fn a_segment_comes_back_as_it_was_built_and_as_etherparse_reads_it() {
    portolan_fuzz::check!(3000)
        .with_type::<Segment>()
        .for_each(|segment| {
            let header = segment.header();
            let mut bytes = vec![0; header.header_len()];
            assert_eq!(header.emit(&mut bytes), bytes.len());
            assert!(bytes.len() <= tcp::MAX_HEADER_LEN && bytes.len().is_multiple_of(4));
            bytes.extend(&segment.payload);
            let (parsed, length) = TcpHeader::parse(&bytes).expect("what was built parses");
            assert_eq!(&bytes[length..], &segment.payload);
            let blocks = parsed.options.sack.len();
            assert_eq!(parsed, as_received(&header, blocks));

            let oracle = etherparse::TcpSlice::from_slice(&bytes).expect("etherparse agrees");
            assert_eq!(oracle.sequence_number(), header.seq.0);
            assert_eq!(oracle.window_size(), header.window);
            assert_eq!(oracle.payload(), segment.payload);
            for element in oracle.options_iterator() {
                element.expect("etherparse reads every option");
            }
        });
}

#[test]
fn etherparse_reads_the_same_options_from_any_bytes() {
    use etherparse::TcpOptionElement as Element;
    portolan_fuzz::check!(5000)
        .with_type::<(Segment, Vec<(u8, u8)>)>()
        .for_each(|(segment, damages)| {
            let mut header = segment.header();
            header.flags = header.flags.with(TcpFlags::SYN);
            let mut bytes = vec![0; header.header_len()];
            header.emit(&mut bytes);
            for &(at, value) in damages.iter().take(4) {
                let at = tcp::HEADER_LEN + usize::from(at);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            let Ok((parsed, _)) = TcpHeader::parse(&bytes) else {
                return;
            };
            let oracle = etherparse::TcpSlice::from_slice(&bytes).expect("etherparse agrees");
            let (mut mss, mut scale, mut stamps) = (None, None, None);
            for element in oracle.options_iterator() {
                match element {
                    Ok(Element::MaximumSegmentSize(value)) if value != 0 => mss = Some(value),
                    Ok(Element::WindowScale(value)) => scale = Some(value),
                    Ok(Element::Timestamp(value, echo)) => {
                        stamps = Some(Timestamps { value, echo });
                    }
                    Ok(_) => {}
                    // It does not skip unknown options.
                    Err(_) => return,
                }
            }
            assert_eq!(parsed.options.window_scale, scale);
            assert_eq!(parsed.options.timestamps, stamps);
            if mss.is_some() {
                assert!(parsed.options.mss.is_some());
            }
        });
}

#[derive(Clone, Debug, TypeGenerator)]
struct Packet {
    traffic_class: u8,
    identification: u16,
    dont_fragment: bool,
    more_fragments: bool,
    offset: u16,
    ttl: u8,
    protocol: u8,
    source: u32,
    destination: u32,
    payload: Vec<u8>,
    padding: u8,
}

#[test]
fn an_ipv4_packet_comes_back_as_it_was_built_and_as_etherparse_reads_it() {
    portolan_fuzz::check!(2000)
        .with_type::<Packet>()
        .for_each(|packet| {
            let header = Ipv4Header {
                traffic_class: packet.traffic_class,
                identification: packet.identification,
                dont_fragment: packet.dont_fragment,
                more_fragments: packet.more_fragments,
                fragment_offset: packet.offset & 0xfff8,
                ttl: packet.ttl,
                protocol: packet.protocol,
                source: Ipv4Addr::from(packet.source),
                destination: Ipv4Addr::from(packet.destination),
                payload_len: packet.payload.len() as u16,
            };
            let mut bytes = vec![0; ipv4::HEADER_LEN];
            header.emit(&mut bytes);
            bytes.extend(&packet.payload);
            bytes.extend(vec![0; packet.padding.into()]);
            assert_eq!(Ipv4Header::parse(&bytes), Ok((header, &packet.payload[..])));
            let (oracle, _) = etherparse::Ipv4Header::from_slice(&bytes).expect("agrees");
            assert_eq!(oracle.calc_header_checksum(), oracle.header_checksum);
            assert_eq!(oracle.fragment_offset.value() * 8, header.fragment_offset);
            assert_eq!(oracle.time_to_live, header.ttl);
        });
}

#[test]
fn no_ipv4_packet_that_etherparse_refuses_is_read() {
    portolan_fuzz::check!(5000)
        .with_type::<(Vec<u8>, u8)>()
        .for_each(|(bytes, words)| {
            let mut bytes = bytes.clone();
            if bytes.len() < ipv4::HEADER_LEN {
                return;
            }
            // Most bytes are not packets; give them a valid length and checksum.
            let header_len = usize::from(5 + words % 11) * 4;
            bytes.resize(bytes.len().max(header_len), 0);
            bytes[0] = 0x40 | (header_len / 4) as u8;
            let length = (bytes.len() as u16).to_be_bytes();
            bytes[2..4].copy_from_slice(&length);
            bytes[10..12].fill(0);
            let sum = Sum::default().over(&bytes[..header_len]).checksum();
            bytes[10..12].copy_from_slice(&sum.to_be_bytes());
            let (header, payload) = Ipv4Header::parse(&bytes).expect("it is one now");
            assert_eq!(payload, &bytes[header_len..]);
            let (oracle, rest) = etherparse::Ipv4Header::from_slice(&bytes).expect("agrees");
            assert_eq!(rest, payload);
            assert_eq!(oracle.protocol.0, header.protocol);
            assert_eq!(oracle.more_fragments, header.more_fragments);
            assert_eq!(Ipv4Addr::from(oracle.source), header.source);
        });
}

/// Chains of extension headers, some truncated, some endless.
#[derive(Clone, Debug, TypeGenerator)]
struct Chain {
    first: u8,
    links: Vec<(u8, u8)>,
    payload: Vec<u8>,
    cut: u8,
}

const EXTENSIONS: [u8; 7] = [0, 43, 44, 60, 51, 6, 17];

#[test]
fn chains_of_ipv6_extension_headers_are_walked_within_the_packet() {
    portolan_fuzz::check!(5000)
        .with_type::<Chain>()
        .for_each(|chain| {
            let kind = |code: u8| EXTENSIONS[usize::from(code) % EXTENSIONS.len()];
            let mut body = Vec::new();
            for &(next, words) in chain.links.iter().take(20) {
                let words = words % 4;
                body.extend([kind(next), words]);
                body.extend(vec![0; 6 + 8 * usize::from(words)]);
            }
            body.extend(&chain.payload);
            let mut bytes = vec![0; ipv6::HEADER_LEN];
            bytes[0] = 0x60;
            bytes[4..6].copy_from_slice(&(body.len() as u16).to_be_bytes());
            bytes[6] = kind(chain.first);
            bytes.extend(&body);
            bytes.truncate(bytes.len().saturating_sub(usize::from(chain.cut / 16)));
            if let Ok((header, payload)) = Ipv6Header::parse(&bytes) {
                assert!(bytes.ends_with(payload), "all of the rest is payload");
                assert!(usize::from(header.payload_len) <= bytes.len() - ipv6::HEADER_LEN);
            }
            let _ = Ipv6Header::parse_quoted(&bytes);
        });
}

#[test]
fn datagrams_frames_and_echoes_come_back_as_they_were_built() {
    portolan_fuzz::check!(2000)
        .with_type::<(u16, u16, u32, u128, Vec<u8>, bool)>()
        .for_each(|(a, b, v4, v6, payload, six)| {
            let (source, destination) = if *six {
                (Ipv6Addr::from(*v6).into(), Ipv6Addr::LOCALHOST.into())
            } else {
                (Ipv4Addr::from(*v4).into(), Ipv4Addr::LOCALHOST.into())
            };
            let header = UdpHeader {
                source_port: *a,
                destination_port: *b,
                payload_len: payload.len() as u16,
                checksum: 0,
            };
            let header = header.with_checksum(source, destination, &[payload]);
            let mut bytes = vec![0; 8];
            header.emit(&mut bytes);
            bytes.extend(payload);
            let (parsed, data) = UdpHeader::parse(&bytes).expect("what was built parses");
            assert_eq!((parsed, data), (header, &payload[..]));
            assert!(parsed.verify(source, destination, data, Offload::Complete));
            let oracle = etherparse::UdpSlice::from_slice(&bytes).expect("agrees");
            assert_eq!(oracle.payload(), payload);

            let frame = EthernetHeader {
                destination: MacAddr([1; 6]),
                source: MacAddr([2; 6]),
                ether_type: EtherType(*a),
            };
            let mut bytes = vec![0; 14];
            frame.emit(&mut bytes);
            bytes.extend(payload);
            assert_eq!(EthernetHeader::parse(&bytes), Ok((frame, &payload[..])));

            let echo = IcmpMessage::EchoRequest(Echo {
                identifier: *a,
                sequence: *b,
                data: payload,
            });
            let mut bytes = vec![0; echo.emitted_len()];
            echo.emit_v4(&mut bytes);
            assert_eq!(IcmpMessage::parse_v4(&bytes), Ok(echo));
        });
}

#[test]
fn one_changed_bit_is_noticed_by_a_checksum() {
    portolan_fuzz::check!(2000)
        .with_type::<(Vec<u8>, u16)>()
        .for_each(|(payload, at)| {
            let mut bytes = vec![0; tcp::HEADER_LEN];
            TcpHeader::default().emit(&mut bytes);
            bytes.extend(payload);
            let localhost = Ipv4Addr::LOCALHOST.into();
            let pseudo = Sum::pseudo_header(localhost, localhost, 6, bytes.len());
            let sum = pseudo.over(&bytes).checksum();
            bytes[tcp::CHECKSUM_AT..][..2].copy_from_slice(&sum.to_be_bytes());
            assert!(verify(pseudo, &bytes, tcp::CHECKSUM_AT, Offload::Complete));
            let bit = usize::from(*at) % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!verify(pseudo, &bytes, tcp::CHECKSUM_AT, Offload::Complete));
        });
}

#[test]
fn a_vnet_header_of_any_bytes_is_read_without_a_panic() {
    portolan_fuzz::check!(1000).for_each(|bytes| {
        if let Ok((header, rest)) = VnetHeader::parse(bytes) {
            assert!(bytes.ends_with(rest));
            header.gso();
            let mut again = vec![0; bytes.len() - rest.len()];
            header.emit(&mut again);
            assert!(bytes.starts_with(&again));
        }
        let _ = EthernetHeader::parse(bytes);
    });
}
