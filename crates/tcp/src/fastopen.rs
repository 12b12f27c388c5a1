//! Fast Open cookies (RFC 7413 §4.1.2): proof that a peer has received at its address before. The
//! key changes every hour; a cookie of the hour before is good for a last time and is replaced.

use core::net::IpAddr;

use arrayvec::ArrayVec;
use portolan_types::{FlowKey, Instant};
use portolan_wire::tcp::MAX_COOKIE;
use siphasher::sip::SipHasher24;

use crate::isn::Secret;

/// Bytes of the cookies made here, as Linux's.
const LENGTH: usize = 8;
/// How long one key is used.
const PERIOD_MS: u64 = 3_600_000;
/// Domain of the key.
const COOKIE: u8 = 5;

/// A cookie as it travels; empty, it asks for one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cookie(pub ArrayVec<u8, MAX_COOKIE>);

/// A cookie that a peer has granted, and the largest segment that it took then: how much text fits a SYN is
/// known before its answer (RFC 7413 §4.1.3).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrantedCookie {
    pub cookie: Cookie,
    pub mss: u16,
}

/// What a cookie that came with a SYN is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CookieVerdict {
    Good,
    /// Good, and its sender needs a new one.
    Aging,
    Bad,
}

/// How an active open sends text with its SYN.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FastOpen {
    /// It does not yet, and asks for a cookie.
    Ask,
    With(GrantedCookie),
    /// The peer is known to want none (`TCP_FASTOPEN_NO_COOKIE`).
    WithoutCookie,
}

/// The cookie for the peer of `flow`, which is seen from this host.
pub fn fast_open_cookie(secret: &Secret, flow: &FlowKey, now: Instant) -> Cookie {
    of_period(secret, flow, period(now))
}

/// Judges what the peer of `flow` sent.
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

/// The cookie that Linux makes for the peer of `flow` with the same key (`TCP_FASTOPEN_KEY`), so that hosts that share
/// one take each other's: SipHash of the addresses as the SYN has them.
pub fn shared_cookie(key: &Secret, flow: &FlowKey) -> Cookie {
    let mut message = ArrayVec::<u8, 32>::new();
    for address in [flow.remote.ip(), flow.local.ip()] {
        // Both fit.
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

/// Judges what the peer of `flow` sent by the keys of a listener: the first one makes cookies, those of the others
/// are good still.
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

/// Of the addresses only: a client's next connection comes from another port.
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
