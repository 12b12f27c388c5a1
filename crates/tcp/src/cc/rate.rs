//! Delivery rate of the path (draft-cheng-iccrg-delivery-rate-estimation): each transmission is
//! stamped with the bytes delivered so far; its acknowledgement shows how many were delivered since.

use portolan_types::Instant;

use crate::encoding;

/// What was known when some bytes were sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stamp {
    /// Bytes delivered so far, and when the last of them were.
    delivered: u64,
    delivered_at: Instant,
    /// When the sampled flight began.
    first_sent: Instant,
    /// The application supplied too little data to fill the pipe.
    limited: bool,
}

encoding::fields!(Stamp {
    delivered,
    delivered_at,
    first_sent,
    limited
});

/// The connection's delivery state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rate {
    delivered: u64,
    delivered_at: Instant,
    first_sent: Instant,
    /// The application-limited bubble has left the pipe when this many bytes are delivered.
    limited_until: u64,
}

encoding::fields!(Rate {
    delivered,
    delivered_at,
    first_sent,
    limited_until
});

/// The rate sample of one acknowledgement; without an interval there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RateSample {
    /// Bytes delivered in total, and the total when the newest of them were sent.
    pub(crate) delivered: u64,
    pub(crate) prior_delivered: u64,
    /// Nanoseconds.
    pub(crate) interval: Option<u64>,
    pub(crate) limited: bool,
}

impl RateSample {
    /// Bytes per second.
    pub(crate) fn rate(&self) -> Option<u64> {
        bytes_per_second(
            self.delivered.saturating_sub(self.prior_delivered),
            self.interval?,
        )
    }
}

pub(crate) fn bytes_per_second(bytes: u64, nanos: u64) -> Option<u64> {
    Some(bytes.checked_mul(1_000_000_000)? / nanos.max(1))
}

/// The newest transmission that one acknowledgement covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newest {
    stamp: Stamp,
    sent: Instant,
}

impl Newest {
    pub(crate) fn choose(old: Option<Newest>, stamp: Stamp, sent: Instant) -> Option<Newest> {
        match old {
            Some(old) if (old.sent, old.stamp.delivered) >= (sent, stamp.delivered) => Some(old),
            _ => Some(Newest { stamp, sent }),
        }
    }
}

impl Rate {
    /// Returns the stamp for bytes sent now.
    pub(crate) fn stamp(&mut self, now: Instant, idle: bool) -> Stamp {
        if idle {
            self.first_sent = now;
            self.delivered_at = now;
        }
        Stamp {
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent: self.first_sent,
            limited: self.limited_until > self.delivered,
        }
    }

    /// Everything is sent and the window is not full: samples from here on are application-limited.
    pub(crate) fn limit(&mut self, flight: u32) {
        self.limited_until = self.delivered + u64::from(flight.max(1));
    }

    /// Whether the application-limited bubble is still in the pipe.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited_until > self.delivered
    }

    pub(crate) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Records the delivery of `bytes`, whose newest transmission is `newest`; `min_rtt` in nanoseconds.
    pub(crate) fn deliver(
        &mut self,
        now: Instant,
        bytes: u32,
        newest: Option<Newest>,
        min_rtt: u64,
    ) -> RateSample {
        self.delivered += u64::from(bytes);
        let mut sample = RateSample {
            delivered: self.delivered,
            ..RateSample::default()
        };
        let Some(Newest { stamp, sent }) = newest else {
            return sample;
        };
        self.delivered_at = now;
        self.first_sent = sent;
        sample.prior_delivered = stamp.delivered;
        sample.limited = stamp.limited;
        let since =
            |late: Instant, early: Instant| late.as_nanos().saturating_sub(early.as_nanos());
        let interval = since(sent, stamp.first_sent).max(since(now, stamp.delivered_at));
        // An interval below one round trip is an artefact of merged acknowledgements.
        sample.interval = (interval >= min_rtt.max(1)).then_some(interval);
        sample
    }

    pub(crate) fn is_consistent(&self) -> bool {
        self.delivered < 1 << 62 && self.limited_until < 1 << 62
    }
}
