//! What both ends have shown each other, for a capture: after a [`publish`](Local::publish) and a
//! [`look`](Local::look) the new bytes are in the memory, whoever has taken them.

use portolan_proto::local::Side;

use super::Local;

/// A stream of a session, as seen by one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Out,
    In,
}

impl Local {
    /// Position behind the last byte that the reader may read, and the [`flags`](portolan_proto::local::flags).
    pub fn shown(&self, direction: Direction) -> (u64, u32) {
        let progress = match direction {
            Direction::Out => &self.published,
            Direction::In => &self.peer,
        };
        (progress.shown, progress.flags)
    }

    /// Position behind the last byte that the reader has taken: what follows is in the memory.
    pub fn taken(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Out => self.peer.taken.min(self.published.shown),
            Direction::In => self.own.taken,
        }
    }

    /// Copies shown bytes.
    pub fn copy_shown(&self, direction: Direction, position: u64, out: &mut [u8]) {
        match direction {
            Direction::Out => self.copy_from(self.side, (self.base, self.cycle), position, out),
            Direction::In => self.copy_out(position, out),
        }
    }

    pub(super) fn copy_from(
        &self,
        side: Side,
        (base, cycle): (u64, u64),
        position: u64,
        out: &mut [u8],
    ) {
        let offset = position.wrapping_sub(base);
        self.rings.get(side, Local::to_length(cycle), offset, out);
    }
}
