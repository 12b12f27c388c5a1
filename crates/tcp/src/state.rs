//! The synchronized states and the transitions between them (RFC 9293 §3.3.2). Each state is a type
//! whose methods are its legal transitions, so an illegal one does not compile.

use core::fmt;

use portolan_types::Instant;

use crate::encoding;
use crate::handshake::{SynReceived, SynSent};
use crate::time_wait::TimeWait;

/// State of a connection, named as in RFC 9293; displayed as by `ss`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StateName {
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
    Closed,
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StateName::SynSent => "SYN-SENT",
            StateName::SynReceived => "SYN-RECV",
            StateName::Established => "ESTAB",
            StateName::FinWait1 => "FIN-WAIT-1",
            StateName::FinWait2 => "FIN-WAIT-2",
            StateName::CloseWait => "CLOSE-WAIT",
            StateName::Closing => "CLOSING",
            StateName::LastAck => "LAST-ACK",
            StateName::TimeWait => "TIME-WAIT",
            StateName::Closed => "UNCONN",
        })
    }
}

macro_rules! states {
    ($($name:ident)*) => {
        $(#[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;

        encoding::fields!($name);)*
    };
}
states!(Established FinWait1 CloseWait Closing LastAck Closed);

#[derive(Clone, Copy, Debug)]
pub(crate) struct FinWait2 {
    /// When an orphan leaves the state without a FIN (Linux's `tcp_fin_time`). Otherwise in the far future.
    pub(crate) until: Instant,
}

encoding::fields!(FinWait2 { until });

impl Established {
    pub(crate) fn close(self) -> FinWait1 {
        FinWait1
    }
    fn fin(self) -> CloseWait {
        CloseWait
    }
}

impl FinWait1 {
    fn fin(self) -> Closing {
        Closing
    }
    fn acknowledged(self) -> FinWait2 {
        FinWait2 {
            until: Instant::FAR_FUTURE,
        }
    }
}

impl FinWait2 {
    fn fin(self, wait: TimeWait) -> TimeWait {
        wait
    }
}

impl CloseWait {
    fn close(self) -> LastAck {
        LastAck
    }
}

impl Closing {
    fn acknowledged(self, wait: TimeWait) -> TimeWait {
        wait
    }
}

impl LastAck {
    fn acknowledged(self) -> Closed {
        Closed
    }
}

/// A transition that the current state does not allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Illegal;

#[derive(Clone, Debug)]
pub(crate) enum State {
    SynSent(SynSent),
    SynReceived(SynReceived),
    Established(Established),
    FinWait1(FinWait1),
    FinWait2(FinWait2),
    CloseWait(CloseWait),
    Closing(Closing),
    LastAck(LastAck),
    TimeWait(TimeWait),
    Closed(Closed),
}

encoding::variants!(State {
    0 => SynSent(inner),
    1 => SynReceived(inner),
    2 => Established(inner),
    3 => FinWait1(inner),
    4 => FinWait2(inner),
    5 => CloseWait(inner),
    6 => Closing(inner),
    7 => LastAck(inner),
    8 => TimeWait(inner),
    9 => Closed(inner),
});

impl State {
    pub(crate) fn name(&self) -> StateName {
        match self {
            State::SynSent(_) => StateName::SynSent,
            State::SynReceived(_) => StateName::SynReceived,
            State::Established(_) => StateName::Established,
            State::FinWait1(_) => StateName::FinWait1,
            State::FinWait2(_) => StateName::FinWait2,
            State::CloseWait(_) => StateName::CloseWait,
            State::Closing(_) => StateName::Closing,
            State::LastAck(_) => StateName::LastAck,
            State::TimeWait(_) => StateName::TimeWait,
            State::Closed(_) => StateName::Closed,
        }
    }

    /// This side's FIN is queued behind the data.
    pub(crate) fn close(&mut self) -> Result<(), Illegal> {
        *self = match self {
            State::Established(s) => State::FinWait1(s.close()),
            State::CloseWait(s) => State::LastAck(s.close()),
            State::SynSent(_)
            | State::SynReceived(_)
            | State::FinWait1(_)
            | State::FinWait2(_)
            | State::Closing(_)
            | State::LastAck(_)
            | State::TimeWait(_)
            | State::Closed(_) => return Err(Illegal),
        };
        Ok(())
    }

    /// The peer's FIN was the next byte and is consumed; `wait` is the state kept if TIME-WAIT follows.
    pub(crate) fn fin(&mut self, wait: TimeWait) -> Result<(), Illegal> {
        *self = match self {
            State::Established(s) => State::CloseWait(s.fin()),
            State::FinWait1(s) => State::Closing(s.fin()),
            State::FinWait2(s) => State::TimeWait(s.fin(wait)),
            State::SynSent(_)
            | State::SynReceived(_)
            | State::CloseWait(_)
            | State::Closing(_)
            | State::LastAck(_)
            | State::TimeWait(_)
            | State::Closed(_) => return Err(Illegal),
        };
        Ok(())
    }

    /// This side's FIN is acknowledged; `wait` is the state kept if TIME-WAIT follows.
    pub(crate) fn fin_acknowledged(&mut self, wait: TimeWait) -> Result<(), Illegal> {
        *self = match self {
            State::FinWait1(s) => State::FinWait2(s.acknowledged()),
            State::Closing(s) => State::TimeWait(s.acknowledged(wait)),
            State::LastAck(s) => State::Closed(s.acknowledged()),
            State::SynSent(_)
            | State::SynReceived(_)
            | State::Established(_)
            | State::FinWait2(_)
            | State::CloseWait(_)
            | State::TimeWait(_)
            | State::Closed(_) => return Err(Illegal),
        };
        Ok(())
    }

    /// When the state ends by itself.
    pub(crate) fn ends_at(&self) -> Instant {
        match self {
            State::FinWait2(FinWait2 { until }) => *until,
            State::TimeWait(state) => state.until,
            _ => Instant::FAR_FUTURE,
        }
    }

    /// Whether the handshake is complete and both sequence spaces are known.
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(
            self,
            State::SynSent(_) | State::SynReceived(_) | State::Closed(_)
        )
    }

    /// Whether the application may still queue data, to be sent now or after the handshake.
    pub(crate) fn may_send(&self) -> bool {
        matches!(
            self,
            State::SynSent(_) | State::SynReceived(_) | State::Established(_) | State::CloseWait(_)
        )
    }

    /// Whether the peer may still send data.
    pub(crate) fn may_receive(&self) -> bool {
        matches!(
            self,
            State::Established(_) | State::FinWait1(_) | State::FinWait2(_)
        )
    }
}

#[cfg(test)]
mod tests {
    use portolan_types::SeqNum;

    use super::*;

    fn wait() -> TimeWait {
        TimeWait {
            until: Instant::from_millis(1),
            challenges: Default::default(),
            timestamps: None,
            seq: SeqNum(1),
            ack: SeqNum(2),
            max_window: 0,
            window: 0,
            scale: 0,
            due: false,
        }
    }

    fn synchronized() -> [State; 8] {
        [
            State::Established(Established),
            State::FinWait1(FinWait1),
            State::FinWait2(FinWait1.acknowledged()),
            State::CloseWait(CloseWait),
            State::Closing(Closing),
            State::LastAck(LastAck),
            State::TimeWait(wait()),
            State::Closed(Closed),
        ]
    }

    #[test]
    fn a_step_that_a_state_does_not_know_is_told_and_changes_nothing() {
        type Step = fn(&mut State, TimeWait) -> Result<(), Illegal>;
        let close: Step = |state, _| state.close();
        let steps: [(Step, [StateName; 3]); 3] = {
            use StateName::{CloseWait, Closing, Established, FinWait1, FinWait2, LastAck};
            [
                (close, [Established, CloseWait, CloseWait]),
                (State::fin, [Established, FinWait1, FinWait2]),
                (State::fin_acknowledged, [FinWait1, Closing, LastAck]),
            ]
        };
        for (step, legal) in steps {
            for mut state in synchronized() {
                let before = state.name();
                let is_legal = legal.contains(&before);
                assert_eq!(step(&mut state, wait()).is_ok(), is_legal, "{before}");
                assert_eq!(state.name() != before, is_legal, "{before}");
            }
        }
    }

    #[test]
    fn only_time_wait_and_an_orphans_fin_wait_2_end_by_themselves() {
        let ends: Vec<StateName> = synchronized()
            .iter()
            .filter(|state| state.ends_at() != Instant::FAR_FUTURE)
            .map(State::name)
            .collect();
        assert_eq!(ends, [StateName::TimeWait]);
        let orphan = FinWait2 {
            until: Instant::from_millis(7),
        };
        assert_eq!(State::FinWait2(orphan).ends_at(), Instant::from_millis(7));
    }
}
