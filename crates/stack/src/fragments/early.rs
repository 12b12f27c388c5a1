//! Fragments that arrived before the first one of their datagram, when the filter could not determine
//! their owner. The server keeps them until the filter has seen the first one.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};

use portolan_types::Instant;

use super::{Key, Piece};

/// Reordering takes milliseconds; after this time the first fragment must have been lost.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Limit of the bytes of all waiting fragments.
const MEMORY: usize = 1 << 20;

/// Fragments kept by the server.
#[derive(Debug, Default)]
pub struct EarlyFragments {
    datagrams: HashMap<Key, Early>,
    /// Oldest first; may contain datagrams already removed.
    order: VecDeque<(Instant, Key)>,
    bytes: usize,
    /// Fragments discarded because their first one never arrived.
    pub unclaimed: u64,
}

#[derive(Debug)]
enum Early {
    Waiting(Vec<Vec<u8>>),
    /// The first fragment has arrived: the filter knows the owner.
    Claimed,
}

impl EarlyFragments {
    /// Takes a fragment that the filter has copied; returns the frames whose owner the filter now knows.
    pub fn add(&mut self, now: Instant, frame: &[u8]) -> Vec<Vec<u8>> {
        self.forget_old(now);
        let Some(piece) = Piece::of(frame) else {
            return Vec::new();
        };
        let is_first = piece.offset == 0;
        if !self.datagrams.contains_key(&piece.key) {
            self.order.push_back((now + TIMEOUT, piece.key));
        }
        let early = self
            .datagrams
            .entry(piece.key)
            .or_insert_with(|| Early::Waiting(Vec::new()));
        match early {
            Early::Claimed if is_first => Vec::new(),
            Early::Claimed => vec![frame.to_vec()],
            Early::Waiting(frames) if is_first => {
                let released = core::mem::take(frames);
                *early = Early::Claimed;
                self.bytes -= released.iter().map(Vec::len).sum::<usize>();
                released
            }
            Early::Waiting(frames) => {
                frames.push(frame.to_vec());
                self.bytes += frame.len();
                self.make_room();
                Vec::new()
            }
        }
    }

    fn make_room(&mut self) {
        while self.bytes > MEMORY
            && let Some((_, key)) = self.order.pop_front()
        {
            self.forget(key);
        }
    }

    fn forget_old(&mut self, now: Instant) {
        while let Some(&(until, key)) = self.order.front()
            && until <= now
        {
            self.order.pop_front();
            self.forget(key);
        }
    }

    fn forget(&mut self, key: Key) {
        if let Some(Early::Waiting(frames)) = self.datagrams.remove(&key) {
            self.unclaimed += frames.len() as u64;
            self.bytes -= frames.iter().map(Vec::len).sum::<usize>();
        }
    }
}
