//! Limits log lines that others can provoke repeatedly: each call site may write a burst of lines, then a limited number
//! per second.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Lines that a call site may write at once.
const BURST: f64 = 50.0;

/// Lines per second after that.
const PER_SECOND: f64 = 1.0;

/// Passes lines of a call site up to its limit; levels below `info`, which must be requested, are not limited.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<HashMap<Identifier, Bucket>>);

#[derive(Debug)]
struct Bucket {
    lines: f64,
    at: Instant,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.lines = (self.lines + since * PER_SECOND).min(BURST);
        self.at = now;
        let has_one = self.lines >= 1.0;
        if has_one {
            self.lines -= 1.0;
        }
        has_one
    }
}

impl<S: Subscriber> Layer<S> for LogLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets.entry(metadata.callsite()).or_insert(Bucket {
            lines: BURST,
            at: now,
        });
        bucket.take(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lines_of_one_place_are_so_many_at_once_and_come_again() {
        let start = Instant::now();
        let mut bucket = Bucket {
            lines: BURST,
            at: start,
        };
        let passed = (0..1000).filter(|_| bucket.take(start)).count();
        assert_eq!(passed, BURST as usize);
        let later = start + Duration::from_secs(10);
        let passed = (0..1000).filter(|_| bucket.take(later)).count();
        assert_eq!(passed, 10);
    }
}
