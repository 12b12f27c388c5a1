//! When sessions are due, the earliest first. What a turn finds due is bounded, and what is not due costs it nothing,
//! however many there are.

use std::collections::BTreeSet;

use portolan_types::{Instant, SessionId};

/// Of one kind, in one turn.
const PER_TURN: usize = 256;

/// Entries stay when what they are for has ended: whoever takes one looks whether it still holds.
#[derive(Debug, Default)]
pub struct DueList(BTreeSet<(Instant, SessionId)>);

impl DueList {
    pub fn add(&mut self, at: Instant, id: SessionId) {
        self.0.insert((at, id));
    }

    /// Takes out what is due, as much as one turn attends to.
    pub fn take(&mut self, now: Instant) -> Vec<(Instant, SessionId)> {
        let due = self.0.iter().take_while(|(at, _)| *at <= now);
        let due: Vec<_> = due.take(PER_TURN).copied().collect();
        for entry in &due {
            self.0.remove(entry);
        }
        due
    }

    /// When to come back.
    pub fn next(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_earliest_come_first_and_so_many_at_a_time() {
        let start = Instant::from_nanos(1);
        let mut list = DueList::default();
        for id in (0..1000).rev() {
            list.add(start + Duration::from_millis(id), SessionId(id));
        }
        assert_eq!(list.take(start).len(), 1);
        let end = start + Duration::from_secs(1);
        let next = list.take(end);
        assert_eq!(next.len(), PER_TURN);
        assert_eq!(next[0].1, SessionId(1));
        assert_eq!(list.next(), Some(start + Duration::from_millis(257)));
    }
}
