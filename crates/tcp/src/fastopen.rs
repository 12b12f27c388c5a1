//! Fast Open cookies (RFC 7413 §4.1.2): proof that a peer has received packets at its address before. The key
//! changes every hour; a cookie made with the previous key is accepted once more and replaced.

use core::net::IpAddr;

use arrayvec::ArrayVec;
use portolan_types::{FlowKey, Instant};
use portolan_wire::tcp::MAX_COOKIE;
use siphasher::sip::SipHasher24;

use crate::isn::Secret;

/// Length of the cookies made here, as Linux's.
const LENGTH: usize = 8;
/// Lifetime of a key.
const PERIOD_MS: u64 = 3_600_000;
/// Domain separator of the keyed hash.
const COOKIE: u8 = 5;

/// A cookie in wire format; an empty one requests a cookie.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cookie(pub ArrayVec<u8, MAX_COOKIE>);

/// A cookie granted by a peer, with the MSS it announced then: the amount of data that fits a SYN is known before
/// its answer (RFC 7413 §4.1.3).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrantedCookie {
    pub cookie: Cookie,
    pub mss: u16,
}

/// Validity of a cookie that came with a SYN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CookieVerdict {
    Good,
    /// Valid, but due to be replaced.
    Aging,
    Bad,
}

/// How an active open sends data with its SYN.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FastOpen {
    /// Sends no data yet, but requests a cookie.
    Ask,
    With(GrantedCookie),
    /// Sends data without a cookie (`TCP_FASTOPEN_NO_COOKIE`).
    WithoutCookie,
}

/// Returns the cookie for the peer of `flow`; `flow` is as seen from this host.
pub fn fast_open_cookie(secret: &Secret, flow: &FlowKey, now: Instant) -> Cookie {
    of_period(secret, flow, period(now))
}

/// Checks the cookie sent by the peer of `flow`.
pub fn judge_cookie(secret: &Secret, flow: &FlowKey, cookie: &[u8], now: Instant) -> CookieVerdict {
    let period = period(now);
    let is_of = |period| of_period(secret, flow, period).0.as_slice() == cookie;
    if is_of(period) {
        CookieVerdict::Good
    } else if is_of(period.wrapping_sub(1)) {
        CookieVerdict::Aging
    } else {
        CookieVerdict::Bad
    }
}

/// Returns the cookie that Linux makes for the peer of `flow` with the same key (`TCP_FASTOPEN_KEY`), so that hosts
/// with a shared key accept each other's cookies: SipHash of the addresses as they appear in the SYN.
pub fn shared_cookie(key: &Secret, flow: &FlowKey) -> Cookie {
    let mut message = ArrayVec::<u8, 32>::new();
    for address in [flow.remote.ip(), flow.local.ip()] {
        // Both addresses fit.
        let _ = match address {
            IpAddr::V4(v4) => message.try_extend_from_slice(&v4.octets()),
            IpAddr::V6(v6) => message.try_extend_from_slice(&v6.octets()),
        };
    }
    let hash: [u8; LENGTH] = SipHasher24::new_with_key(&key.0)
        .hash(&message)
        .to_le_bytes();
    Cookie(hash.iter().copied().collect())
}

/// Checks the cookie sent by the peer of `flow` against the keys of a listener: the first key makes new cookies;
/// cookies of the others are still valid.
pub fn judge_shared_cookie(keys: &[Secret], flow: &FlowKey, cookie: &[u8]) -> CookieVerdict {
    let made_by = |key: &Secret| shared_cookie(key, flow).0.as_slice() == cookie;
    match keys.iter().position(made_by) {
        Some(0) => CookieVerdict::Good,
        Some(_) => CookieVerdict::Aging,
        None => CookieVerdict::Bad,
    }
}

fn period(now: Instant) -> u32 {
    (now.as_millis() / PERIOD_MS) as u32
}

/// Hashes the addresses only: a client's next connection comes from another port.
fn of_period(secret: &Secret, flow: &FlowKey, period: u32) -> Cookie {
    let mut hosts = *flow;
    hosts.local.set_port(0);
    hosts.remote.set_port(0);
    let hash = secret.hash(COOKIE, &hosts, period).to_be_bytes();
    let bytes: [u8; LENGTH] = hash;
    Cookie(bytes.iter().copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use portolan_types::Protocol;

    fn flow(host: u8, port: u16) -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, host], port).into(),
        }
    }

    #[test]
    fn a_cookie_is_good_for_one_host_and_all_its_ports() {
        let secret = Secret([7; 16]);
        let now = Instant::from_millis(10 * PERIOD_MS);
        let cookie = fast_open_cookie(&secret, &flow(2, 1000), now);
        let judge = |flow, now| judge_cookie(&secret, &flow, &cookie.0, now);
        assert_eq!(judge(flow(2, 2000), now), CookieVerdict::Good);
        assert_eq!(judge(flow(3, 1000), now), CookieVerdict::Bad);
    }

    #[test]
    fn a_cookie_ages_with_its_key() {
        let secret = Secret([7; 16]);
        let at = |periods| Instant::from_millis(periods * PERIOD_MS);
        let cookie = fast_open_cookie(&secret, &flow(2, 1000), at(10));
        let judge = |now| judge_cookie(&secret, &flow(2, 1000), &cookie.0, now);
        assert_eq!(judge(at(11)), CookieVerdict::Aging);
        assert_eq!(judge(at(12)), CookieVerdict::Bad);
        assert_eq!(
            judge_cookie(&secret, &flow(2, 1), &[], at(10)),
            CookieVerdict::Bad
        );
    }

    #[test]
    fn cookies_of_a_shared_key_are_good_by_the_first_key_and_age_by_the_second() {
        let [old, new] = [Secret([1; 16]), Secret([2; 16])];
        let cookie = shared_cookie(&old, &flow(2, 1000));
        let judge = |keys: &[Secret], port| judge_shared_cookie(keys, &flow(2, port), &cookie.0);
        assert_eq!(
            judge(&[old.clone(), new.clone()], 2000),
            CookieVerdict::Good
        );
        assert_eq!(judge(&[new.clone(), old], 1000), CookieVerdict::Aging);
        assert_eq!(judge(&[new], 1000), CookieVerdict::Bad);
    }
}
