//! Forged frames: a correct one of the forger's own session, with one thing wrong.

use std::net::{IpAddr, Ipv4Addr};

use portolan_sys::tap::VNET_HEADER;
use portolan_types::FlowKey;
use portolan_wire::checksum::Sum;

/// Marks forged frames wherever they appear.
pub(crate) const MARK: &[u8] = b"forged-by-nobody";

pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP: u8 = 1;

const IPV4: [u8; 2] = [0x08, 0x00];
const ARP: [u8; 2] = [0x08, 0x06];
const VLAN: [u8; 2] = [0x81, 0x00];

/// The fields that a forger can choose.
#[derive(Clone, Debug)]
pub(crate) struct Forgery {
    pub source_mac: [u8; 6],
    pub destination_mac: [u8; 6],
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub protocol: u8,
    pub source_port: u16,
    pub destination_port: u16,
    /// Flags and offset field of the IPv4 header.
    pub fragment: u16,
    pub ip_options: bool,
    pub vlan: bool,
}

impl Forgery {
    /// Returns a correct segment of `flow`.
    pub(crate) fn of(flow: &FlowKey, source_mac: [u8; 6], destination_mac: [u8; 6]) -> Forgery {
        Forgery {
            source_mac,
            destination_mac,
            source: v4(flow.local.ip()),
            destination: v4(flow.remote.ip()),
            protocol: flow.protocol.number(),
            source_port: flow.local.port(),
            destination_port: flow.remote.port(),
            fragment: 0,
            ip_options: false,
            vlan: false,
        }
    }

    /// Returns the frame as it is written to a tap.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut frame = vec![0; VNET_HEADER];
        frame.extend(self.destination_mac);
        frame.extend(self.source_mac);
        if self.vlan {
            frame.extend(VLAN);
            frame.extend([0, 7]);
        }
        frame.extend(IPV4);
        let transport = self.transport();
        frame.extend(self.ip_header(transport.len()));
        frame.extend(transport);
        frame
    }

    fn ip_header(&self, payload: usize) -> Vec<u8> {
        let options: &[u8] = if self.ip_options { &[1, 1, 1, 0] } else { &[] };
        let length = 20 + options.len();
        let total = u16::try_from(length + payload).unwrap();
        let mut header = vec![0x40 | (length / 4) as u8, 0];
        header.extend(total.to_be_bytes());
        header.extend([0x12, 0x34]);
        header.extend(self.fragment.to_be_bytes());
        header.extend([64, self.protocol, 0, 0]);
        header.extend(self.source.octets());
        header.extend(self.destination.octets());
        header.extend(options);
        let sum = Sum::default().over(&header).checksum();
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = self.source_port.to_be_bytes().to_vec();
        bytes.extend(self.destination_port.to_be_bytes());
        match self.protocol {
            // Echo request, identifier and sequence.
            ICMP => bytes = vec![8, 0, 0, 0, 0, 1, 0, 1],
            UDP => {
                bytes.extend(((8 + MARK.len()) as u16).to_be_bytes());
                bytes.extend([0, 0]);
            }
            // An acknowledgement far outside any window.
            _ => bytes.extend([0x55, 0, 0, 0, 0x66, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0]),
        }
        bytes.extend(MARK);
        bytes
    }
}

/// An ARP reply that claims the address.
pub(crate) fn arp(source_mac: [u8; 6], claimed: Ipv4Addr, told: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0; VNET_HEADER];
    frame.extend([0xff; 6]);
    frame.extend(source_mac);
    frame.extend(ARP);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 2]);
    frame.extend(source_mac);
    frame.extend(claimed.octets());
    frame.extend([0xff; 6]);
    frame.extend(told.octets());
    frame.extend(MARK);
    frame
}

pub(crate) fn is_marked(frame: &[u8]) -> bool {
    frame.windows(MARK.len()).any(|window| window == MARK)
}

pub(crate) fn v4(address: IpAddr) -> Ipv4Addr {
    match address {
        IpAddr::V4(address) => address,
        IpAddr::V6(_) => panic!("the tests use IPv4"),
    }
}
