//! Whether a connection that another process encoded can be trusted not to break this one.

use crate::buffer::LARGEST;
use crate::connection::Connection;
use crate::receive::MAX_SCALE;
use crate::send::Sender;
use crate::state::State;

/// What is wrong with a decoded connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Invalid {
    #[error("the sending half contradicts itself")]
    Send,
    #[error("the receiving half contradicts itself")]
    Receive,
    #[error("the state contradicts the halves")]
    State,
    #[error("an option is out of bounds")]
    Options,
}

impl Connection {
    /// Checks every invariant that the code relies on, and that sizes are bounded.
    pub fn validate(&self) -> Result<(), Invalid> {
        if !self.send.is_consistent() {
            return Err(Invalid::Send);
        }
        if !self.receive.is_consistent() {
            return Err(Invalid::Receive);
        }
        if !self.state_fits() {
            return Err(Invalid::State);
        }
        let options = &self.options;
        if options.receive_low_water > LARGEST || options.max_segment.is_some_and(|m| m == 0) {
            return Err(Invalid::Options);
        }
        Ok(())
    }

    fn state_fits(&self) -> bool {
        let unsynchronized = self.send.una == self.send.nxt && self.send.board.is_empty();
        match &self.state {
            State::SynSent(s) => unsynchronized && s.iss + 1 == self.send.una && !self.send.fin,
            State::SynReceived(s) => {
                unsynchronized && s.iss + 1 == self.send.una && s.irs + 1 == self.receive.nxt
            }
            State::Established(_) | State::CloseWait(_) => !self.send.fin,
            State::FinWait1(_) | State::Closing(_) | State::LastAck(_) => self.send.fin,
            State::FinWait2(_) | State::TimeWait(_) | State::Closed(_) => {
                !self.send.fin && unsynchronized && self.send.buffer.len() == 0
            }
        }
    }
}

impl Sender {
    fn is_consistent(&self) -> bool {
        let queued = self.buffer.len();
        let sent = self.nxt - self.una;
        self.buffer.span() == queued
            && queued <= LARGEST
            && sent as usize <= queued + usize::from(self.fin)
            && self.scale <= MAX_SCALE
            && self.window <= 0xffff << MAX_SCALE
            && (1..=0xffff << MAX_SCALE).contains(&self.max_window.max(1))
            && self.board.is_consistent(self.una, self.nxt)
            && self.rtt.is_consistent()
            && self.congestion.is_consistent()
            && self.bounds_hold()
    }
}
