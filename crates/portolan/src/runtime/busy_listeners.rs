//! Which listeners accept so many connections that it pays to perform their handshakes here.

use std::collections::HashMap;
use std::time::Duration;

use portolan_types::{Instant, SessionId};

/// A listener is busy once it accepts that many connections within that time.
const MANY: u32 = 32;
const WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct BusyListeners(HashMap<SessionId, Accepts>);

#[derive(Clone, Copy, Debug)]
enum Accepts {
    Counted {
        since: Instant,
        count: u32,
    },
    Reported,
    /// Not reported again before that.
    Resting {
        until: Instant,
    },
}

impl BusyListeners {
    /// The listener has accepted a connection that the server opened. Returns true once, when it is busy.
    pub(crate) fn note_accept(&mut self, now: Instant, listener: SessionId) -> bool {
        let begin = Accepts::Counted {
            since: now,
            count: 0,
        };
        let accepts = self.0.entry(listener).or_insert(begin);
        if let Accepts::Resting { until } = accepts
            && *until <= now
        {
            *accepts = begin;
        }
        let Accepts::Counted { since, count } = accepts else {
            return false;
        };
        if *since + WITHIN < now {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        if *count < MANY {
            return false;
        }
        *accepts = Accepts::Reported;
        true
    }

    /// Its handshakes are not performed here any more, or cannot be: it may be reported again after a pause.
    pub(crate) fn rest(&mut self, now: Instant, listener: SessionId) {
        let until = now + WITHIN;
        self.0.insert(listener, Accepts::Resting { until });
    }

    /// Has the listener accepted connections lately?
    pub(crate) fn is_in_use(&self, now: Instant, listener: SessionId) -> bool {
        match self.0.get(&listener) {
            Some(Accepts::Counted { since, count }) => *count > 0 && *since + 2 * WITHIN >= now,
            Some(Accepts::Reported) => true,
            Some(Accepts::Resting { .. }) | None => false,
        }
    }

    pub(crate) fn forget(&mut self, listener: SessionId) {
        self.0.remove(&listener);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTENER: SessionId = SessionId(7);

    #[test]
    fn many_connections_at_once_make_it_busy_and_as_many_in_a_minute_do_not() {
        let mut listeners = BusyListeners::default();
        let mut now = Instant::from_millis(1000);
        for _ in 0..3 * MANY {
            assert!(!listeners.note_accept(now, LISTENER));
            now += WITHIN / 16;
        }
        let times = (0..2 * MANY).filter(|_| listeners.note_accept(now, LISTENER));
        assert_eq!(times.count(), 1, "once");
        assert!(!listeners.note_accept(now, SessionId(8)));
        listeners.forget(LISTENER);
        let times = (0..2 * MANY).filter(|_| listeners.note_accept(now, LISTENER));
        assert_eq!(times.count(), 1, "it is another one");
    }
}
