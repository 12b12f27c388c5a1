//! The same for a connected UDP socket: the peer's next datagram has the headers of the last one, except for lengths,
//! checksums, traffic class and TTL. The slow path takes datagrams that arrived in fragments, with IP options or
//! extension headers, without a checksum, padded, or with a link-local address, whose device matters.

use core::net::{IpAddr, SocketAddr};

use portolan_proto::ip::IpOptions;
use portolan_types::Protocol;
use portolan_wire::checksum::{Offload, Sum, verify};
use portolan_wire::udp::{CHECKSUM_AT, HEADER_LEN};

use super::pattern::{IP, LONGEST, Pattern, START, is_plain_v4, mask_of_ip, transport_at};
use crate::packet::{Packet, Transport};

/// The expected headers of the next datagram.
#[derive(Debug)]
pub(crate) struct ExpectedDatagram {
    pattern: Pattern,
    source: SocketAddr,
    destination: SocketAddr,
    /// Checksum of both addresses and the protocol.
    pseudo: Sum,
}

/// An expected datagram, with the fields that [`Packet::parse`] would have returned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MetDatagram<'a> {
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    /// Fields of the IP header.
    pub(crate) ip: IpOptions,
    pub(crate) payload: &'a [u8],
}

impl ExpectedDatagram {
    /// Learns from a datagram of the peer.
    pub(crate) fn after(frame: &[u8], packet: &Packet<'_>) -> Option<ExpectedDatagram> {
        let Transport::Udp { .. } = &packet.transport else {
            return None;
        };
        let (source, destination) = (packet.source, packet.destination);
        if [source, destination].into_iter().any(is_of_a_link) || destination.ip().is_multicast() {
            return None;
        }
        let is_v4 = is_plain_v4(frame, Protocol::Udp.number())?;
        let transport = transport_at(is_v4);
        let payload = transport + HEADER_LEN;
        let mut mask = [0; LONGEST];
        let at = mask_of_ip(&mut mask, is_v4);
        mask[at..at + 4].fill(0xff);
        let mut value = [0; LONGEST];
        value[..payload - START].copy_from_slice(frame.get(START..payload)?);
        if is_v4 {
            // A reassembled datagram may still have fragment fields in its header.
            value[IP - START + 6..IP - START + 8].fill(0);
        }
        Some(ExpectedDatagram {
            pattern: Pattern::new(&value, &mask, (transport, payload)),
            source,
            destination,
            pseudo: Sum::pseudo_header(source.ip(), destination.ip(), Protocol::Udp.number(), 0),
        })
    }

    /// Whether the packet has the expected endpoints.
    pub(crate) fn is_between(&self, packet: &Packet<'_>) -> bool {
        self.source == packet.source && self.destination == packet.destination
    }

    /// Extracts the datagram if the frame is as expected and `peer` is its source.
    pub(crate) fn meet<'a>(
        &self,
        frame: &'a [u8],
        peer: Option<SocketAddr>,
    ) -> Option<MetDatagram<'a>> {
        let pattern = &self.pattern;
        if peer != Some(self.source) || !pattern.fits(frame) || !pattern.is_whole(frame) {
            return None;
        }
        let datagram = frame.get(pattern.transport..)?;
        let said = u16::from_be_bytes(datagram.get(4..6)?.try_into().ok()?);
        if usize::from(said) != datagram.len() || datagram.get(CHECKSUM_AT..HEADER_LEN)? == [0, 0] {
            return None;
        }
        let pseudo = self.pseudo.over(&u32::from(said).to_be_bytes());
        if !verify(pseudo, datagram, CHECKSUM_AT, Offload::MayBePartial) {
            return None;
        }
        Some(MetDatagram {
            source: self.source,
            destination: self.destination,
            ip: self.ip_of(frame),
            payload: &datagram[HEADER_LEN..],
        })
    }

    /// The IP fields of a frame that matches the pattern.
    fn ip_of(&self, frame: &[u8]) -> IpOptions {
        let (ttl, tos) = match self.source.ip() {
            IpAddr::V4(_) => (frame[IP + 8], frame[IP + 1]),
            IpAddr::V6(_) => (frame[IP + 7], frame[IP] << 4 | frame[IP + 1] >> 4),
        };
        IpOptions {
            ttl,
            tos,
            ..IpOptions::default()
        }
    }
}

/// Whether the address depends on the link.
fn is_of_a_link(endpoint: SocketAddr) -> bool {
    match endpoint {
        SocketAddr::V4(_) => false,
        SocketAddr::V6(v6) => v6.scope_id() != 0 || v6.ip().is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
