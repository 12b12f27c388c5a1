//! What the error queue reports of sent data: time stamps of a stream (`SO_TIMESTAMPING`, Linux's
//! networking/timestamping.rst), when the last byte of a call left for the device and when the peer acknowledged it, and
//! completions of `MSG_ZEROCOPY` (networking/msg_zerocopy.rst). A session that leaves the process loses its marks.

use std::collections::VecDeque;

use portolan_tcp::SendSpace;
use portolan_types::{Instant, SeqNum};

use crate::socket::options::timestamping::{OPT_ID, TX_ACK, TX_SCHED, TX_SOFTWARE};

/// Maximum number of marks and of stamps per stream; beyond, the oldest marks and the newest stamps are dropped.
const MOST: usize = 1024;

/// Stamped events, with the value that reports them (linux/errqueue.h, `SCM_TSTAMP_*`).
const KINDS: [(u32, u32); 3] = [(TX_SCHED, 1), (TX_SOFTWARE, 0), (TX_ACK, 2)];

/// A byte that is tracked.
#[derive(Debug)]
struct Mark {
    byte: SeqNum,
    /// Flags of `SO_TIMESTAMPING` whose event is pending.
    wanted: u32,
    number: u32,
}

/// One entry of the error queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentEvent {
    Stamp(Stamp),
    /// The memory of these calls, counted from 0, is the program's again.
    Completed {
        first: u32,
        last: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) kind: u32,
    /// Of the byte, from where the program started to count (`SOF_TIMESTAMPING_OPT_ID`).
    pub(crate) number: u32,
    pub(crate) at: Instant,
}

#[derive(Debug, Default)]
pub(crate) struct Stamps {
    /// Sequence number of byte 0.
    base: SeqNum,
    marks: VecDeque<Mark>,
    queue: VecDeque<SentEvent>,
    /// Calls with `MSG_ZEROCOPY` so far.
    completed: u32,
}

impl Stamps {
    /// Counts bytes from `base`.
    pub(crate) fn count_from(&mut self, base: SeqNum) {
        self.base = base;
    }

    /// Tracks the last byte that was given to the stream, if `flags` request it.
    pub(crate) fn mark(&mut self, edges: &SendSpace, flags: u32) {
        let wanted = flags & (TX_SCHED | TX_SOFTWARE | TX_ACK);
        if wanted == 0 {
            return;
        }
        let byte = edges.end - 1;
        let number = if flags & OPT_ID != 0 {
            byte - self.base
        } else {
            0
        };
        if self.marks.len() == MOST {
            self.marks.pop_front();
        }
        self.marks.push_back(Mark {
            byte,
            wanted,
            number,
        });
    }

    /// Stamps the marks that have passed an edge. Returns whether there are new stamps.
    pub(crate) fn pass(&mut self, now: Instant, edges: &SendSpace) -> bool {
        let before = self.queue.len();
        for mark in &mut self.marks {
            for (flag, kind) in KINDS {
                let edge = if flag == TX_ACK { edges.una } else { edges.nxt };
                if mark.wanted & flag == 0 || mark.byte.at_or_after(edge) {
                    continue;
                }
                mark.wanted &= !flag;
                if self.queue.len() < MOST {
                    self.queue.push_back(SentEvent::Stamp(Stamp {
                        kind,
                        number: mark.number,
                        at: now,
                    }));
                }
            }
        }
        self.marks.retain(|mark| mark.wanted != 0);
        self.queue.len() > before
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !self.marks.is_empty()
    }

    pub(crate) fn has_some(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Reports a call with `MSG_ZEROCOPY` as completed. As on Linux, it joins those before it that are at the queue's end, so
    /// that there are at most as many such entries as stamps.
    pub(crate) fn complete(&mut self) {
        let number = self.completed;
        self.completed = number.wrapping_add(1);
        match self.queue.back_mut() {
            Some(SentEvent::Completed { last, .. }) => *last = number,
            _ => self.queue.push_back(SentEvent::Completed {
                first: number,
                last: number,
            }),
        }
    }

    pub(crate) fn take(&mut self) -> Option<SentEvent> {
        self.queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(una: u32, nxt: u32, end: u32) -> SendSpace {
        let [una, nxt, end] = [una, nxt, end].map(SeqNum);
        SendSpace { una, nxt, end }
    }

    fn told(stamps: &mut Stamps) -> Vec<(u32, u32)> {
        std::iter::from_fn(|| stamps.take())
            .map(|event| match event {
                SentEvent::Stamp(stamp) => (stamp.kind, stamp.number),
                SentEvent::Completed { first, last } => (first, last),
            })
            .collect()
    }

    #[test]
    fn the_last_byte_is_stamped_as_it_leaves_and_as_it_is_acknowledged() {
        let mut stamps = Stamps::default();
        stamps.count_from(SeqNum(1000));
        let all = TX_SCHED | TX_SOFTWARE | TX_ACK | OPT_ID;
        stamps.mark(&edges(1000, 1000, 1100), all);
        assert!(!stamps.pass(Instant::ZERO, &edges(1000, 1099, 1100)));
        assert!(stamps.pass(Instant::ZERO, &edges(1000, 1100, 1100)));
        assert_eq!(told(&mut stamps), [(1, 99), (0, 99)]);
        assert!(stamps.is_waiting());
        assert!(!stamps.pass(Instant::ZERO, &edges(1099, 1100, 1100)));
        assert!(stamps.pass(Instant::ZERO, &edges(1100, 1100, 1100)));
        assert_eq!(told(&mut stamps), [(2, 99)]);
        assert!(!stamps.is_waiting());
    }

    #[test]
    fn nothing_is_watched_that_nobody_asked_for() {
        let mut stamps = Stamps::default();
        stamps.mark(&edges(0, 0, 10), OPT_ID);
        assert!(!stamps.is_waiting());
        stamps.mark(&edges(0, 0, 10), TX_ACK);
        assert!(stamps.pass(Instant::ZERO, &edges(10, 10, 10)));
        assert_eq!(told(&mut stamps), [(2, 0)]);
    }

    #[test]
    fn a_queue_that_nobody_reads_is_bounded() {
        let mut stamps = Stamps::default();
        for end in 1..=2 * MOST as u32 {
            stamps.mark(&edges(0, 0, end), TX_SOFTWARE);
        }
        stamps.pass(Instant::ZERO, &edges(0, 1 << 20, 1 << 20));
        assert_eq!(told(&mut stamps).len(), MOST);
    }

    #[test]
    fn completions_are_joined_until_they_are_read_or_a_stamp_comes_between() {
        let mut stamps = Stamps::default();
        for _ in 0..3 {
            stamps.complete();
        }
        assert_eq!(told(&mut stamps), [(0, 2)]);
        stamps.complete();
        stamps.mark(&edges(0, 0, 10), TX_SOFTWARE);
        stamps.pass(Instant::ZERO, &edges(10, 10, 10));
        stamps.complete();
        stamps.complete();
        assert_eq!(told(&mut stamps), [(3, 3), (0, 0), (4, 5)]);
    }
}
