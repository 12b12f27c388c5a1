//! How long the sending half was busy, and what limited it (Linux's `tcp_chrono`).

use core::time::Duration;

use portolan_types::Instant;

use crate::encoding;

/// What the sending half is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Activity {
    #[default]
    Idle,
    Busy,
    /// The peer's window is full.
    WindowLimited,
    /// Everything is sent, and the writer waits for space in the send buffer.
    BufferLimited,
}

encoding::variants!(Activity {
    0 => Idle,
    1 => Busy,
    2 => WindowLimited,
    3 => BufferLimited,
});

/// Measures what limits the sending half.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Chronometer {
    activity: Activity,
    since: Instant,
    busy: Duration,
    window_limited: Duration,
    buffer_limited: Duration,
}

encoding::fields!(Chronometer {
    activity,
    since,
    busy,
    window_limited,
    buffer_limited
});

/// Time spent busy for any reason, and the part of it limited by the peer's window or the send buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    pub busy: Duration,
    pub window_limited: Duration,
    pub buffer_limited: Duration,
}

impl Chronometer {
    pub(crate) fn turn_to(&mut self, activity: Activity, now: Instant) {
        if activity == self.activity {
            return;
        }
        let spent = now.since(self.since);
        match self.activity {
            Activity::Idle => {}
            Activity::Busy => self.busy = self.busy.saturating_add(spent),
            Activity::WindowLimited => {
                self.window_limited = self.window_limited.saturating_add(spent);
            }
            Activity::BufferLimited => {
                self.buffer_limited = self.buffer_limited.saturating_add(spent);
            }
        }
        self.activity = activity;
        self.since = now;
    }

    /// The times up to `now`.
    pub fn times(mut self, now: Instant) -> Times {
        self.turn_to(Activity::Idle, now);
        let limited = self.window_limited.saturating_add(self.buffer_limited);
        Times {
            busy: self.busy.saturating_add(limited),
            window_limited: self.window_limited,
            buffer_limited: self.buffer_limited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_for_what_held_the_sender_back_and_as_busy() {
        let mut chronometer = Chronometer::default();
        let at = Instant::from_millis;
        chronometer.turn_to(Activity::Busy, at(10));
        chronometer.turn_to(Activity::WindowLimited, at(15));
        chronometer.turn_to(Activity::BufferLimited, at(35));
        chronometer.turn_to(Activity::Idle, at(36));
        chronometer.turn_to(Activity::Busy, at(100));
        let ms = Duration::from_millis;
        let times = chronometer.times(at(104));
        assert_eq!(times.busy, ms(30), "what goes on counts");
        assert_eq!(times.window_limited, ms(20));
        assert_eq!(times.buffer_limited, ms(1));
    }
}
