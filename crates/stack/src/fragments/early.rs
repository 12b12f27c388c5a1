//! Fragments that came before the first of their datagram, when the filter could not tell whose they
//! are. The server keeps them until the filter has seen that first one.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};

use portolan_types::Instant;

use super::{Key, Piece};

/// Reordering is a matter of milliseconds; what waits longer has lost its first fragment.
const PATIENCE: Duration = Duration::from_secs(15);

/// Bytes of all that wait.
const MEMORY: usize = 1 << 20;

/// Fragments in the server's keeping.
#[derive(Debug, Default)]
pub struct EarlyFragments {
    datagrams: HashMap<Key, Early>,
    /// Oldest first; some are gone already.
    order: VecDeque<(Instant, Key)>,
    bytes: usize,
    /// Fragments given up because nobody claimed them.
    pub unclaimed: u64,
}

#[derive(Debug)]
enum Early {
    Waiting(Vec<Vec<u8>>),
    /// The filter knows the owner now.
    Claimed,
}

impl EarlyFragments {
    /// Takes in what the filter has copied; answers the frames that it will now understand.
    pub fn take_in(&mut self, now: Instant, frame: &[u8]) -> Vec<Vec<u8>> {
        self.forget_old(now);
        let Some(piece) = Piece::of(frame) else {
            return Vec::new();
        };
        let is_first = piece.offset == 0;
        if !self.datagrams.contains_key(&piece.key) {
            self.order.push_back((now + PATIENCE, piece.key));
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
