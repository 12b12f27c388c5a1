//! The Internet checksum (MS Figs. 16 to 18): the library's and the plain one of RFC 1071, alone and with a copy, in
//! one pass or in two, for data that is in a cache and for data that is not.

use portolan_wire::checksum::Sum;

use super::{Clock, Curves, SIZES};

/// Bytes of the large buffer, more than caches hold (41 MB in the paper). The small case reuses one buffer.
const LARGE: usize = 256 << 20;

pub(crate) fn measure(clock: Clock) -> Curves {
    let mut curves = Curves::new();
    let large = vec![0x5a; LARGE];
    // Not zeros: the kernel would allocate zeroed pages when they are first written.
    let mut large_copy = vec![1; LARGE];
    for size in SIZES {
        let mut add = |name, nanoseconds| {
            let curve: &mut Vec<_> = curves.entry(name).or_default();
            curve.push([size as f64, nanoseconds]);
        };
        let data = &large[..size];
        add("plain", clock.measure(|| plain(std::hint::black_box(data))));
        add(
            "library",
            clock.measure(|| Sum::default().over(std::hint::black_box(data)).folded()),
        );
        let mut copy = vec![0; size];
        add(
            "small-separate",
            clock.measure(|| separate(std::hint::black_box(data), &mut copy)),
        );
        add(
            "small-integrated",
            clock.measure(|| integrated(std::hint::black_box(data), &mut copy)),
        );
        let mut places = Places::of(size);
        add(
            "large-separate",
            clock.measure(|| {
                let at = places.next();
                separate(&large[at..at + size], &mut large_copy[at..at + size])
            }),
        );
        add(
            "large-integrated",
            clock.measure(|| {
                let at = places.next();
                integrated(&large[at..at + size], &mut large_copy[at..at + size])
            }),
        );
    }
    curves
}

/// RFC 1071 §4.1, word by word.
fn plain(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks_exact(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// Copies, then sums up, as the library does.
fn separate(from: &[u8], to: &mut [u8]) -> u16 {
    to.copy_from_slice(from);
    Sum::default().over(to).folded()
}

/// Copies and sums up in one pass, which reads each word once.
fn integrated(from: &[u8], to: &mut [u8]) -> u16 {
    let mut sum = 0_u64;
    for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(8)) {
        let word = u64::from_ne_bytes([
            from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7],
        ]);
        to.copy_from_slice(&word.to_ne_bytes());
        sum += (word >> 32) + (word & 0xffff_ffff);
    }
    while sum >> 16 != 0 {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// A sequence of buffers, each distant from the previous one; all of them are used before any is reused.
struct Places {
    count: usize,
    slot: usize,
    number: usize,
}

impl Places {
    fn of(size: usize) -> Places {
        let slot = size.next_multiple_of(64);
        Places {
            count: (LARGE / slot).next_power_of_two() / 2,
            slot,
            number: 0,
        }
    }

    fn next(&mut self) -> usize {
        // Odd, hence coprime to the count, which is a power of two.
        const STEP: usize = 100_003;
        self.number = (self.number + STEP) % self.count;
        self.number * self.slot
    }
}
