//! The synchronized states and the steps between them (RFC 9293 §3.3.2). Each state is a type
//! whose methods are its legal steps, so an illegal one does not compile.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::handshake::{SynReceived, SynSent};

/// State of a connection, named as in RFC 9293; displayed as `ss` does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
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
        $(#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
        pub(crate) struct $name;)*
    };
}
states!(Established FinWait1 FinWait2 CloseWait Closing LastAck TimeWait Closed);

impl Established {
    fn close(self) -> FinWait1 {
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
        FinWait2
    }
}

impl FinWait2 {
    fn fin(self) -> TimeWait {
        TimeWait
    }
}

impl CloseWait {
    fn close(self) -> LastAck {
        LastAck
    }
}

impl Closing {
    fn acknowledged(self) -> TimeWait {
        TimeWait
    }
}

impl LastAck {
    fn acknowledged(self) -> Closed {
        Closed
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
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

    /// Our FIN is queued behind the data.
    pub(crate) fn close(&mut self) {
        *self = match core::mem::replace(self, State::Closed(Closed)) {
            State::Established(s) => State::FinWait1(s.close()),
            State::CloseWait(s) => State::LastAck(s.close()),
            other => other,
        }
    }

    /// The peer's FIN is the next byte and was consumed.
    pub(crate) fn fin(&mut self) {
        *self = match core::mem::replace(self, State::Closed(Closed)) {
            State::Established(s) => State::CloseWait(s.fin()),
            State::FinWait1(s) => State::Closing(s.fin()),
            State::FinWait2(s) => State::TimeWait(s.fin()),
            other => other,
        }
    }

    /// Our FIN is acknowledged.
    pub(crate) fn fin_acknowledged(&mut self) {
        *self = match core::mem::replace(self, State::Closed(Closed)) {
            State::FinWait1(s) => State::FinWait2(s.acknowledged()),
            State::Closing(s) => State::TimeWait(s.acknowledged()),
            State::LastAck(s) => State::Closed(s.acknowledged()),
            other => other,
        }
    }

    /// The handshake is done and both sequence spaces are known.
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(
            self,
            State::SynSent(_) | State::SynReceived(_) | State::Closed(_)
        )
    }

    /// The application may still queue data, now or once the handshake is done.
    pub(crate) fn may_send(&self) -> bool {
        matches!(
            self,
            State::SynSent(_) | State::SynReceived(_) | State::Established(_) | State::CloseWait(_)
        )
    }

    /// The peer may still send data.
    pub(crate) fn may_receive(&self) -> bool {
        matches!(
            self,
            State::Established(_) | State::FinWait1(_) | State::FinWait2(_)
        )
    }
}
