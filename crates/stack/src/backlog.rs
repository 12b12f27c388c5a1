//! The accept and SYN queues of one listener, as counters: what to do with a SYN or a completed
//! handshake. The sessions themselves are elsewhere.

use portolan_proto::control::AcceptQueue;
use serde::{Deserialize, Serialize};

/// Linux's default `net.core.somaxconn`.
pub const SOMAXCONN: u32 = 4096;

/// What to do with a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynVerdict {
    /// Keep state for it and answer.
    Open,
    /// Answer with a cookie and keep no state.
    Cookie,
    /// The accept queue is full; the peer will retry.
    Drop,
}

/// When SYNs are answered with cookies; Linux's `tcp_syncookies`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CookieUse {
    /// A SYN is dropped if the SYN queue is full.
    Never,
    #[default]
    WhenFull,
    Always,
}

/// Counters of one listener. `handshakes` are answered SYNs, `waiting` are established sessions that
/// are not accepted yet.
#[derive(Clone, Copy, Debug)]
pub struct Backlog {
    limit: u32,
    handshakes: u32,
    waiting: u32,
}

impl Backlog {
    /// `requested` is the argument of `listen`; negative values arrive as large ones, as in Linux.
    pub fn new(requested: u32) -> Backlog {
        Backlog {
            limit: requested.min(SOMAXCONN),
            handshakes: 0,
            waiting: 0,
        }
    }

    pub fn resize(&mut self, requested: u32) {
        self.limit = requested.min(SOMAXCONN);
    }

    /// `tcp_conn_request`: a full accept queue drops the SYN, a full SYN queue causes a cookie.
    pub fn on_syn(&self, cookies: CookieUse) -> SynVerdict {
        let is_crowded = self.has_crowd();
        match cookies {
            _ if self.is_full() => SynVerdict::Drop,
            CookieUse::Always => SynVerdict::Cookie,
            CookieUse::WhenFull if is_crowded => SynVerdict::Cookie,
            CookieUse::Never if is_crowded => SynVerdict::Drop,
            CookieUse::WhenFull | CookieUse::Never => SynVerdict::Open,
        }
    }

    /// `inet_csk_reqsk_queue_is_full`: whether the SYN queue is full.
    pub fn has_crowd(&self) -> bool {
        self.handshakes >= self.limit.max(1)
    }

    /// `sk_acceptq_is_full`: the queue may hold one more than the backlog.
    pub fn is_full(&self) -> bool {
        self.waiting > self.limit
    }

    pub fn accept_queue(&self) -> AcceptQueue {
        match self.is_full() {
            true => AcceptQueue::Full,
            false => AcceptQueue::HasRoom,
        }
    }

    pub fn handshake_started(&mut self) {
        self.handshakes += 1;
    }

    /// A handshake failed, or completed, followed by [`Backlog::queued`].
    pub fn handshake_ended(&mut self) {
        self.handshakes = self.handshakes.saturating_sub(1);
    }

    pub fn queued(&mut self) {
        self.waiting += 1;
    }

    pub fn accepted(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_syn_queue_answers_with_cookies() {
        let mut backlog = Backlog::new(2);
        backlog.handshake_started();
        assert_eq!(backlog.on_syn(CookieUse::WhenFull), SynVerdict::Open);
        backlog.handshake_started();
        assert_eq!(backlog.on_syn(CookieUse::WhenFull), SynVerdict::Cookie);
        backlog.handshake_ended();
        assert_eq!(backlog.on_syn(CookieUse::WhenFull), SynVerdict::Open);
    }

    #[test]
    fn cookies_may_be_for_always_or_for_never() {
        let mut backlog = Backlog::new(1);
        assert_eq!(backlog.on_syn(CookieUse::Always), SynVerdict::Cookie);
        assert_eq!(backlog.on_syn(CookieUse::Never), SynVerdict::Open);
        backlog.handshake_started();
        assert_eq!(backlog.on_syn(CookieUse::Never), SynVerdict::Drop);
    }

    #[test]
    fn one_more_than_the_backlog_may_wait_and_then_syns_are_dropped() {
        let mut backlog = Backlog::new(1);
        backlog.queued();
        assert!(!backlog.is_full());
        backlog.queued();
        assert!(backlog.is_full());
        assert_eq!(backlog.on_syn(CookieUse::WhenFull), SynVerdict::Drop);
        backlog.accepted();
        assert_eq!(backlog.on_syn(CookieUse::WhenFull), SynVerdict::Open);
    }

    #[test]
    fn a_backlog_of_zero_still_opens_one() {
        assert_eq!(
            Backlog::new(0).on_syn(CookieUse::WhenFull),
            SynVerdict::Open
        );
    }

    #[test]
    fn the_backlog_is_capped() {
        assert_eq!(Backlog::new(u32::MAX).limit(), SOMAXCONN);
    }
}
