//! Passive opens (RFC 9293 §3.10.7.2): what is made of the segments to a listener that belong to no connection, and
//! where its connections wait until somebody accepts them. The server does this for its listeners, and a library for
//! those that are delegated to it (ADR 15). Both own the connections, and do what a [`Step`] says.

mod accept_queue;
mod cookies;
mod fast_open;
mod parameters;
mod rules;

use core::hash::Hash;

use portolan_proto::control::HandshakeOptions;
use portolan_proto::report::CookieCounts;
use portolan_tcp::isn::{Secret, initial_sequence};
use portolan_tcp::{Config, Connection, StateName, cookie, reset_for};
use portolan_types::{FlowKey, Instant, SeqNum};
use portolan_wire::tcp::TcpHeader;

use crate::flood_detector::FloodDetector;
use crate::packet::{Packet, Transport};

pub use accept_queue::{AcceptQueue, Queueing, SOMAXCONN, SynVerdict};
pub use cookies::{COOKIE_LIFETIME, CookieClock, clamp_for_cookie};
use cookies::{Request, open_by_cookie};
pub use fast_open::{FastOpenOutcome, FastOpenUse};
pub use parameters::{flood, path_config, tune_config, tune_connection};
pub use rules::{CookieUse, OpenRules, Rules};

/// A segment to a listener that belongs to no connection.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    pub flow: FlowKey,
    pub hop_limit: u8,
    pub header: &'a TcpHeader,
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// None if the packet has none.
    pub fn of(packet: &'a Packet<'a>) -> Option<Segment<'a>> {
        let Transport::Tcp {
            header, payload, ..
        } = &packet.transport
        else {
            return None;
        };
        Some(Segment {
            flow: packet.flow()?,
            hop_limit: packet.ttl,
            header,
            payload,
        })
    }
}

/// What holds at the host when a segment comes, whichever listener it is for.
pub struct Terms<'a, Id> {
    pub cookies: CookieUse,
    pub fast_open: FastOpenUse,
    pub syn_ack_retries: u8,
    /// Of the port's SYN cookies, initial numbers and time stamps: the same for whoever performs the handshakes.
    pub secret: &'a Secret,
    /// Of the host's cookies of Fast Open.
    pub fast_open_secret: &'a Secret,
    pub clock: CookieClock,
    /// Parameters of a connection over the path to its peer; none without one.
    pub config: &'a dyn Fn(&FlowKey) -> Option<Config>,
    /// Is that connection's handshake undone?
    pub is_unfinished: &'a dyn Fn(Id) -> bool,
}

/// What a segment to a listener leads to.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart where it is made"
)]
pub enum Step {
    Ignore(Unanswered),
    /// The SYN is answered by a cookie, and nothing is kept.
    Cookie(TcpHeader),
    Open(Connection, Origin),
    /// The segment acknowledges what nobody sent; while cookies are about, it may be a guess at one.
    Refuse {
        reset: Option<TcpHeader>,
        is_forgery: bool,
    },
}

/// Why nothing is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    Noise,
    /// It comes from farther than `IP_MINTTL` allows.
    TooFar,
    SynDropped,
    /// It returns a cookie. The peer may try again: Linux drops it, too.
    AcceptQueueFull,
    NoRoute,
}

/// What has opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Syn(FastOpenOutcome),
    /// Its handshake is done.
    Cookie,
}

/// How far the handshake of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake {
    Undone,
    Done,
    /// Done, and there is something to read.
    Readable,
}

/// The passive opens of one listener; `Id` is what its owner knows connections by.
#[derive(Debug)]
pub struct PassiveOpen<Id> {
    pub options: HandshakeOptions,
    pub queue: AcceptQueue<Id>,
    /// Connections whose text was taken before their handshake was done.
    pub fast: Vec<Id>,
    /// Of the SYNs that were not kept.
    pub flood_detector: FloodDetector,
    pub cookies: CookieCounts,
}

impl<Id: Copy + Eq + Hash> PassiveOpen<Id> {
    pub fn new(options: HandshakeOptions, backlog: u32) -> PassiveOpen<Id> {
        PassiveOpen {
            options,
            queue: AcceptQueue::new(backlog),
            fast: Vec::new(),
            flood_detector: FloodDetector::default(),
            cookies: CookieCounts::default(),
        }
    }

    pub fn on_segment(&self, now: Instant, segment: &Segment<'_>, terms: &Terms<'_, Id>) -> Step {
        if segment.hop_limit < self.options.ip.min_ttl {
            return Step::Ignore(Unanswered::TooFar);
        }
        match terms
            .clock
            .judge(now, &segment.flow, segment.header, terms.secret)
        {
            Request::Noise => Step::Ignore(Unanswered::Noise),
            Request::Syn => {
                let isn = initial_sequence(terms.secret, &segment.flow, now);
                self.on_syn(now, segment, isn, terms)
            }
            Request::Cookie(_) if self.queue.is_full() => Step::Ignore(Unanswered::AcceptQueueFull),
            Request::Cookie(decoded) => match self.config(segment, terms) {
                Some(config) => {
                    let config = clamp_for_cookie(config, &self.options);
                    let connection = open_by_cookie(&config, &decoded, segment, now);
                    Step::Open(connection, Origin::Cookie)
                }
                None => Step::Ignore(Unanswered::NoRoute),
            },
            Request::Stray { is_forgery } => Step::Refuse {
                reset: reset_for(segment.header, segment.payload.len()),
                is_forgery,
            },
        }
    }

    /// A SYN; a connection that it opens begins with `isn`.
    pub fn on_syn(
        &self,
        now: Instant,
        syn: &Segment<'_>,
        isn: SeqNum,
        terms: &Terms<'_, Id>,
    ) -> Step {
        let verdict = self.queue.on_syn(terms.cookies);
        if verdict == SynVerdict::Drop {
            return Step::Ignore(Unanswered::SynDropped);
        }
        let Some(config) = self.config(syn, terms) else {
            return Step::Ignore(Unanswered::NoRoute);
        };
        if verdict == SynVerdict::Cookie {
            let config = clamp_for_cookie(config, &self.options);
            let answer = cookie::syn_ack(terms.secret, &syn.flow, syn.header, &config, now);
            return Step::Cookie(answer);
        }
        let mut connection = Connection::accept(&config, syn.header, isn, now);
        tune_connection(&mut connection, &self.options, terms.syn_ack_retries);
        let fast_open = self.accept_fast(now, syn, terms, &mut connection);
        Step::Open(connection, Origin::Syn(fast_open))
    }

    fn config(&self, segment: &Segment<'_>, terms: &Terms<'_, Id>) -> Option<Config> {
        let mut config = (terms.config)(&segment.flow)?;
        tune_config(&mut config, &self.options);
        Some(config)
    }
}

impl Handshake {
    /// After a segment: the next one has to know how full the queue is.
    pub fn of(connection: &Connection) -> Handshake {
        match connection.state() {
            StateName::SynReceived | StateName::Closed => Handshake::Undone,
            _ if connection.readable() > 0 || connection.is_receive_shut() => Handshake::Readable,
            _ => Handshake::Done,
        }
    }
}

#[cfg(test)]
mod tests;
