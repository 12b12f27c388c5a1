//! How datagrams leave, and where they wait for a neighbour's address.

use core::net::{IpAddr, SocketAddr};

use portolan_types::{Protocol, Slot, scope_of};
use portolan_wire::{ipv4, udp};

use super::{Entry, Stack, entry_of};
use crate::counters::Fate;
use crate::frame::{Frame, HEAD_MAX, Wire};
use crate::routes::Routes;
use crate::session::{IpOptions, MtuDiscovery, Session};
use crate::way::{Ends, NextHop, NoWay, Way};

/// Datagrams that wait for a neighbour's address, over all sessions (Linux: `unres_qlen`).
const PARKED_MAX: usize = 64;

/// A datagram whose next hop has no link-layer address yet.
#[derive(Debug)]
pub(super) struct Parked {
    source: SocketAddr,
    destination: SocketAddr,
    ip: IpOptions,
    data: Vec<u8>,
}

/// Why a datagram was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("no UDP session there")]
    NoSession,
    #[error("no destination")]
    NoDestination,
    #[error("message too long")]
    TooLong,
    #[error("no route to host")]
    NoRoute,
    /// The destination is not to be reached by a managed device: the kernel may know how.
    #[error("destination is not behind a managed device")]
    NotOurs,
    /// The device is busy; try again when the wire has room.
    #[error("device busy")]
    Full,
}

impl Stack {
    /// Sends one datagram. A destination overrides the session's peer.
    pub fn send_datagram(
        &mut self,
        slot: Slot,
        destination: Option<SocketAddr>,
        payload: [&[u8]; 2],
        routes: &Routes,
        wire: &mut impl Wire,
    ) -> Result<usize, SendError> {
        if wire.is_full() {
            return Err(SendError::Full);
        }
        let entry = entry_of(&mut self.places, slot.0).ok_or(SendError::NoSession)?;
        let Entry {
            session: Session::Udp(session),
            way,
            ..
        } = entry
        else {
            return Err(SendError::NoSession);
        };
        let destination = destination
            .or(session.remote)
            .ok_or(SendError::NoDestination)?;
        let length = payload[0].len() + payload[1].len();
        let source = match session.local.ip() {
            any if any.is_unspecified() => way
                .as_ref()
                .filter(|way| way.leads_to(destination.ip(), scope_of(destination), routes))
                .map(|way| way.template.source())
                .or_else(|| {
                    routes
                        .path_in(destination.ip(), scope_of(destination))
                        .ok()?
                        .source
                })
                .ok_or(SendError::NoRoute)?,
            bound => bound,
        };
        let source = SocketAddr::new(source, session.local.port());
        let ends = Ends {
            protocol: Protocol::Udp,
            source: source.ip(),
            destination: destination.ip(),
            scope: scope_of(destination),
        };
        if length > longest(destination.ip()) {
            return Err(SendError::TooLong);
        }
        let unresolved = match Way::current(way, ends, session.ip, routes, &self.mtus) {
            Ok(way) => {
                let ports = (source.port(), destination.port());
                transmit_datagram(way, wire, ports, session.ip.discovery, payload)?;
                None
            }
            Err(NoWay::Unresolved(next_hop)) => Some(next_hop),
            Err(NoWay::NotOurs) => return Err(SendError::NotOurs),
            Err(NoWay::NoRoute) => return Err(SendError::NoRoute),
        };
        session.datagrams_out += 1;
        session.octets_out += length as u64;
        let ip = session.ip;
        if let Some(next_hop) = unresolved {
            self.park(
                next_hop,
                Parked {
                    source,
                    destination,
                    ip,
                    data: payload.concat(),
                },
            );
        }
        Ok(length)
    }

    /// Like the kernel's, the oldest goes when too many wait.
    fn park(&mut self, next_hop: NextHop, parked: Parked) {
        self.unresolved.push(next_hop);
        if self.parked.len() == PARKED_MAX {
            self.parked.pop_front();
            self.counters.count(Fate::ParkedTooMany);
        }
        self.parked.push_back(parked);
    }

    /// Tries those that wait, now that the routes have changed.
    pub(super) fn retry_parked(&mut self, routes: &Routes, wire: &mut impl Wire) {
        let mtus = &self.mtus;
        self.parked.retain(|parked| {
            let ends = Ends {
                protocol: Protocol::Udp,
                source: parked.source.ip(),
                destination: parked.destination.ip(),
                scope: scope_of(parked.destination),
            };
            match Way::find(ends, parked.ip, routes, mtus) {
                Ok(way) => {
                    let ports = (parked.source.port(), parked.destination.port());
                    let payload: [&[u8]; 2] = [&parked.data, &[]];
                    // Too long for the path: nobody waits for the answer any more.
                    let _ = transmit_datagram(&way, wire, ports, parked.ip.discovery, payload);
                    false
                }
                Err(no_way) => matches!(no_way, NoWay::Unresolved(_)),
            }
        });
    }
}

/// Sends a datagram whole if the path takes it so, else in fragments or not at all.
fn transmit_datagram(
    way: &Way,
    wire: &mut impl Wire,
    ports: (u16, u16),
    discovery: MtuDiscovery,
    payload: [&[u8]; 2],
) -> Result<(), SendError> {
    let length = payload[0].len() + payload[1].len();
    let mtu = way.mtu_for(discovery) as usize;
    let fragment_size = if way.ip_header() + udp::HEADER_LEN + length <= mtu {
        None
    } else if discovery.fragments_here() {
        Some(way.fragment_size(mtu).ok_or(SendError::TooLong)?)
    } else {
        return Err(SendError::TooLong);
    };
    let mut head = [0; HEAD_MAX];
    let head = way
        .template
        .udp_head(&mut head, ports.0, ports.1, length, fragment_size);
    wire.transmit(&Frame { head, payload });
    Ok(())
}

/// The longest payload whose length UDP and IP can say.
fn longest(destination: IpAddr) -> usize {
    let headers = match destination {
        IpAddr::V4(_) => ipv4::HEADER_LEN + udp::HEADER_LEN,
        IpAddr::V6(_) => udp::HEADER_LEN,
    };
    usize::from(u16::MAX) - headers
}
