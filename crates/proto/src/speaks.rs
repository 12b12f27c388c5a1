//! Which protocols a version speaks. A library and a server, or two servers of which one follows the other, fit if both speak
//! one in common.

use crate::{OLDEST_PROTOCOL, PROTOCOL};

/// A range of protocol numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speaks {
    newest: u32,
    oldest: u32,
}

/// Bits of a word that have the newest number; those above say how many older ones are spoken, too.
const NUMBER_BITS: u32 = 24;

impl Speaks {
    /// What this version speaks.
    pub const OWN: Speaks = Speaks {
        newest: PROTOCOL,
        oldest: OLDEST_PROTOCOL,
    };

    /// One protocol only.
    pub const fn only(number: u32) -> Speaks {
        Speaks {
            newest: number,
            oldest: number,
        }
    }

    /// Encodes it; a single protocol as its number, as all versions did before there was a range.
    pub const fn word(self) -> u32 {
        self.newest | (self.newest - self.oldest) << NUMBER_BITS
    }

    pub const fn from_word(word: u32) -> Speaks {
        let newest = word & ((1 << NUMBER_BITS) - 1);
        Speaks {
            newest,
            oldest: newest.saturating_sub(word >> NUMBER_BITS),
        }
    }

    /// Do both speak one in common?
    pub fn fits(self, other: Speaks) -> bool {
        self.agreed(other).is_some()
    }

    /// Returns the newest protocol that both speak.
    pub fn agreed(self, other: Speaks) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

const _: () = assert!(OLDEST_PROTOCOL <= PROTOCOL && PROTOCOL - OLDEST_PROTOCOL < 1 << 8);

#[cfg(test)]
mod tests {
    use super::*;

    fn speaks(oldest: u32, newest: u32) -> Speaks {
        Speaks { newest, oldest }
    }

    #[test]
    fn versions_fit_if_their_ranges_overlap() {
        assert_eq!(speaks(18, 18).agreed(speaks(18, 18)), Some(18));
        assert_eq!(speaks(18, 19).agreed(speaks(18, 18)), Some(18));
        assert_eq!(speaks(18, 20).agreed(speaks(19, 21)), Some(20));
        assert_eq!(speaks(19, 20).agreed(speaks(18, 18)), None);
        assert_eq!(speaks(18, 18).agreed(speaks(19, 20)), None);
    }

    #[test]
    fn a_word_has_the_whole_range() {
        for known in [speaks(18, 18), speaks(18, 19), speaks(1, 200)] {
            assert_eq!(Speaks::from_word(known.word()), known);
        }
        assert_eq!(Speaks::only(18).word(), 18);
    }

    #[test]
    fn no_word_is_too_strange() {
        for word in [0, 1 << NUMBER_BITS, u32::MAX, u32::MAX << NUMBER_BITS] {
            let strange = Speaks::from_word(word);
            assert!(strange.oldest <= strange.newest);
            assert_eq!(strange.agreed(speaks(18, 19)), None, "{word:#x}");
        }
    }
}
