//! The recent maximum, in constant space (Kathleen Nichols' windowed filter).

use crate::encoding;

#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    at: u64,
    value: u64,
}

encoding::fields!(Estimate { at, value });

/// The best, second and third best value within a window of `at`, each later than the one before.
#[derive(Clone, Debug, Default)]
pub(super) struct MaxFilter {
    best: [Estimate; 3],
}

encoding::fields!(MaxFilter { best });

impl MaxFilter {
    pub(super) fn max(&self) -> u64 {
        self.best[0].value
    }

    /// Adds `value`, measured at `at`, which never decreases; discards values older than `window`.
    pub(super) fn update(&mut self, at: u64, window: u64, value: u64) {
        let new = Estimate { at, value };
        let oldest_counts = at.saturating_sub(self.best[2].at) <= window;
        if value >= self.best[0].value || !oldest_counts {
            self.best = [new; 3];
            return;
        }
        if value >= self.best[1].value {
            self.best[1] = new;
            self.best[2] = new;
        } else if value >= self.best[2].value {
            self.best[2] = new;
        }
        self.age(new, window);
    }

    fn age(&mut self, new: Estimate, window: u64) {
        let age = new.at.saturating_sub(self.best[0].at);
        let [_, second, third] = self.best;
        if age > window {
            self.best = [second, third, new];
            if new.at.saturating_sub(self.best[0].at) > window {
                self.best = [third, new, new];
            }
        } else if second.at == self.best[0].at && age > window / 4 {
            // A quarter of the window has passed without a second best value.
            self.best[1] = new;
            self.best[2] = new;
        } else if third.at == second.at && age > window / 2 {
            self.best[2] = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_value_is_forgotten_after_a_window_and_not_before() {
        let mut filter = MaxFilter::default();
        filter.update(0, 10, 100);
        for at in 1..=10 {
            filter.update(at, 10, 50 - at);
            assert_eq!(filter.max(), 100, "{at}");
        }
        filter.update(11, 10, 20);
        assert!((20..50).contains(&filter.max()), "{}", filter.max());
        filter.update(12, 10, 70);
        assert_eq!(filter.max(), 70);
    }
}
