//! Path MTU discovery without ICMP: segments that are never acknowledged are made smaller, and probes
//! find out whether they may grow again (RFC 4821 §7, RFC 8899 §5; as Linux with `tcp_mtu_probing` of 1).

use core::time::Duration;

use portolan_types::{Instant, SeqNum};

use crate::encoding;
use crate::send::LARGEST_SEGMENT;

/// Consecutive time-outs after which a path counts as a black hole (Linux's `tcp_retries1`).
pub(crate) const BLACK_HOLE_RETRIES: u32 = 3;
/// Linux's `tcp_base_mss`, `tcp_mtu_probe_floor`, `tcp_probe_threshold` and `tcp_probe_interval`.
const BASE: u32 = 1024;
const FLOOR: u32 = 48;
const CLOSE_ENOUGH: u32 = 8;
const SEARCH_AGAIN: Duration = Duration::from_secs(600);

/// The search for the path MTU; none before the first black hole.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathMtu {
    search: Option<Search>,
}

encoding::fields!(PathMtu { search });

/// Sizes are payloads of one segment.
#[derive(Clone, Debug)]
struct Search {
    /// Largest size known to pass.
    low: u32,
    /// Largest size not known to be too large.
    high: u32,
    /// The size agreed in the handshake, or reported by the path since.
    most: u32,
    probe: Option<Probe>,
    /// When a completed search starts again.
    again: Instant,
}

encoding::fields!(Search {
    low,
    high,
    most,
    probe,
    again
});

/// A segment that probes a size.
#[derive(Clone, Copy, Debug)]
struct Probe {
    end: SeqNum,
    size: u32,
}

encoding::fields!(Probe { end, size });

impl PathMtu {
    /// Segments of `mss` are not acknowledged. Returns the size to try instead (Linux's `tcp_mtu_probing`).
    pub(crate) fn on_black_hole(&mut self, mss: u32, now: Instant) -> u32 {
        let low = match &self.search {
            None => BASE.min(mss),
            Some(search) => (search.low.min(mss) / 2).clamp(FLOOR.min(mss), BASE),
        };
        let most = self.search.as_ref().map_or(mss, |search| search.most);
        self.search = Some(Search {
            low,
            high: mss.max(low),
            most: most.max(low),
            probe: None,
            again: now + SEARCH_AGAIN,
        });
        low
    }

    /// A router reported the size (RFC 1191, RFC 8201).
    pub(crate) fn on_told(&mut self, mss: u32) {
        if let Some(search) = &mut self.search {
            search.most = mss;
            search.high = search.high.min(mss);
            search.low = search.low.min(mss);
            search.probe = None;
        }
    }

    /// The size to probe now; none while a probe is in flight or the search is complete.
    pub(crate) fn wanted(&mut self, now: Instant) -> Option<u32> {
        let search = self.search.as_mut()?;
        if search.probe.is_some() {
            return None;
        }
        if search.high - search.low < CLOSE_ENOUGH {
            if now < search.again {
                return None;
            }
            search.high = search.most;
            search.again = now + SEARCH_AGAIN;
        }
        let size = search.low.midpoint(search.high) + 1;
        (size > search.low && size <= search.high).then_some(size)
    }

    pub(crate) fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// A probe of `size` that ends at `end` was sent.
    pub(crate) fn sent(&mut self, end: SeqNum, size: u32) {
        if let Some(search) = &mut self.search {
            search.probe = Some(Probe { end, size });
        }
    }

    /// Everything before `una` is acknowledged. Returns the size of a probe that was delivered.
    pub(crate) fn on_ack(&mut self, una: SeqNum) -> Option<u32> {
        let search = self.search.as_mut()?;
        let probe = search.probe.take_if(|probe| una.at_or_after(probe.end))?;
        search.low = probe.size;
        Some(probe.size)
    }

    /// A segment was lost while a probe was in flight: taken for the probe, since the others were
    /// known to fit.
    pub(crate) fn on_loss(&mut self) {
        if let Some(search) = &mut self.search
            && let Some(probe) = search.probe.take()
        {
            search.high = (probe.size - 1).max(search.low);
        }
    }

    pub(crate) fn is_consistent(&self) -> bool {
        self.search.as_ref().is_none_or(|search| {
            (1..=LARGEST_SEGMENT).contains(&search.low)
                && search.low <= search.high
                && search.high <= LARGEST_SEGMENT
                && (search.low..=LARGEST_SEGMENT).contains(&search.most)
                && search
                    .probe
                    .is_none_or(|probe| (1..=LARGEST_SEGMENT).contains(&probe.size))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches on a path that carries `limit`; returns the sizes that were delivered.
    fn search(path: &mut PathMtu, limit: u32, now: Instant) -> Vec<u32> {
        let mut found = Vec::new();
        let mut end = SeqNum(0);
        while let Some(size) = path.wanted(now) {
            end += size;
            path.sent(end, size);
            assert_eq!(path.wanted(now), None, "one at a time");
            if size <= limit {
                found.extend(path.on_ack(end));
            } else {
                path.on_loss();
            }
        }
        found
    }

    #[test]
    fn a_search_ends_close_below_what_the_path_carries() {
        for limit in [1024, 1100, 1300, 1440, 1448] {
            let mut path = PathMtu::default();
            assert_eq!(path.on_black_hole(1448, Instant::ZERO), 1024);
            let best = search(&mut path, limit, Instant::ZERO)
                .last()
                .copied()
                .unwrap_or(1024);
            assert!(
                best <= limit && best + CLOSE_ENOUGH >= limit,
                "{best} of {limit}"
            );
        }
    }

    #[test]
    fn each_black_hole_halves_the_size_down_to_the_floor() {
        let mut path = PathMtu::default();
        let mut mss = 1448;
        for expected in [1024, 512, 256, 128, 64, 48, 48] {
            mss = path.on_black_hole(mss, Instant::ZERO);
            assert_eq!(mss, expected);
        }
    }

    #[test]
    fn a_path_that_grew_is_found_out_after_a_while() {
        let mut path = PathMtu::default();
        path.on_black_hole(1448, Instant::ZERO);
        search(&mut path, 1100, Instant::ZERO);
        let later = Instant::ZERO + SEARCH_AGAIN;
        assert!(
            search(&mut path, 1448, later)
                .last()
                .is_some_and(|size| *size > 1440)
        );
    }

    #[test]
    fn what_a_router_tells_bounds_the_search() {
        let mut path = PathMtu::default();
        path.on_black_hole(1448, Instant::ZERO);
        path.on_told(1200);
        assert!(
            search(&mut path, 9000, Instant::ZERO)
                .iter()
                .all(|size| *size <= 1200)
        );
    }
}
