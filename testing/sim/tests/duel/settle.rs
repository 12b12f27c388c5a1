//! The end of a program: without disturbances, the users read everything, and then both close. Whatever
//! happened before, the ends become idle in bounded time.

use core::time::Duration;
use std::collections::VecDeque;

use portolan_sim::{Packet, Side};
use portolan_tcp::{Connection, Error};
use portolan_types::Instant;

use crate::arena::Arena;

const DELAY: Duration = Duration::from_millis(5);
/// The longest pause of a live connection is a time-out of two minutes.
const TIMEOUT: Duration = Duration::from_secs(300);
/// More than R2, if all time-outs were of the maximum length.
const FOREVER: Duration = Duration::from_secs(4 * 3600);
/// More events than an undisturbed end of the longest program takes.
const EVENTS: usize = 200_000;
/// A connection does not give up by itself earlier than this.
const SHORT: Duration = Duration::from_secs(30);

type Wire = VecDeque<(Instant, Side, Packet)>;

impl Arena {
    pub(crate) fn settle(&mut self) {
        let short = self.now.since(portolan_sim::START) < SHORT;
        for side in [Side::A, Side::B] {
            self.calm_user(side);
        }
        let limit = if self.on_path { FOREVER } else { TIMEOUT };
        let mut wire = Wire::new();
        if !self.on_path {
            self.go_on(&mut wire, limit, Arena::is_delivered, "the streams");
            self.check_ends(short);
        }
        for side in [Side::A, Side::B] {
            self.shutdown_send(side);
        }
        if !self.on_path {
            self.go_on(&mut wire, limit, Arena::is_read_out, "the half-close");
        }
        for side in [Side::A, Side::B] {
            self.close(side);
        }
        self.go_on(&mut wire, FOREVER, Arena::is_over, "the end");
    }

    /// Resets the user's options that could delay the end.
    fn calm_user(&mut self, side: Side) {
        if let Some(connection) = &mut self.end(side).connection {
            let options = connection.options();
            options.cork = false;
            options.window_clamp = None;
            options.user_timeout = None;
            options.keepalive.enabled = false;
            connection.set_send_buffer(1 << 16);
            connection.set_receive_buffer(1 << 16);
        }
    }

    fn go_on(&mut self, wire: &mut Wire, limit: Duration, done: fn(&Arena) -> bool, what: &str) {
        let until = self.now + limit;
        for _ in 0..EVENTS {
            self.carry(wire);
            if done(self) {
                return;
            }
            let Some(next) = self.next(wire) else {
                panic!("{what}: nothing will ever happen: {self}");
            };
            self.now = self.now.max(next);
            assert!(self.now < until, "{what}: nothing in {limit:?}: {self}");
            self.run_timers();
            while wire.front().is_some_and(|(at, ..)| *at <= self.now) {
                if let Some((_, from, packet)) = wire.pop_front() {
                    self.deliver(from.other(), vec![packet]);
                }
            }
        }
        panic!("{what}: endless events: {self}");
    }

    fn carry(&mut self, wire: &mut Wire) {
        let arrival = self.now + DELAY;
        for side in [Side::A, Side::B] {
            self.read(side, 1 << 17);
        }
        self.flush_all();
        for side in [Side::A, Side::B] {
            for packet in self.end(side).flying.drain(..) {
                wire.push_back((arrival, side, packet));
            }
        }
    }

    fn next(&mut self, wire: &Wire) -> Option<Instant> {
        let arrival = wire.front().map(|(at, ..)| *at);
        [arrival, self.deadline(Side::A), self.deadline(Side::B)]
            .into_iter()
            .flatten()
            .min()
    }

    fn is_delivered(&self) -> bool {
        let ended = self.a.is_over() || self.b.is_over();
        let all = self.a.written == self.b.read && self.b.written == self.a.read;
        let opened = self.b.is_open();
        ended || self.cut_short || (all && opened)
    }

    /// Checks that no end has failed and no byte is missing, unless the program itself is the cause.
    fn check_ends(&self, short: bool) {
        if self.cut_short || self.impatient || !short {
            return;
        }
        for end in [&self.a, &self.b] {
            let error: Option<Error> = end.connection.as_ref().and_then(Connection::error);
            assert_eq!(error, None, "{self}");
        }
        assert_eq!(self.a.written, self.b.read, "{self}");
        assert_eq!(self.b.written, self.a.read, "{self}");
    }

    fn is_read_out(&self) -> bool {
        let finished = |connection: &Option<Connection>| {
            connection
                .as_ref()
                .is_none_or(Connection::is_receive_finished)
        };
        self.cut_short || (finished(&self.a.connection) && finished(&self.b.connection))
    }

    fn is_over(&self) -> bool {
        !self.a.is_open() && !self.b.is_open()
    }
}

impl core::fmt::Display for Arena {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for end in [&self.a, &self.b] {
            writeln!(
                f,
                "{:?}: wrote {}, read {}, {:#?}",
                end.side, end.written, end.read, end.connection
            )?;
        }
        write!(f, "at {:?}", self.now)
    }
}
