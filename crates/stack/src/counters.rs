//! The counters of a holder of sessions: the fate of frames, and the events of all its connections,
//! including former ones. One table names both. A histogram of round-trip times follows them.

use core::time::Duration;

use portolan_proto::report::{COUNTER_SLOTS, HISTOGRAM_WORDS, Histogram};
use portolan_tcp::{EVENTS, EVENTS_MAX};

use crate::packet::Drop;
use crate::session::Session;

/// Name and meaning of the stack's own counters.
const FRAMES: &[(&str, &str)] = &[
    ("delivered", "frames that went to their session"),
    (
        "unclaimed",
        "frames whose session is not here, or not the one that was meant",
    ),
    (
        "drop_malformed",
        "frames dropped: a header is cut short or contradicts itself",
    ),
    ("drop_checksum", "frames dropped: a checksum is wrong"),
    (
        "drop_unsupported",
        "frames dropped: a protocol without sessions",
    ),
    (
        "drop_foreign_peer",
        "packets dropped: for a connection or a connected socket, from somebody else",
    ),
    (
        "drop_receive_buffer",
        "datagrams dropped: nobody read fast enough",
    ),
    (
        "drop_fragments_overlap",
        "fragments dropped: they contradict others of their datagram",
    ),
    (
        "drop_fragments_crowded",
        "fragments dropped: too many datagrams are unfinished",
    ),
    (
        "drop_not_member",
        "datagrams dropped: to a group that the socket does not hear",
    ),
    (
        "held",
        "frames that came before their session, and waited for it",
    ),
    (
        "drop_early",
        "frames dropped: too many wait for sessions on their way",
    ),
    (
        "drop_min_ttl",
        "segments dropped: from farther away than the socket allows",
    ),
    (
        "delegated_handshakes",
        "SYNs to a delegated listener that were answered and remembered",
    ),
    (
        "syn_cookies_sent",
        "SYNs to a delegated listener that were answered by a cookie",
    ),
    (
        "syn_cookies_accepted",
        "connections that such a cookie opened",
    ),
    (
        "syn_cookies_refused",
        "acknowledgements to a delegated listener, while cookies are about, without a good one",
    ),
    (
        "syns_dropped_queue_full",
        "SYNs dropped: the accept queue of a delegated listener is full",
    ),
    (
        "accept_queue_overflows",
        "acknowledgements of SYN+ACKs dropped: the accept queue of a delegated listener is full",
    ),
    (
        "headers_expected",
        "TCP segments on the fast path: their headers were what one masked compare expected",
    ),
    (
        "headers_taken_apart",
        "TCP segments, and ICMP errors about connections, on the standard path",
    ),
    (
        "datagrams_expected",
        "datagrams to connected sockets on the fast path: their headers were what one masked compare expected",
    ),
    (
        "datagrams_taken_apart",
        "datagrams to connected sockets, and ICMP errors about them, on the standard path",
    ),
    (
        "resets_withheld",
        "segments to a delegated listener that no connection has, beyond the limit of resets",
    ),
    (
        "spun_us",
        "microseconds that waiting threads have looked for frames rather than slept",
    ),
];

/// The counter for the time that a holder's threads have spun, which the stack does not know.
pub const SPUN_US: usize = FRAMES.len() - 1;

/// Counters with a name.
const NAMED: usize = FRAMES.len() + EVENTS.len();

/// Number of counters of a holder, with those of its histogram.
pub const COUNTERS: usize = NAMED + HISTOGRAM_WORDS;

const _: () = assert!(COUNTERS <= COUNTER_SLOTS);

/// The histogram of round-trip times among a holder's counters, or among sums of them.
pub fn round_trip_times(counters: &[u64; COUNTERS]) -> Histogram {
    let words = counters[NAMED..].first_chunk();
    words.map_or_else(Histogram::default, Histogram::from_words)
}

/// The group, name and meaning of a holder's counters, in order. Those of the histogram have none.
pub fn counter_names() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let frames = FRAMES
        .iter()
        .map(|&(name, meaning)| ("stack", name, meaning));
    let events = EVENTS.iter().map(|&(name, meaning)| ("tcp", name, meaning));
    frames.chain(events)
}

/// The fate of a frame, or of a datagram being sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    Delivered,
    Held,
    Unclaimed,
    Dropped(Drop),
    Handshake,
    CookieSent,
    CookieTaken,
    CookieRefused,
    SynDropped,
    AcceptOverflow,
    Expected,
    TakenApart,
    DatagramExpected,
    DatagramTakenApart,
    ResetWithheld,
}

impl Fate {
    const fn index(self) -> usize {
        match self {
            Fate::Delivered => 0,
            Fate::Unclaimed => 1,
            Fate::Dropped(Drop::Malformed) => 2,
            Fate::Dropped(Drop::BadChecksum) => 3,
            Fate::Dropped(Drop::Unsupported) => 4,
            Fate::Dropped(Drop::ForeignPeer) => 5,
            Fate::Dropped(Drop::ReceiveBufferFull) => 6,
            Fate::Dropped(Drop::FragmentsOverlap) => 7,
            Fate::Dropped(Drop::FragmentsCrowdedOut) => 8,
            Fate::Dropped(Drop::NotMember) => 9,
            Fate::Held => 10,
            Fate::Dropped(Drop::TooEarly) => 11,
            Fate::Dropped(Drop::TooFar) => 12,
            Fate::Handshake => 13,
            Fate::CookieSent => 14,
            Fate::CookieTaken => 15,
            Fate::CookieRefused => 16,
            Fate::SynDropped => 17,
            Fate::AcceptOverflow => 18,
            Fate::Expected => 19,
            Fate::TakenApart => 20,
            Fate::DatagramExpected => 21,
            Fate::DatagramTakenApart => 22,
            Fate::ResetWithheld => 23,
        }
    }
}

/// Counts of one holder.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    frames: [u64; FRAMES.len()],
    /// Event counts of connections that left, less the counts they had when they arrived.
    gone: [u64; EVENTS_MAX],
    /// Smoothed round-trip times, see [`Counters::observe`].
    round_trips: Histogram,
}

impl Counters {
    pub(crate) fn count(&mut self, fate: Fate) {
        self.frames[fate.index()] += 1;
    }

    pub(crate) fn came(&mut self, session: &Session) {
        self.move_events(session, u64::wrapping_sub);
    }

    pub(crate) fn went(&mut self, session: &Session) {
        self.move_events(session, u64::wrapping_add);
    }

    fn move_events(&mut self, session: &Session, combine: fn(u64, u64) -> u64) {
        if let Session::Tcp(session) = session {
            for (sum, count) in self.gone.iter_mut().zip(session.connection.counts()) {
                *sum = combine(*sum, u64::from(*count));
            }
        }
    }

    /// Counts a connection's round-trip time, if it has changed since it was last counted.
    pub(crate) fn observe(&mut self, session: &Session, counted: &mut Option<Duration>) {
        let time = smoothed_rtt(session);
        if let Some(time) = time.filter(|_| time != *counted) {
            self.round_trips.observe(time);
        }
        *counted = time;
    }

    /// All counters, in the order of [`counter_names`].
    pub(crate) fn read<'a>(&self, sessions: impl Iterator<Item = &'a Session>) -> [u64; COUNTERS] {
        let mut events = self.gone;
        for session in sessions {
            if let Session::Tcp(session) = session {
                for (sum, count) in events.iter_mut().zip(session.connection.counts()) {
                    *sum = sum.wrapping_add(u64::from(*count));
                }
            }
        }
        let mut values = [0; COUNTERS];
        values[..FRAMES.len()].copy_from_slice(&self.frames);
        values[FRAMES.len()..NAMED].copy_from_slice(&events[..EVENTS.len()]);
        values[NAMED..].copy_from_slice(&self.round_trips.words());
        values
    }
}

/// None for a session without round trips.
pub(crate) fn smoothed_rtt(session: &Session) -> Option<Duration> {
    match session {
        Session::Tcp(session) => session.connection.smoothed_rtt(),
        Session::Udp(_) => None,
    }
}
