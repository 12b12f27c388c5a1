//! Timers of a connection: retransmission, probes, keep-alive, and states that expire.

use core::time::Duration;

use portolan_types::Instant;

use super::Connection;
use crate::error::Error;
use crate::event_counters::Event;
use crate::handshake::{SYN_ACK_RETRIES, SYN_RETRIES};
use crate::path_mtu::BLACK_HOLE_RETRIES;
use crate::state::State;
use crate::tcp_info::RunningTimer;
use crate::timers::SendTimer;

/// Linux's `tcp_retries2`, about 15 minutes, and its limit for an orphan.
const DATA_RETRIES: u32 = 15;
const ORPHAN_RETRIES: u32 = 8;
/// Lower bound, so that no capsule can make its holder probe without a pause.
const MIN_KEEPALIVE: Duration = Duration::from_millis(1);

impl Connection {
    /// When `on_timer` must be called next.
    pub fn deadline(&self) -> Option<Instant> {
        let at = self
            .timers
            .earliest()
            .min(self.state.ends_at())
            .min(self.keepalive_deadline());
        (at != Instant::FAR_FUTURE).then_some(at)
    }

    pub fn on_timer(&mut self, now: Instant) {
        if self.state.ends_at() <= now {
            return self.end();
        }
        if self.timers.acknowledge <= now {
            self.timers.acknowledge = Instant::FAR_FUTURE;
            self.receive.on_delay_expired(&self.send.rtt);
        }
        if self.timers.pace <= now {
            self.timers.pace = Instant::FAR_FUTURE;
        }
        if self.timers.send <= now {
            self.timers.clear_send();
            self.on_send_timer(now);
        }
        if self.keepalive_deadline() <= now {
            self.on_keepalive(now);
        }
    }

    fn on_send_timer(&mut self, now: Instant) {
        match (&mut self.state, self.timers.send_kind) {
            (State::SynSent(s), _) => {
                s.due = true;
                let limit = self.options.syn_retries.map_or(SYN_RETRIES, u32::from);
                self.retry_handshake(now, limit);
            }
            (State::SynReceived(s), _) => {
                s.due = true;
                let limit = self.options.syn_retries.map_or(SYN_ACK_RETRIES, u32::from);
                self.retry_handshake(now, limit);
            }
            (_, SendTimer::Retransmit) => self.on_retransmit_timeout(now),
            (_, SendTimer::Persist) => self.on_persist(now),
            (_, SendTimer::Reorder) => {
                let again = self.send.on_reordering_timeout(now);
                self.rearm(now, again);
            }
            (_, SendTimer::TailProbe) => self.on_tail_probe(now),
        }
    }

    fn retry_handshake(&mut self, now: Instant, limit: u32) {
        let timeout = self.options.user_timeout;
        let too_long = timeout.is_some_and(|t| now.since(self.send.stalled_since) >= t);
        if self.send.retries >= limit || too_long {
            return self.give_up();
        }
        self.event_counters.count(Event::HandshakeRetry);
        self.send.retries += 1;
        self.send.rtt.back_off();
    }

    /// RFC 9293 §3.8.3 [MUST-20]: R2 is reached.
    fn give_up(&mut self) {
        self.event_counters.count(Event::GaveUp);
        self.fail(self.soft_error.unwrap_or(Error::TimedOut));
    }

    fn is_hopeless(&self, now: Instant, tries: u32) -> bool {
        let limit = if self.orphan {
            ORPHAN_RETRIES
        } else {
            DATA_RETRIES
        };
        match self.options.user_timeout {
            Some(timeout) => now.since(self.send.stalled_since) >= timeout,
            None => tries >= limit,
        }
    }

    fn on_retransmit_timeout(&mut self, now: Instant) {
        if self.send.is_idle() {
            return;
        }
        if self.is_hopeless(now, self.send.retries) {
            return self.give_up();
        }
        self.event_counters.count(Event::Timeout);
        self.disable_handles();
        self.path.on_loss();
        if self.send.retries >= BLACK_HOLE_RETRIES {
            let mss = self.path.on_black_hole(self.send.mss, now);
            self.send.shrink_mss(mss);
        }
        self.send.on_retransmit_timeout(now);
    }

    /// RFC 9293 §3.8.6.1 [MUST-36]: probes the window, or sends a short segment that was held back.
    fn on_persist(&mut self, now: Instant) {
        if self.is_hopeless(now, self.send.probes) {
            return self.give_up();
        }
        self.event_counters.count(Event::WindowProbe);
        self.send.probes += 1;
        self.send.rtt.back_off();
        self.send.forced = true;
        self.probe = self.send.window == 0;
    }

    /// RFC 8985 §7.3: sends new data if there is any, else the last segment again.
    fn on_tail_probe(&mut self, now: Instant) {
        self.event_counters.count(Event::TailProbe);
        self.send.probe_tail();
        self.arm_retransmission(now);
    }

    /// The timer shown by `ss -o`, and when it expires.
    pub fn running_timer(&self) -> Option<(RunningTimer, Instant)> {
        let keepalive = self.keepalive_deadline();
        let timers = &self.timers;
        let (timer, due) = match timers.send_kind {
            _ if timers.send == Instant::FAR_FUTURE => match self.state.ends_at() {
                Instant::FAR_FUTURE => (RunningTimer::KeepAlive, keepalive),
                end => (RunningTimer::TimeWait, end),
            },
            SendTimer::Persist => (RunningTimer::Persist, timers.send),
            SendTimer::Retransmit | SendTimer::Reorder | SendTimer::TailProbe => {
                (RunningTimer::On, timers.send)
            }
        };
        (due != Instant::FAR_FUTURE).then_some((timer, due))
    }

    fn keepalive_deadline(&self) -> Instant {
        let keepalive = &self.options.keepalive;
        let is_alive = self.state.is_synchronized() && !matches!(self.state, State::TimeWait(_));
        if !keepalive.enabled || !is_alive || !self.send.is_idle() {
            return Instant::FAR_FUTURE;
        }
        match self.keepalives {
            0 => self.last_rx + keepalive.idle,
            // Counted from the probe itself, so that a late call does not send all probes at once.
            _ => self.probed + keepalive.interval.max(MIN_KEEPALIVE),
        }
    }

    /// RFC 9293 §3.8.4 [MAY-5, MUST-29].
    fn on_keepalive(&mut self, now: Instant) {
        // Linux's `tcp_keepalive_timer`: the user timeout, if set, replaces the count.
        let hopeless = match self.options.user_timeout {
            Some(timeout) => self.keepalives > 0 && now.since(self.last_rx) >= timeout,
            None => self.keepalives >= self.options.keepalive.count,
        };
        if hopeless {
            self.abort(now);
            return self.give_up();
        }
        self.keepalives += 1;
        self.event_counters.count(Event::KeepAlive);
        self.probed = now;
        self.probe = true;
    }
}
