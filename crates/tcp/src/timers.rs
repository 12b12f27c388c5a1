//! When the connection must be called again. Each timer is an instant; a stopped timer is in the far
//! future, so that the earliest is a plain minimum.

use portolan_types::Instant;

use crate::encoding;

/// What the single timer of the sending side waits for; only one of these can be pending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendTimer {
    /// An acknowledgement (RFC 6298), of data or of a SYN.
    Retransmit,
    /// The peer's window to open, or a short segment to become due (RFC 9293 §3.8.6.1).
    Persist,
    /// Reordered segments to arrive before they count as lost (RFC 8985 §6.2).
    Reorder,
    /// The tail of the flight to be acknowledged (RFC 8985 §7).
    TailProbe,
}

encoding::variants!(SendTimer {
    0 => Retransmit,
    1 => Persist,
    2 => Reorder,
    3 => TailProbe,
});

#[derive(Clone, Debug)]
pub(crate) struct Timers {
    pub(crate) send: Instant,
    pub(crate) send_kind: SendTimer,
    pub(crate) acknowledge: Instant,
    /// When the next paced segment may leave.
    pub(crate) pace: Instant,
}

encoding::fields!(Timers {
    send,
    send_kind,
    acknowledge,
    pace
});

impl Timers {
    pub(crate) fn new() -> Timers {
        Timers {
            send: Instant::FAR_FUTURE,
            send_kind: SendTimer::Retransmit,
            acknowledge: Instant::FAR_FUTURE,
            pace: Instant::FAR_FUTURE,
        }
    }

    pub(crate) fn set_send(&mut self, kind: SendTimer, at: Instant) {
        self.send_kind = kind;
        self.send = at;
    }

    pub(crate) fn clear_send(&mut self) {
        self.send = Instant::FAR_FUTURE;
    }

    /// Whether the sending side's timer runs as `kind`.
    pub(crate) fn runs(&self, kind: SendTimer) -> bool {
        self.send != Instant::FAR_FUTURE && self.send_kind == kind
    }

    pub(crate) fn running(&self) -> Option<SendTimer> {
        (self.send != Instant::FAR_FUTURE).then_some(self.send_kind)
    }

    pub(crate) fn earliest(&self) -> Instant {
        self.send.min(self.acknowledge).min(self.pace)
    }

    pub(crate) fn stop(&mut self) {
        *self = Timers::new();
    }
}
