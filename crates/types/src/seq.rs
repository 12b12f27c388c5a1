use core::fmt;
use core::ops::{Add, AddAssign, Sub};

use serde::{Deserialize, Serialize};

/// A TCP sequence number: arithmetic and order modulo 2^32 (RFC 9293 §3.4).
///
/// The order is only meaningful between numbers less than 2^31 apart, which is why this type has
/// `before`/`after` and no `Ord`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct SeqNum(pub u32);

impl SeqNum {
    /// `self < other` in sequence space.
    pub const fn before(self, other: SeqNum) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    /// `self <= other` in sequence space.
    pub const fn at_or_before(self, other: SeqNum) -> bool {
        !other.before(self)
    }

    /// `self > other` in sequence space.
    pub const fn after(self, other: SeqNum) -> bool {
        other.before(self)
    }

    /// `self >= other` in sequence space.
    pub const fn at_or_after(self, other: SeqNum) -> bool {
        !self.before(other)
    }

    /// Signed distance from `other` to `self` in bytes.
    pub const fn distance(self, other: SeqNum) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }

    /// The later of the two.
    pub const fn max(self, other: SeqNum) -> SeqNum {
        if self.before(other) { other } else { self }
    }

    /// The earlier of the two.
    pub const fn min(self, other: SeqNum) -> SeqNum {
        if self.before(other) { self } else { other }
    }
}

impl Add<u32> for SeqNum {
    type Output = SeqNum;
    fn add(self, bytes: u32) -> SeqNum {
        SeqNum(self.0.wrapping_add(bytes))
    }
}

impl AddAssign<u32> for SeqNum {
    fn add_assign(&mut self, bytes: u32) {
        *self = *self + bytes;
    }
}

impl Sub<u32> for SeqNum {
    type Output = SeqNum;
    fn sub(self, bytes: u32) -> SeqNum {
        SeqNum(self.0.wrapping_sub(bytes))
    }
}

impl Sub<SeqNum> for SeqNum {
    type Output = u32;
    /// Bytes from `earlier` to `self`; wraps, so the caller knows which one is earlier.
    fn sub(self, earlier: SeqNum) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

impl fmt::Debug for SeqNum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seq:{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::SeqNum;

    #[test]
    fn order_survives_the_wrap() {
        let last = SeqNum(u32::MAX);
        let first = last + 1;
        assert_eq!(first, SeqNum(0));
        assert!(last.before(first) && first.after(last));
        assert_eq!(first - last, 1);
        assert_eq!(last.distance(first), -1);
        assert_eq!(last.max(first), first);
    }

    #[test]
    fn a_number_is_neither_before_nor_after_itself() {
        let n = SeqNum(7);
        assert!(!n.before(n) && !n.after(n) && n.at_or_before(n) && n.at_or_after(n));
    }
}
