//! The timestamps option of a connection that negotiated it (RFC 7323): what to send and to echo, and
//! protection against wrapped sequence numbers.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::Timestamps as Field;

use crate::encoding;

/// RFC 7323 §5.5: `recent` is invalid after this long.
const STALE: Duration = Duration::from_secs(24 * 24 * 3600);

#[derive(Clone, Debug)]
pub(crate) struct Timestamps {
    offset: u32,
    /// `TS.Recent`; compared like a sequence number.
    recent: u32,
    recent_at: Instant,
}

encoding::fields!(Timestamps {
    offset,
    recent,
    recent_at
});

impl Timestamps {
    pub(crate) fn new(offset: u32, recent: u32, now: Instant) -> Timestamps {
        Timestamps {
            offset,
            recent,
            recent_at: now,
        }
    }

    /// The clock in the option: milliseconds plus the offset.
    pub(crate) fn clock(offset: u32, now: Instant) -> u32 {
        (now.as_millis() as u32).wrapping_add(offset)
    }

    pub(crate) fn field(&self, now: Instant) -> Field {
        Field {
            value: Timestamps::clock(self.offset, now),
            echo: self.recent,
        }
    }

    /// RFC 7323 §5.3 R1: whether `field` is older than `TS.Recent`.
    pub(crate) fn is_old(&self, field: Field, now: Instant) -> bool {
        SeqNum(field.value).before(SeqNum(self.recent)) && now.since(self.recent_at) < STALE
    }

    pub(crate) fn is_newer(&self, field: Field) -> bool {
        SeqNum(field.value).after(SeqNum(self.recent))
    }

    /// RFC 7323 §5.3 R3; the caller checks that the segment spans the last acknowledgement.
    pub(crate) fn update(&mut self, field: Field, now: Instant) {
        if SeqNum(field.value).at_or_after(SeqNum(self.recent)) || self.is_stale(now) {
            self.recent = field.value;
            self.recent_at = now;
        }
    }

    /// How long ago the echoed segment was sent (RFC 7323 §4.1), if that is plausible.
    pub(crate) fn round_trip(&self, field: Field, now: Instant) -> Option<Duration> {
        let millis = Timestamps::clock(self.offset, now).wrapping_sub(field.echo);
        (field.echo != 0 && millis < 1 << 20).then(|| Duration::from_millis(millis.into()))
    }

    fn is_stale(&self, now: Instant) -> bool {
        now.since(self.recent_at) >= STALE
    }
}
