//! Path MTUs reported by routers, where smaller than the MTU of the first link (RFC 1191, RFC 8201):
//! kept per destination, for all sessions of a holder, for ten minutes.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeSet, HashMap};

use portolan_types::Instant;

/// RFC 8201 §4: a larger size must not be tried for five minutes; ten are recommended. Linux:
/// `mtu_expires`.
const LIFETIME: Duration = Duration::from_secs(600);

/// A smaller report is an attack, not a path (Linux: `min_pmtu`).
pub(crate) const LEAST_V4: u32 = 552;
/// RFC 8200 §5: the minimum MTU of an IPv6 link.
pub(crate) const LEAST_V6: u32 = 1280;

/// Limit of the destinations kept; those that expire first are removed first.
const DESTINATIONS: usize = 4096;

/// RFC 1191 §7.1: sizes to try when a router does not report one.
const PLATEAUS: [u32; 7] = [32_000, 17_914, 8_166, 4_352, 2_002, 1_492, 1_006];

#[derive(Debug, Default)]
pub(crate) struct PathMtus {
    known: HashMap<IpAddr, (u32, Instant)>,
    by_expiry: BTreeSet<(Instant, IpAddr)>,
    generation: u32,
}

impl PathMtus {
    /// Changes whenever an entry does.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// The known path MTU; `link` is the MTU of the first link.
    pub(crate) fn limit(&self, destination: IpAddr, link: u32) -> u32 {
        self.known
            .get(&destination)
            .map_or(link, |(mtu, _)| link.min(*mtu))
    }

    /// A router reports a path MTU of `mtu`. Never raises the known value: it has to expire.
    pub(crate) fn learn(&mut self, now: Instant, destination: IpAddr, mtu: u32) {
        let mtu = mtu.max(least(destination));
        if let Some(&(known, until)) = self.known.get(&destination) {
            if mtu > known {
                return;
            }
            self.by_expiry.remove(&(until, destination));
        } else if self.known.len() == DESTINATIONS
            && let Some((_, oldest)) = self.by_expiry.pop_first()
        {
            self.known.remove(&oldest);
        }
        let until = now + LIFETIME;
        self.known.insert(destination, (mtu, until));
        self.by_expiry.insert((until, destination));
        self.generation = self.generation.wrapping_add(1);
    }

    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some(&(until, destination)) = self.by_expiry.first()
            && until <= now
        {
            self.by_expiry.pop_first();
            self.known.remove(&destination);
            self.generation = self.generation.wrapping_add(1);
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        Some(self.by_expiry.first()?.0)
    }
}

pub(crate) fn least(destination: IpAddr) -> u32 {
    match destination {
        IpAddr::V4(_) => LEAST_V4,
        IpAddr::V6(_) => LEAST_V6,
    }
}

/// The path MTU according to a report about a packet of `quoted` bytes; `None` if the report cannot
/// be true: a packet that fits is not too big.
pub(crate) fn believable(destination: IpAddr, reported: u32, quoted: u32) -> Option<u32> {
    let mtu = match reported {
        0 => PLATEAUS
            .into_iter()
            .find(|&plateau| plateau < quoted)
            .unwrap_or(LEAST_V4),
        reported => reported.max(least(destination)),
    };
    (mtu < quoted).then_some(mtu)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u32) -> IpAddr {
        IpAddr::V4(last.into())
    }

    fn at(seconds: u64) -> Instant {
        Instant::from_millis(seconds * 1000)
    }

    #[test]
    fn the_smallest_report_holds_for_ten_minutes() {
        let mut mtus = PathMtus::default();
        assert_eq!(mtus.limit(ip(1), 1500), 1500);
        mtus.learn(at(0), ip(1), 1400);
        mtus.learn(at(1), ip(1), 1450);
        assert_eq!(
            (mtus.limit(ip(1), 1500), mtus.limit(ip(2), 1500)),
            (1400, 1500)
        );
        assert_eq!(mtus.limit(ip(1), 1300), 1300, "the link takes less");
        let generation = mtus.generation();
        mtus.learn(at(100), ip(1), 1300);
        assert_ne!(mtus.generation(), generation);
        mtus.expire(at(699));
        assert_eq!(mtus.limit(ip(1), 1500), 1300);
        mtus.expire(mtus.deadline().unwrap());
        assert_eq!(mtus.limit(ip(1), 1500), 1500);
        assert_eq!(mtus.deadline(), None);
    }

    #[test]
    fn no_report_goes_below_what_every_path_takes() {
        let mut mtus = PathMtus::default();
        mtus.learn(at(0), ip(1), 1);
        assert_eq!(mtus.limit(ip(1), 1500), LEAST_V4);
        let v6: IpAddr = "2001:db8::1".parse().unwrap();
        mtus.learn(at(0), v6, 1);
        assert_eq!(mtus.limit(v6, 1500), LEAST_V6);
        assert_eq!(believable(v6, 1000, 1500), Some(1280));
        assert_eq!(believable(v6, 1000, 1280), None);
    }

    #[test]
    fn a_report_that_cannot_be_true_is_not_believed() {
        assert_eq!(believable(ip(1), 1400, 1500), Some(1400));
        assert_eq!(believable(ip(1), 1400, 1400), None);
        assert_eq!(believable(ip(1), 0, 1500), Some(1492));
        assert_eq!(believable(ip(1), 0, 1400), Some(1006));
        assert_eq!(believable(ip(1), 0, 700), Some(552));
    }

    #[test]
    fn strangers_in_number_do_not_take_all_memory() {
        let mut mtus = PathMtus::default();
        for number in 0..3 * DESTINATIONS as u32 {
            mtus.learn(at(u64::from(number)), ip(number), 1400);
        }
        assert_eq!(
            (mtus.known.len(), mtus.by_expiry.len()),
            (DESTINATIONS, DESTINATIONS)
        );
    }
}
