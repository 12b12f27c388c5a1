//! Initial sequence numbers and timestamp offsets that an off-path attacker cannot guess (RFC 6528,
//! RFC 7323 §5.4).

use core::hash::Hasher;
use core::net::SocketAddr;

use portolan_types::{FlowKey, Instant, SeqNum};
use siphasher::sip::SipHasher24;

/// A key that never leaves the host.
#[derive(Clone)]
pub struct Secret(pub [u8; 16]);

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// SipHash over the flow, in the format of the packet filter's tables, and `extra`; `bpf/cookie.h`
    /// computes the same.
    pub(crate) fn hash(&self, domain: u8, flow: &FlowKey, extra: u32) -> u64 {
        let mut message = [0; 48];
        message[..16].copy_from_slice(&address(flow.local));
        message[16..32].copy_from_slice(&address(flow.remote));
        message[32..34].copy_from_slice(&flow.local.port().to_be_bytes());
        message[34..36].copy_from_slice(&flow.remote.port().to_be_bytes());
        message[36] = flow.protocol.number();
        message[40] = domain;
        message[44..].copy_from_slice(&extra.to_le_bytes());
        SipHasher24::new_with_key(&self.0).hash(&message)
    }

    /// A secret for that purpose and number. Whoever knows it learns nothing of others.
    pub fn derive(&self, purpose: &str, number: u64) -> Secret {
        let mut derived = [0; 16];
        for (half, bytes) in derived.chunks_exact_mut(8).enumerate() {
            let mut hasher = SipHasher24::new_with_key(&self.0);
            hasher.write(&[DERIVED, half as u8]);
            hasher.write(&number.to_le_bytes());
            hasher.write(purpose.as_bytes());
            bytes.copy_from_slice(&hasher.finish().to_le_bytes());
        }
        Secret(derived)
    }
}

/// The address of `endpoint`; IPv4 as IPv4-mapped IPv6.
fn address(endpoint: SocketAddr) -> [u8; 16] {
    match endpoint {
        SocketAddr::V4(v4) => v4.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(v6) => v6.ip().octets(),
    }
}

/// Domain separators of the keyed hash: one value must not reveal another.
const ISN: u8 = 1;
const TIMESTAMP: u8 = 2;
/// Those of cookies are 3 and 4 (`cookie.rs`).
const DERIVED: u8 = 5;

/// RFC 6528 §3: a clock plus a keyed hash of the flow. The clock ticks each 64 ns as on Linux.
pub fn initial_sequence(secret: &Secret, flow: &FlowKey, now: Instant) -> SeqNum {
    let clock = (now.as_nanos() >> 6) as u32;
    SeqNum(clock.wrapping_add(secret.hash(ISN, flow, 0) as u32))
}

/// The offset of the timestamp clock for this peer. It does not depend on ports, so that a new
/// connection between the same hosts continues the clock (RFC 6191).
pub fn timestamp_offset(secret: &Secret, flow: &FlowKey) -> u32 {
    let mut hosts = *flow;
    hosts.local.set_port(0);
    hosts.remote.set_port(0);
    secret.hash(TIMESTAMP, &hosts, 0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use portolan_types::Protocol;

    #[test]
    fn what_is_derived_depends_on_secret_purpose_and_number() {
        let secret = Secret([7; 16]);
        let derived = secret.derive("opens", 1);
        assert_eq!(derived.0, secret.derive("opens", 1).0);
        for other in [
            secret.derive("opens", 2),
            secret.derive("timestamps", 1),
            Secret([8; 16]).derive("opens", 1),
            secret,
        ] {
            assert_ne!(derived.0, other.0);
        }
        assert_ne!(derived.0[..8], derived.0[8..]);
    }

    fn flow(port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], port).into(),
        }
    }

    #[test]
    fn numbers_of_one_flow_grow_with_time() {
        let secret = Secret([7; 16]);
        let first = initial_sequence(&secret, &flow(1), Instant::from_millis(1));
        let later = initial_sequence(&secret, &flow(1), Instant::from_millis(2));
        assert_eq!(later - first, 1_000_000 / 64);
    }

    #[test]
    fn numbers_of_different_flows_and_secrets_are_unrelated() {
        let now = Instant::ZERO;
        let a = initial_sequence(&Secret([7; 16]), &flow(1), now);
        assert_ne!(a, initial_sequence(&Secret([7; 16]), &flow(2), now));
        assert_ne!(a, initial_sequence(&Secret([8; 16]), &flow(1), now));
    }

    #[test]
    fn the_timestamp_offset_is_the_same_for_all_ports_of_two_hosts() {
        let secret = Secret([7; 16]);
        assert_eq!(
            timestamp_offset(&secret, &flow(1)),
            timestamp_offset(&secret, &flow(2))
        );
    }
}
