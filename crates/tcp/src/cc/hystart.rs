//! HyStart++ (RFC 9406): leaves the first slow start when round trips grow, before packets are lost.
//! After a suspected increase it grows more slowly for some rounds, and resumes if it was wrong.

use core::time::Duration;

use portolan_types::SeqNum;

use super::Acknowledged;
use crate::encoding;

const MIN_RTT_THRESH: Duration = Duration::from_millis(4);
const MAX_RTT_THRESH: Duration = Duration::from_millis(16);
const MIN_RTT_DIVISOR: u32 = 8;
const N_RTT_SAMPLE: u32 = 8;
pub(super) const CSS_GROWTH_DIVISOR: u32 = 4;
const CSS_ROUNDS: u32 = 5;

/// How the window should grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Growth {
    SlowStart,
    /// Conservative slow start.
    Conservative,
    /// Slow start ends.
    End,
}

#[derive(Clone, Debug, Default)]
pub(super) struct HyStart {
    /// End of the current round.
    window_end: Option<SeqNum>,
    last_round: Option<Duration>,
    this_round: Option<Duration>,
    samples: u32,
    /// Conservative slow start: the round trip when it began, and the rounds since.
    css: Option<(Duration, u32)>,
}

encoding::fields!(HyStart {
    window_end,
    last_round,
    this_round,
    samples,
    css
});

impl HyStart {
    /// RFC 9406 §4.2, for each acknowledgement in slow start.
    pub(super) fn on_ack(&mut self, ack: &Acknowledged) -> Growth {
        let round_over = self.window_end.is_none_or(|end| ack.una.at_or_after(end));
        if round_over && self.begin_round(ack.nxt) {
            return Growth::End;
        }
        if let Some(rtt) = ack.latest {
            self.this_round = Some(self.this_round.map_or(rtt, |least| least.min(rtt)));
            self.samples = self.samples.saturating_add(1);
        }
        self.judge();
        match self.css {
            Some(_) => Growth::Conservative,
            None => Growth::SlowStart,
        }
    }

    /// Returns true when conservative slow start has lasted long enough.
    fn begin_round(&mut self, end: SeqNum) -> bool {
        self.window_end = Some(end);
        self.last_round = self.this_round.take();
        self.samples = 0;
        if let Some((_, rounds)) = &mut self.css {
            *rounds += 1;
            return *rounds >= CSS_ROUNDS;
        }
        false
    }

    pub(super) fn is_consistent(&self) -> bool {
        const BOUND: Duration = Duration::from_secs(1 << 16);
        let css = self.css.map(|(baseline, _)| baseline);
        [self.last_round, self.this_round, css]
            .into_iter()
            .flatten()
            .all(|rtt| rtt <= BOUND)
            && self.css.is_none_or(|(_, rounds)| rounds <= CSS_ROUNDS)
    }

    fn judge(&mut self) {
        let (Some(this), true) = (self.this_round, self.samples >= N_RTT_SAMPLE) else {
            return;
        };
        match (self.css, self.last_round) {
            // Round trips have become shorter again: the increase was spurious.
            (Some((baseline, _)), _) if this < baseline => self.css = None,
            (None, Some(last)) => {
                let margin = (last / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESH, MAX_RTT_THRESH);
                if this >= last + margin {
                    self.css = Some((this, 0));
                }
            }
            _ => {}
        }
    }
}
