//! Rate limit for responses to segments that an attacker may have sent (RFC 5961 §7).

use core::time::Duration;

use portolan_types::Instant;

use crate::encoding;
use crate::event_counters::{Event, EventCounters};

#[derive(Clone, Debug, Default)]
pub(crate) struct Challenges {
    /// Earliest time of the next response.
    after: Instant,
}

encoding::fields!(Challenges { after });

impl Challenges {
    /// Linux's `tcp_invalid_ratelimit`; RFC 5961 §7 proposes ten in five seconds.
    const INTERVAL: Duration = Duration::from_millis(500);

    pub(crate) fn allow(&mut self, now: Instant, event_counters: &mut EventCounters) -> bool {
        let allowed = now >= self.after;
        if allowed {
            self.after = now + Challenges::INTERVAL;
        }
        event_counters.count(if allowed {
            Event::Challenge
        } else {
            Event::ChallengeWithheld
        });
        allowed
    }
}
