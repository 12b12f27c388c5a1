//! Builds the frames of the fixtures.

use std::net::{IpAddr, SocketAddr};

use portolan_types::{FlowKey, MacAddr, Protocol};
use portolan_wire::ethernet::{self, EtherType, EthernetHeader};
use portolan_wire::icmp::{Cause, IcmpError, IcmpMessage};
use portolan_wire::ipv4::{self, Ipv4Header};
use portolan_wire::ipv6::{self, Ipv6Header};
use portolan_wire::tcp::{TcpFlags, TcpHeader};
use portolan_wire::udp::{self, UdpHeader};

/// A test run delivers through the loopback device, whose address is zero.
pub(super) const HOST_MAC: MacAddr = MacAddr([0; 6]);
pub(super) const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

/// The fields of a frame, to be changed one by one.
#[derive(Clone)]
pub(super) struct Frame {
    pub source_mac: MacAddr,
    pub destination_mac: MacAddr,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub protocol: Protocol,
    pub payload: usize,
}

impl Frame {
    /// A packet of `flow` as received from the peer.
    pub(super) fn received(flow: &FlowKey) -> Frame {
        Frame {
            source_mac: PEER_MAC,
            destination_mac: HOST_MAC,
            source: flow.remote,
            destination: flow.local,
            protocol: flow.protocol,
            payload: 1,
        }
    }

    /// A packet of `flow` as this host sends it from the device with address `mac`.
    pub(super) fn sent(flow: &FlowKey, mac: MacAddr) -> Frame {
        Frame {
            source_mac: mac,
            destination_mac: PEER_MAC,
            source: flow.local,
            destination: flow.remote,
            protocol: flow.protocol,
            payload: 1,
        }
    }

    pub(super) fn build(&self) -> Vec<u8> {
        let transport = self.transport();
        self.around(self.protocol.number(), &transport)
    }

    /// The frame with hop-by-hop options, if IPv6, or with IPv4 options, before the transport
    /// header.
    pub(super) fn build_with_options(&self) -> Vec<u8> {
        if self.source.is_ipv6() {
            let mut payload = vec![self.protocol.number(), 1];
            payload.resize(16, 0);
            payload.extend(self.transport());
            return self.around(0, &payload);
        }
        let mut frame = self.around(self.protocol.number(), &[]);
        frame[ethernet::HEADER_LEN] = 0x46;
        frame.extend([1, 1, 1, 0]);
        frame.extend(self.transport());
        frame
    }

    /// An ICMP error from the destination's side about this packet, which `self` sent.
    pub(super) fn build_error_about(&self, cause: Cause) -> Vec<u8> {
        let sent = self.build();
        let quoted = &sent[ethernet::HEADER_LEN..];
        let message = IcmpMessage::Error(IcmpError { cause, quoted });
        let mut bytes = vec![0; message.emitted_len()];
        let back = Frame {
            source_mac: PEER_MAC,
            destination_mac: HOST_MAC,
            source: self.destination,
            destination: self.source,
            ..self.clone()
        };
        match (back.source.ip(), back.destination.ip()) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                message.emit_v6(source, destination, &mut bytes);
                back.around(58, &bytes)
            }
            _ => {
                message.emit_v4(&mut bytes);
                back.around(1, &bytes)
            }
        }
    }

    /// Ethernet and IP headers around an IP payload.
    pub(super) fn around(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; ethernet::HEADER_LEN];
        let ether_type = if self.source.is_ipv4() {
            EtherType::IPV4
        } else {
            EtherType::IPV6
        };
        EthernetHeader {
            destination: self.destination_mac,
            source: self.source_mac,
            ether_type,
        }
        .emit(&mut frame);
        frame.extend(self.ip_header(protocol, payload.len() as u16));
        frame.extend_from_slice(payload);
        frame
    }

    fn ip_header(&self, protocol: u8, payload_len: u16) -> Vec<u8> {
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = vec![0; ipv4::HEADER_LEN];
                Ipv4Header {
                    traffic_class: 0,
                    identification: 1,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    ttl: 64,
                    protocol,
                    source,
                    destination,
                    payload_len,
                }
                .emit(&mut header);
                header
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut header = vec![0; ipv6::HEADER_LEN];
                Ipv6Header {
                    traffic_class: 0,
                    flow_label: 0,
                    hop_limit: 64,
                    protocol,
                    source,
                    destination,
                    payload_len,
                    fragment: None,
                }
                .emit(&mut header);
                header
            }
            _ => panic!("one family per frame"),
        }
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = match self.protocol {
            Protocol::Tcp => {
                let header = TcpHeader {
                    source_port: self.source.port(),
                    destination_port: self.destination.port(),
                    flags: TcpFlags::ACK,
                    ..TcpHeader::default()
                };
                let mut bytes = vec![0; header.header_len()];
                header.emit(&mut bytes);
                bytes
            }
            Protocol::Udp => {
                let mut bytes = vec![0; udp::HEADER_LEN];
                UdpHeader {
                    source_port: self.source.port(),
                    destination_port: self.destination.port(),
                    payload_len: self.payload as u16,
                    checksum: 0,
                }
                .emit(&mut bytes);
                bytes
            }
        };
        bytes.extend((0..self.payload).map(|n| n as u8));
        bytes
    }
}
