//! Proportional rate reduction (draft-ietf-tcpm-prr-rfc6937bis): how the flight shrinks to the
//! threshold during recovery, segment by segment, as acknowledgements arrive.

use crate::encoding;

#[derive(Clone, Debug, Default)]
pub(crate) struct Prr {
    /// `RecoverFS`: bytes in flight when recovery began.
    flight: u32,
    delivered: u32,
    out: u32,
}

encoding::fields!(Prr {
    flight,
    delivered,
    out
});

/// The effect of one acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub(crate) delivered: u32,
    /// Bytes in flight now.
    pub(crate) pipe: u32,
    /// `SafeACK`: the acknowledgement advanced and revealed no further loss.
    pub(crate) safe: bool,
    pub(crate) mss: u32,
}

impl Prr {
    pub(crate) fn new(flight: u32) -> Prr {
        Prr {
            flight: flight.max(1),
            delivered: 0,
            out: 0,
        }
    }

    /// `bytes` were sent.
    pub(crate) fn sent(&mut self, bytes: u32) {
        self.out = self.out.saturating_add(bytes);
    }

    /// §6: the window after an acknowledgement.
    pub(crate) fn window(&mut self, ssthresh: u32, ack: Progress) -> u32 {
        self.delivered = self.delivered.saturating_add(ack.delivered);
        let limit = if ack.pipe > ssthresh {
            // The proportional part.
            let share = u64::from(self.delivered) * u64::from(ssthresh);
            let share = share.div_ceil(u64::from(self.flight.max(1)));
            u32::try_from(share)
                .unwrap_or(u32::MAX)
                .saturating_sub(self.out)
        } else {
            // PRR-CRB, and PRR-SSRB while recovery makes progress.
            let conservative = self.delivered.saturating_sub(self.out).max(ack.delivered);
            let bonus = if ack.safe { ack.mss } else { 0 };
            conservative.saturating_add(bonus).min(ssthresh - ack.pipe)
        };
        // The first retransmission does not wait.
        let first = if self.out == 0 { ack.mss } else { 0 };
        ack.pipe.saturating_add(limit.max(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    fn ack(pipe: u32, safe: bool) -> Progress {
        Progress {
            delivered: MSS,
            pipe,
            safe,
            mss: MSS,
        }
    }

    #[test]
    fn above_the_threshold_seven_leave_for_ten_that_arrive() {
        let mut prr = Prr::new(100 * MSS);
        let (mut pipe, mut sent) = (99 * MSS, 0);
        for _ in 0..50 {
            pipe -= MSS;
            while prr.window(
                70 * MSS,
                Progress {
                    delivered: 0,
                    ..ack(pipe, false)
                },
            ) >= pipe + MSS
            {
                prr.sent(MSS);
                sent += 1;
                pipe += MSS;
            }
            prr.delivered += MSS;
        }
        assert!((34..=36).contains(&sent), "{sent}");
    }

    #[test]
    fn below_the_threshold_progress_earns_a_segment_more() {
        let mut prr = Prr::new(20 * MSS);
        prr.sent(MSS);
        assert_eq!(prr.window(10 * MSS, ack(4 * MSS, false)), 5 * MSS);
        prr.sent(MSS);
        assert_eq!(prr.window(10 * MSS, ack(4 * MSS, true)), 6 * MSS);
        assert!(prr.window(10 * MSS, ack(9 * MSS + 500, true)) <= 10 * MSS);
    }

    #[test]
    fn the_first_retransmission_leaves_whatever_the_pipe() {
        let mut prr = Prr::new(20 * MSS);
        let window = prr.window(
            10 * MSS,
            Progress {
                delivered: 0,
                ..ack(19 * MSS, false)
            },
        );
        assert_eq!(window, 20 * MSS);
    }
}
