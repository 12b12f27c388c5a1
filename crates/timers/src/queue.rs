//! Named deadlines on one wheel: expired ones are returned in the order in which they expired, at most as
//! many at a time as the caller requests.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use portolan_types::Instant;

use crate::Wheel;

#[derive(Clone, Copy, Debug)]
struct Entry<K> {
    key: K,
    is_due: bool,
}

/// At most one deadline per key.
#[derive(Debug)]
pub struct Queue<K> {
    wheel: Wheel,
    slots: HashMap<K, u32>,
    entries: Vec<Option<Entry<K>>>,
    free: Vec<u32>,
    /// Expired and not taken yet. Some may have been armed again or disarmed since.
    due: VecDeque<(u32, K)>,
}

impl<K: Copy + Eq + Hash> Queue<K> {
    pub fn new(now: Instant) -> Queue<K> {
        Queue {
            wheel: Wheel::new(now),
            slots: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            due: VecDeque::new(),
        }
    }

    /// Sets the deadline of `key`, replacing an earlier one.
    pub fn arm(&mut self, key: K, at: Instant) {
        let slot = self.slot_of(key);
        if let Some(entry) = &mut self.entries[slot as usize] {
            entry.is_due = false;
        }
        self.wheel.set(slot, at);
    }

    /// As [`Queue::arm`], unless `key` has a deadline already.
    pub fn arm_once(&mut self, key: K, at: Instant) {
        if !self.is_armed(key) {
            self.arm(key, at);
        }
    }

    /// Makes `key` due at the next `take`.
    pub fn defer(&mut self, key: K) {
        let slot = self.slot_of(key);
        if let Some(entry) = &mut self.entries[slot as usize]
            && !std::mem::replace(&mut entry.is_due, true)
        {
            self.wheel.clear(slot);
            self.due.push_back((slot, key));
        }
    }

    pub fn disarm(&mut self, key: K) {
        if let Some(slot) = self.slots.remove(&key) {
            self.wheel.clear(slot);
            self.release(slot);
        }
    }

    pub fn is_armed(&self, key: K) -> bool {
        self.slots.contains_key(&key)
    }

    /// When to call `take` next, possibly before anything is due.
    pub fn next(&self) -> Option<Instant> {
        if self.due.is_empty() {
            self.wheel.next()
        } else {
            Some(Instant::ZERO)
        }
    }

    /// Removes and returns what is due, at most `most` keys.
    pub fn take(&mut self, now: Instant, most: usize) -> Vec<K> {
        let (entries, due) = (&mut self.entries, &mut self.due);
        self.wheel.expire(now, |slot| {
            if let Some(entry) = &mut entries[slot as usize] {
                entry.is_due = true;
                due.push_back((slot, entry.key));
            }
        });
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((slot, key)) = self.due.pop_front()
        {
            let is_due = self.entries[slot as usize]
                .as_ref()
                .is_some_and(|entry| entry.key == key && entry.is_due);
            if is_due {
                self.slots.remove(&key);
                self.release(slot);
                taken.push(key);
            }
        }
        taken
    }

    fn slot_of(&mut self, key: K) -> u32 {
        if let Some(&slot) = self.slots.get(&key) {
            return slot;
        }
        let entry = Some(Entry { key, is_due: false });
        let slot = match self.free.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                // There cannot be more keys in memory than a u32 counts.
                (self.entries.len() - 1) as u32
            }
        };
        self.slots.insert(key, slot);
        slot
    }

    fn release(&mut self, slot: u32) {
        self.entries[slot as usize] = None;
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    #[test]
    fn the_earliest_come_first_and_so_many_at_a_time() {
        let mut queue = Queue::new(at(0));
        for key in (1..=1000).rev() {
            queue.arm(key, at(key));
        }
        assert_eq!(queue.take(at(2), 10), [1]);
        assert_eq!(queue.take(at(1001), 3), [2, 3, 4]);
        assert_eq!(queue.next(), Some(Instant::ZERO));
        assert_eq!(queue.take(at(1001), 2000).len(), 996);
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn what_is_armed_anew_or_disarmed_is_not_due_although_it_was() {
        let mut queue = Queue::new(at(0));
        for key in ["late", "gone", "due"] {
            queue.arm(key, at(10));
        }
        assert!(queue.take(at(20), 0).is_empty());
        queue.arm("late", at(30));
        queue.disarm("gone");
        // Its slot is now reused.
        queue.arm("new", at(40));
        assert_eq!(queue.take(at(20), 9), ["due"]);
        assert_eq!(queue.take(at(50), 9), ["late", "new"]);
    }

    #[test]
    fn what_is_deferred_is_due_at_once_and_once() {
        let mut queue = Queue::new(at(0));
        queue.arm("next", at(1000));
        queue.defer("next");
        queue.defer("next");
        assert_eq!(queue.next(), Some(Instant::ZERO));
        assert_eq!(queue.take(at(0), 9), ["next"]);
        assert!(queue.take(at(2000), 9).is_empty());
    }

    #[test]
    fn the_first_deadline_may_be_the_one_that_holds() {
        let mut queue = Queue::new(at(0));
        queue.arm_once(1, at(10));
        queue.arm_once(1, at(100));
        assert_eq!(queue.take(at(20), 9), [1]);
    }
}
