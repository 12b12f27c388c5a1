//! SYN cookies: an initial sequence number that says enough to rebuild the connection when the
//! handshake's ACK comes back (RFC 4987 §3.6). Keeps a secret and nothing else.
//!
//! Layout: 5 bits minute counter, 3 bits MSS class, 24 bits keyed hash. A connection opened by a
//! cookie has no window scaling, timestamps or SACK.

use std::hash::{Hash, Hasher};

use portolan_types::{FlowKey, Instant, SeqNum};
use siphasher::sip::SipHasher13;

/// Segment sizes a cookie can express; the largest that fits the peer's offer is chosen.
const MSS_CLASSES: [u16; 8] = [216, 536, 1220, 1300, 1400, 1440, 1460, 8960];

const MINUTE_BITS: u32 = 5;
const HASH_MASK: u32 = 0x00ff_ffff;
/// A cookie is good in the minute that made it and in the next.
const LIFETIME_MINUTES: u32 = 1;

/// Makes and checks cookies.
#[derive(Clone, Copy)]
pub struct CookieJar {
    secret: [u64; 2],
}

impl CookieJar {
    pub fn new(secret: [u64; 2]) -> CookieJar {
        CookieJar { secret }
    }

    /// Our initial sequence number for a SYN with sequence number `peer` and offer `mss`.
    pub fn make(&self, flow: &FlowKey, peer: SeqNum, mss: u16, now: Instant) -> SeqNum {
        let class = MSS_CLASSES
            .iter()
            .rposition(|&size| size <= mss)
            .unwrap_or(0);
        // The class is below 8.
        self.cookie(flow, peer, minute(now), class as u32)
    }

    /// The segment size that the cookie `ours` promises, if it is one we made lately for this flow
    /// and this peer's initial sequence number.
    pub fn check(&self, flow: &FlowKey, peer: SeqNum, ours: SeqNum, now: Instant) -> Option<u16> {
        let made = ours.0 >> 27;
        let class = (ours.0 >> 24) & 7;
        let age = minute(now).wrapping_sub(made) & ((1 << MINUTE_BITS) - 1);
        let genuine = self.cookie(flow, peer, made, class) == ours;
        (age <= LIFETIME_MINUTES && genuine).then(|| MSS_CLASSES[class as usize])
    }

    fn cookie(&self, flow: &FlowKey, peer: SeqNum, minute: u32, class: u32) -> SeqNum {
        let mut hasher = SipHasher13::new_with_keys(self.secret[0], self.secret[1]);
        (flow, peer, minute, class).hash(&mut hasher);
        // Truncation is the point: 24 bits of the hash fit.
        let hash = hasher.finish() as u32 & HASH_MASK;
        SeqNum(minute << 27 | class << 24 | hash)
    }
}

fn minute(now: Instant) -> u32 {
    // Masked to five bits, so the truncation loses nothing.
    (now.as_millis() / 60_000) as u32 & ((1 << MINUTE_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use portolan_types::Protocol;

    use super::*;

    fn flow(port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: "10.0.0.1:80".parse().unwrap(),
            remote: ([10, 0, 0, 2], port).into(),
        }
    }

    #[test]
    fn a_cookie_returns_the_segment_size() {
        let jar = CookieJar::new([1, 2]);
        let now = Instant::from_millis(90_000);
        for (offered, kept) in [(1460, 1460), (1459, 1440), (100, 216), (9000, 8960)] {
            let cookie = jar.make(&flow(5000), SeqNum(7), offered, now);
            assert_eq!(jar.check(&flow(5000), SeqNum(7), cookie, now), Some(kept));
        }
    }

    #[test]
    fn a_cookie_is_bound_to_flow_peer_and_secret() {
        let jar = CookieJar::new([1, 2]);
        let now = Instant::ZERO;
        let cookie = jar.make(&flow(5000), SeqNum(7), 1460, now);
        assert_eq!(jar.check(&flow(5001), SeqNum(7), cookie, now), None);
        assert_eq!(jar.check(&flow(5000), SeqNum(8), cookie, now), None);
        assert_eq!(jar.check(&flow(5000), SeqNum(7), cookie + 1, now), None);
        let other = CookieJar::new([1, 3]);
        assert_eq!(other.check(&flow(5000), SeqNum(7), cookie, now), None);
    }

    #[test]
    fn a_cookie_dies_after_two_minutes() {
        let jar = CookieJar::new([1, 2]);
        let start = Instant::from_millis(31 * 60_000);
        let cookie = jar.make(&flow(5000), SeqNum(7), 1460, start);
        let next = start + Duration::from_secs(60);
        assert!(jar.check(&flow(5000), SeqNum(7), cookie, next).is_some());
        let late = start + Duration::from_secs(120);
        assert_eq!(jar.check(&flow(5000), SeqNum(7), cookie, late), None);
    }
}
