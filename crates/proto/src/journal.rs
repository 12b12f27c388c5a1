//! Layout of a process's journal: the connections that it has opened itself and that the server does not know yet (ADR
//! 31). The library writes it, and the server reads it when the process has ended, or no longer has the port.

use core::net::{Ipv6Addr, SocketAddr};

use portolan_types::{FlowKey, Protocol, SessionId, scope_of, scoped};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Records of a journal: the most connections of a process that the server does not know.
pub const JOURNAL_RECORDS: usize = 4096;

/// Offset of the records; before them there is the number of those that were ever used, as a 64-bit word.
pub const JOURNAL_RECORDS_AT: usize = 64;

/// Size of the journal's memfd.
pub const JOURNAL_SIZE: usize = JOURNAL_RECORDS_AT + JOURNAL_RECORDS * size_of::<JournalRecord>();

/// A connection. The first word is written last, and erased first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct JournalRecord {
    /// Number of the listener or of the lease whose port it is on; 0: the record is free.
    port: u64,
    /// IPv4 addresses as IPv4-mapped IPv6.
    local: [u8; 16],
    remote: [u8; 16],
    local_port: u16,
    remote_port: u16,
    /// Scope of link-local addresses.
    scope: u32,
}

impl JournalRecord {
    pub fn new(port: SessionId, flow: &FlowKey) -> JournalRecord {
        JournalRecord {
            port: port.0,
            local: octets(flow.local),
            remote: octets(flow.remote),
            local_port: flow.local.port(),
            remote_port: flow.remote.port(),
            scope: scope_of(flow.local),
        }
    }

    pub fn port(&self) -> Option<SessionId> {
        (self.port != 0).then_some(SessionId(self.port))
    }

    pub fn flow(&self) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: self.endpoint(self.local, self.local_port),
            remote: self.endpoint(self.remote, self.remote_port),
        }
    }

    fn endpoint(&self, octets: [u8; 16], port: u16) -> SocketAddr {
        scoped(Ipv6Addr::from(octets).to_canonical(), port, self.scope)
    }
}

fn octets(endpoint: SocketAddr) -> [u8; 16] {
    match endpoint {
        SocketAddr::V4(endpoint) => endpoint.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(endpoint) => endpoint.ip().octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(local: &str, remote: &str) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
        }
    }

    #[test]
    fn a_record_names_its_flow_and_its_port() {
        for flow in [
            flow("10.0.0.1:80", "10.0.0.2:40000"),
            flow("[2001:db8::1]:80", "[2001:db8::2]:40000"),
            flow("[fe80::1%3]:80", "[fe80::2%3]:40000"),
        ] {
            let record = JournalRecord::new(SessionId(7), &flow);
            assert_eq!(record.port(), Some(SessionId(7)));
            assert_eq!(record.flow(), flow);
        }
        assert_eq!(JournalRecord::default().port(), None);
    }
}
