//! One direction of a link as a model without threads or descriptors: frames enter at a given time, and
//! leave when they are due, or are lost.

use std::collections::BTreeMap;
use std::time::Duration;

use portolan_types::Instant;

use crate::segment::mark;

/// The faults of a link. Probabilities are per frame, between 0 and 1. The default has no faults.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    pub loss: f64,
    pub duplicate: f64,
    /// Probability that a frame is held back until later ones have overtaken it.
    pub reorder: f64,
    /// One-way delay.
    pub delay: Duration,
    /// Bits per second; None: unlimited.
    pub rate: Option<u64>,
    /// Bytes that can be queued at `rate`; more are dropped at the tail.
    pub buffer: usize,
    /// Marks frames of ECN-capable senders while more bytes than this are queued (RFC 3168).
    pub mark_above: Option<usize>,
    /// Gives each TCP flow a link of its own with these faults, seeded by its port on host `b`:
    /// flows to one port have the same faults whenever they run.
    pub per_flow: bool,
    /// Runs with the same seed make the same choices for the same frames.
    pub seed: u64,
}

impl Default for Impairment {
    fn default() -> Impairment {
        Impairment {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            delay: Duration::ZERO,
            rate: None,
            buffer: 256 * 1024,
            mark_above: None,
            per_flow: false,
            seed: 1,
        }
    }
}

/// Counts of frames by their fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub forwarded: u64,
    pub lost: u64,
    pub duplicated: u64,
    pub reordered: u64,
    /// Dropped because the buffer was full.
    pub overflowed: u64,
    /// Marked because the queue exceeded `mark_above`.
    pub marked: u64,
}

impl Counters {
    pub(crate) fn plus(self, other: Counters) -> Counters {
        Counters {
            forwarded: self.forwarded + other.forwarded,
            lost: self.lost + other.lost,
            duplicated: self.duplicated + other.duplicated,
            reordered: self.reordered + other.reordered,
            overflowed: self.overflowed + other.overflowed,
            marked: self.marked + other.marked,
        }
    }
}

/// Additional delay of a reordered frame.
const HOLD: Duration = Duration::from_millis(2);

/// One direction of a link.
#[derive(Debug)]
pub(crate) struct Link {
    impairment: Impairment,
    random: Random,
    /// The time at which all accepted frames have been sent at `rate`.
    busy_until: Instant,
    /// Ordered by departure, then by arrival.
    in_flight: BTreeMap<(Instant, u64), Vec<u8>>,
    arrivals: u64,
    counters: Counters,
}

impl Link {
    /// `direction` gives the two directions of one seed different random numbers.
    pub(crate) fn new(impairment: Impairment, direction: u64) -> Link {
        Link {
            impairment,
            random: Random(impairment.seed.wrapping_mul(2).wrapping_add(direction)),
            busy_until: Instant::ZERO,
            in_flight: BTreeMap::new(),
            arrivals: 0,
            counters: Counters::default(),
        }
    }

    /// Puts a frame on the link.
    pub(crate) fn offer(&mut self, now: Instant, mut frame: Vec<u8>) {
        if self.random.happens(self.impairment.loss) {
            self.counters.lost += 1;
            return;
        }
        let limit = self.impairment.mark_above;
        let full = limit.is_some_and(|limit| self.waiting(now) > limit as f64);
        let Some(sent) = self.transmit(now, frame.len()) else {
            self.counters.overflowed += 1;
            return;
        };
        if full && mark(&mut frame) {
            self.counters.marked += 1;
        }
        let mut departure = sent + self.impairment.delay;
        if self.random.happens(self.impairment.reorder) {
            self.counters.reordered += 1;
            departure += HOLD;
        }
        if self.random.happens(self.impairment.duplicate) {
            self.counters.duplicated += 1;
            self.carry(departure, frame.clone());
        }
        self.carry(departure, frame);
    }

    /// Returns the time at which a frame of `length` bytes has been sent at the link's rate; None if the
    /// buffer is full.
    fn transmit(&mut self, now: Instant, length: usize) -> Option<Instant> {
        let Some(rate) = self.impairment.rate else {
            return Some(now);
        };
        if self.waiting(now) + length as f64 > self.impairment.buffer as f64 {
            return None;
        }
        let bytes_per_second = rate as f64 / 8.0;
        let start = self.busy_until.max(now);
        self.busy_until = start + Duration::from_secs_f64(length as f64 / bytes_per_second);
        Some(self.busy_until)
    }

    /// Returns the queued bytes.
    fn waiting(&self, now: Instant) -> f64 {
        let rate = self.impairment.rate.unwrap_or_default() as f64;
        self.busy_until.since(now).as_secs_f64() * rate / 8.0
    }

    fn carry(&mut self, departure: Instant, frame: Vec<u8>) {
        self.arrivals += 1;
        self.in_flight.insert((departure, self.arrivals), frame);
    }

    /// Returns the next frame that leaves the link by `now`.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let first = self.in_flight.first_entry()?;
        if first.key().0 > now {
            return None;
        }
        self.counters.forwarded += 1;
        Some(first.remove())
    }

    /// Returns the time at which the next frame leaves.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.in_flight
            .first_key_value()
            .map(|((departure, _), _)| *departure)
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }
}

/// SplitMix64: small, and random enough to choose frames.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn happens(&mut self, probability: f64) -> bool {
        // 53 bits form a fraction in 0..1.
        let fraction = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        fraction < probability
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    /// Returns the first bytes of all frames that leave by `now`.
    fn drain(link: &mut Link, now: Instant) -> Vec<u8> {
        std::iter::from_fn(|| link.due(now))
            .map(|frame| frame[0])
            .collect()
    }

    #[test]
    fn a_wire_without_faults_keeps_order_and_loses_nothing() {
        let mut link = Link::new(Impairment::default(), 0);
        for byte in 0..100 {
            link.offer(at(0), vec![byte]);
        }
        assert_eq!(drain(&mut link, at(0)), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn delay_holds_every_frame_back_alike() {
        let delay = Duration::from_millis(10);
        let mut link = Link::new(
            Impairment {
                delay,
                ..Impairment::default()
            },
            0,
        );
        link.offer(at(0), vec![1]);
        link.offer(at(3), vec![2]);
        assert_eq!(link.deadline(), Some(at(10)));
        assert!(drain(&mut link, at(9)).is_empty());
        assert_eq!(drain(&mut link, at(12)), [1]);
        assert_eq!(drain(&mut link, at(13)), [2]);
        assert_eq!(link.deadline(), None);
    }

    #[test]
    fn faults_come_about_as_often_as_asked_and_the_same_for_one_seed() {
        let impairment = Impairment {
            loss: 0.1,
            duplicate: 0.05,
            reorder: 0.02,
            ..Impairment::default()
        };
        let run = |direction| {
            let mut link = Link::new(impairment, direction);
            for _ in 0..10_000 {
                link.offer(at(0), vec![0]);
            }
            drain(&mut link, at(100));
            link.counters()
        };
        let counters = run(0);
        assert!((800..1200).contains(&counters.lost), "{counters:?}");
        assert!((350..550).contains(&counters.duplicated), "{counters:?}");
        assert!((120..240).contains(&counters.reordered), "{counters:?}");
        assert_eq!(
            counters.forwarded,
            10_000 - counters.lost + counters.duplicated
        );
        assert_eq!(counters, run(0));
        assert_ne!(counters, run(1));
    }

    #[test]
    fn a_reordered_frame_is_overtaken() {
        let mut link = Link::new(
            Impairment {
                reorder: 1.0,
                ..Impairment::default()
            },
            0,
        );
        link.offer(at(0), vec![1]);
        link.impairment.reorder = 0.0;
        link.offer(at(0), vec![2]);
        assert_eq!(drain(&mut link, at(5)), [2, 1]);
    }

    #[test]
    fn the_rate_spaces_frames_and_the_buffer_drops_the_rest() {
        let mut link = Link::new(
            Impairment {
                rate: Some(8_000_000),
                buffer: 3000,
                ..Impairment::default()
            },
            0,
        );
        for byte in 0..5 {
            link.offer(at(0), vec![byte; 1000]);
        }
        assert_eq!(drain(&mut link, at(1)), [0]);
        assert_eq!(drain(&mut link, at(3)), [1, 2]);
        assert_eq!(link.counters().overflowed, 2);
        link.offer(at(10), vec![9; 1000]);
        assert_eq!(link.deadline(), Some(at(11)));
    }
}
