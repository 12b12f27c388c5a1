//! One end of a local session. The end keeps its own progress in private memory and publishes it;
//! the peer's claims are read once, checked, and only then used.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::Duration;

use portolan_proto::local::{End, Side, flags, holder, wants};
use portolan_sys::shm::Rings;
use portolan_sys::word::{self, Scope};
use portolan_tcp::{Error, Events, Options};
use portolan_types::Instant;

mod shown;
mod stream;
mod wake;

pub use shown::Direction;
pub use wake::{Wake, WakeBy, WakeRequest};

use crate::stream::Stream;
#[cfg(test)]
use crate::tests::pause;
use crate::wake_word;

/// A point where the peer may interleave; tests pause here.
#[cfg(not(test))]
fn pause() {}

/// Size of a segment on Linux's loopback device.
const SEGMENT: u32 = 65_483;

/// How long Linux holds back data short of a segment: until its timer for a closed window.
const HOLDS_BACK: Duration = Duration::from_millis(200);

/// Minimum capacity, however small the buffers.
const LEAST_ROOM: u64 = 4096;

/// Default buffer sizes: what Linux's send buffer grows to over loopback if the peer does not read
/// (the last value of `tcp_wmem`), and the initial size of its receive buffer.
const SEND_BUFFER: u64 = 4 << 20;
const RECEIVE_BUFFER: u64 = 128 << 10;

/// How far a writer may be ahead of an active reader, so that the data stays in a processor's cache.
#[cfg(not(test))]
const CYCLE: u64 = 2 << 20;
#[cfg(test)]
pub(crate) const CYCLE: u64 = 4 << 10;

/// How long Linux stays in FIN-WAIT-2 without a user (`tcp_fin_timeout`), and the maximum that a program may choose.
const FIN_WAIT: Duration = Duration::from_secs(60);
const FIN_WAIT_MOST: Duration = Duration::from_secs(120);

/// Bytes sent and taken, published or as seen. Bytes that the peer holds back are not visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    sent: u64,
    shown: u64,
    taken: u64,
    flags: u32,
}

/// The last urgent byte of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    at: u64,
    /// The program has received the byte out of band.
    taken: bool,
}

/// For a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    New,
    More,
}

/// In which state a TCP connection would be left by an end that was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    Nothing,
    /// FIN-WAIT-2, for this time.
    FinWait(Duration),
    TimeWait,
}

/// One end, and its knowledge of the other.
#[derive(Debug)]
pub struct Local {
    rings: Arc<Rings>,
    side: Side,
    own: Progress,
    published: Progress,
    /// The position at the start of the ring.
    base: u64,
    /// Number of bytes after which the ring wraps.
    cycle: u64,
    urgent_out: u64,
    peer: Progress,
    peer_base: u64,
    peer_cycle: u64,
    peer_urgent: u64,
    mark: Option<Mark>,
    error: Option<Error>,
    has_failed: bool,
    receive_shut: bool,
    /// A writer found no room.
    is_blocked: bool,
    /// The receive buffer has grown, and with it the peer's room.
    has_grown: bool,
    /// Events caused by calls of this end.
    events: Events,
    /// When what the last look has found arose.
    news_at: Instant,
    send_limit: u64,
    options: Options,
    /// Nothing is held back, whatever the options say.
    is_pushed: bool,
    /// Since when data has been held back.
    held_since: Instant,
    last_in: Instant,
    last_out: Instant,
    /// The program replies to received data before an acknowledgement by itself would be due: shown as Linux's
    /// `TCP_QUICKACK`.
    is_answering: bool,
    writes: u64,
    reads: u64,
}

/// No stream gets this far. An end whose words a peer has set beyond it is reset, so that sums of positions cannot
/// overflow.
const POSITION_MAX: u64 = 1 << 62;

impl Local {
    /// Opens an end as its last holder left it, or a new one.
    pub fn new(rings: Arc<Rings>, side: Side) -> Local {
        let own = rings.ends().of(side);
        let kept = &own.kept.0;
        let mut progress = Progress {
            sent: own.sent.0.bytes.load(Acquire),
            shown: own.sent.0.shown.load(Acquire),
            taken: own.taken.0.bytes.load(Acquire),
            flags: own.sent.0.flags.load(Acquire),
        };
        let is_possible = progress.sent.max(progress.taken) <= POSITION_MAX;
        if !is_possible {
            progress = Progress {
                flags: progress.flags | flags::RESET,
                ..Progress::default()
            };
        }
        let mut end = Local {
            own: progress,
            published: progress,
            base: own.sent.0.base.load(Acquire),
            cycle: checked_cycle(&rings, own.sent.0.cycle.load(Acquire)),
            urgent_out: own.sent.0.urgent.load(Acquire),
            peer: Progress {
                sent: progress.taken,
                shown: progress.taken,
                ..Progress::default()
            },
            peer_base: 0,
            peer_cycle: rings.size() as u64,
            peer_urgent: 0,
            mark: None,
            error: None,
            has_failed: false,
            receive_shut: kept.receive_shut.load(Relaxed) != 0,
            is_blocked: false,
            has_grown: false,
            events: Events::NONE,
            news_at: Instant::ZERO,
            send_limit: u64::from(kept.send_limit.load(Relaxed)),
            options: Options::default(),
            is_pushed: false,
            held_since: Instant::ZERO,
            last_in: Instant::ZERO,
            last_out: Instant::ZERO,
            is_answering: false,
            writes: 0,
            reads: 0,
            side,
            rings,
        };
        if !is_possible {
            end.events = end.fail(Error::Aborted);
            return end;
        }
        let taken_urgent = end.mine().kept.0.urgent_taken.load(Relaxed);
        let told = end.mine().kept.0.error_told.load(Relaxed) != 0;
        end.look(Instant::ZERO);
        if let Some(mark) = &mut end.mark {
            mark.taken = taken_urgent == mark.at + 1;
        }
        if told {
            end.error = None;
        }
        end
    }

    /// Queues data like `send`, to go with the opening (RFC 7413).
    pub fn open_with(&mut self, now: Instant, text: &[u8]) -> usize {
        self.mine().kept.0.early.store(1, Relaxed);
        self.send(now, text)
    }

    /// Called when a holder takes the end over: times count from then on.
    pub fn begin(&mut self, now: Instant) {
        self.last_in = self.last_in.max(now);
        self.last_out = self.last_out.max(now);
    }

    pub fn side(&self) -> Side {
        self.side
    }

    fn mine(&self) -> &End {
        self.rings.ends().of(self.side)
    }

    fn theirs(&self) -> &End {
        self.rings.ends().of(self.side.other())
    }

    // ---- the peer's progress ----

    /// Would a check find nothing? The cheapest test, for callers that poll continuously.
    pub fn is_still(&self) -> bool {
        let theirs = self.theirs();
        theirs.sent.0.shown.load(Relaxed) == self.peer.sent
            && theirs.sent.0.flags.load(Relaxed) == self.peer.flags
    }

    /// Reads the peer's progress since the last check. Returns the resulting events.
    pub fn look(&mut self, now: Instant) -> Events {
        self.news_at = now;
        let mut events = std::mem::take(&mut self.events);
        let theirs = self.rings.ends().of(self.side.other());
        // The end of the stream is published after its last byte. Read in the opposite order, the
        // bytes are visible when the end is.
        let flags = theirs.sent.0.flags.load(Acquire);
        let shown = theirs.sent.0.shown.load(Acquire);
        let seen = Progress {
            sent: shown,
            shown,
            taken: theirs.taken.0.bytes.load(Acquire),
            flags,
        };
        if self.has_failed {
            return events;
        }
        if seen == self.peer {
            // The peer's buffer may have grown.
            return events | self.look_for_room();
        }
        // They were written before `sent`.
        let base = theirs.sent.0.base.load(Relaxed);
        let cycle = theirs.sent.0.cycle.load(Relaxed);
        let urgent = theirs.sent.0.urgent.load(Relaxed);
        let shown_at = [&theirs.sent.0.first_at, &theirs.sent.0.last_at];
        let shown_at = shown_at.map(|at| Instant::from_nanos(at.load(Relaxed)));
        if !self.is_possible(&seen) {
            self.own.flags |= flags::RESET;
            return events | self.fail(Error::Aborted);
        }
        let before = std::mem::replace(&mut self.peer, seen);
        self.peer_base = base;
        self.peer_cycle = checked_cycle(&self.rings, cycle);
        if (seen.sent, seen.flags) != (before.sent, before.flags) {
            self.note_news(shown_at);
        }
        if seen.sent != before.sent {
            events = events | Events::READABLE;
            self.last_in = now;
            self.reads += 1;
        }
        events = events | self.look_at_mark(urgent);
        events | self.look_for_room() | self.look_at_flags(before.flags)
    }

    /// The peer has ended, as the server says. Whoever shares the memory can write the peer's flags back: if they do not show
    /// the end, this end is reset.
    pub fn note_peer_end(&mut self, now: Instant) -> Events {
        const ENDED: u32 = flags::FIN | flags::CLOSED;
        let events = self.look(now);
        if self.is_closed() || self.peer.flags & ENDED == ENDED {
            return events;
        }
        self.own.flags |= flags::RESET;
        events | self.fail(self.reset_error())
    }

    fn look_for_room(&mut self) -> Events {
        if !(self.is_blocked && self.is_unblocked()) {
            return Events::NONE;
        }
        self.is_blocked = false;
        let room_at = self.theirs().taken.0.room_at.load(Relaxed);
        self.news_at = self.news_at.min(Instant::from_nanos(room_at));
        Events::WRITABLE
    }

    /// What the peer showed for the first time since this end was empty may have been seen by a look before: then the last
    /// it has shown says more.
    fn note_news(&mut self, [first_at, last_at]: [Instant; 2]) {
        let arose = if first_at < self.last_in {
            last_at
        } else {
            first_at
        };
        self.news_at = self.news_at.min(arose);
    }

    /// When what the last look has found arose, as the peer says: a claim that is good for nothing but an order.
    pub fn news_at(&self) -> Instant {
        self.news_at
    }

    /// May an honest peer have come to that?
    fn is_possible(&self, seen: &Progress) -> bool {
        let size = self.rings.size() as u64;
        let (before, own) = (&self.peer, &self.own);
        seen.sent >= before.sent
            && seen.taken >= before.taken
            && seen
                .sent
                .checked_sub(own.taken)
                .is_some_and(|bytes| bytes <= size)
            && own
                .sent
                .checked_sub(seen.taken)
                .is_some_and(|bytes| bytes <= size)
            && before.flags & !seen.flags == 0
            && (before.flags & flags::FIN == 0 || seen.sent == before.sent)
    }

    fn look_at_flags(&mut self, before: u32) -> Events {
        let new = self.peer.flags & !before;
        let mut events = Events::NONE;
        if new & flags::FIN != 0 {
            events = events | Events::PEER_CLOSED;
            if self.is_closed() {
                events = events | Events::CLOSED;
            }
        }
        if new & flags::RESET != 0 && !self.is_closed() {
            events = events | self.fail(self.reset_error());
        }
        events
    }

    /// As in Linux's `tcp_reset`: after the peer's end the error is a broken pipe.
    fn reset_error(&self) -> Error {
        if self.peer.flags & flags::FIN != 0 {
            Error::BrokenPipe
        } else {
            Error::Reset
        }
    }

    /// Linux's `tcp_check_urg`.
    fn look_at_mark(&mut self, urgent: u64) -> Events {
        let had_urgent = self.has_urgent();
        let mut events = Events::NONE;
        if urgent != self.peer_urgent && urgent > self.own.taken {
            let at = urgent - 1;
            if self.mark.is_none_or(|mark| at > mark.at) {
                if self.is_at_mark() && !self.options.urgent_inline && self.queued() > 0 {
                    // The byte of the earlier mark is lost if it was not read.
                    self.own.taken += 1;
                }
                self.mark = Some(Mark { at, taken: false });
                events = Events::URGENT;
            }
        }
        self.peer_urgent = urgent;
        if self.has_urgent() && !had_urgent {
            events = events | Events::PRIORITY;
        }
        events
    }

    /// Was this end reset by its own side?
    pub fn has_reset(&self) -> bool {
        self.own.flags & flags::RESET != 0
    }

    /// Returns what is left of a connection whose end was closed, by the flags of both ends.
    pub fn remains(&self) -> Remains {
        let either = self.own.flags | self.peer.flags;
        let seconds = self.mine().kept.0.fin_wait.load(Relaxed);
        if either & flags::RESET != 0 || self.own.flags & flags::ACTIVE == 0 {
            Remains::Nothing
        } else if self.peer.flags & flags::FIN != 0 {
            Remains::TimeWait
        } else if seconds == 0 {
            Remains::FinWait(FIN_WAIT)
        } else {
            Remains::FinWait(Duration::from_secs(seconds.into()).min(FIN_WAIT_MOST))
        }
    }

    fn send_fin(&mut self) {
        if (self.own.flags | self.peer.flags) & flags::FIN == 0 {
            self.own.flags |= flags::ACTIVE;
        }
        self.own.flags |= flags::FIN;
    }

    fn fail(&mut self, error: Error) -> Events {
        self.error = Some(error);
        self.has_failed = true;
        Events::ERROR | Events::CLOSED
    }

    // ---- publishing ----

    /// Lets the peer see what this end has done, and wakes it, but for its notifier, if it sleeps and waits for it.
    pub fn publish(&mut self, now: Instant) -> Option<Wake> {
        self.own.shown = self.own.sent - self.held_back();
        let before = std::mem::replace(&mut self.published, self.own);
        let has_grown = std::mem::take(&mut self.has_grown);
        if before == self.own && !has_grown {
            return None;
        }
        let own = &self.own;
        let shows = own.shown != before.shown || own.flags != before.flags;
        let leaves_room = self.leaves_room(&before, has_grown);
        pause();
        let mine = self.mine();
        if shows {
            let at = now.as_nanos();
            if self.is_first_unseen(&before) {
                mine.sent.0.first_at.store(at, Relaxed);
            }
            mine.sent.0.last_at.store(at, Relaxed);
        }
        if leaves_room == Some(Room::New) {
            mine.taken.0.room_at.store(now.as_nanos(), Relaxed);
        }
        mine.sent.0.base.store(self.base, Relaxed);
        mine.sent.0.cycle.store(self.cycle, Relaxed);
        mine.sent.0.urgent.store(self.urgent_out, Relaxed);
        mine.sent.0.bytes.store(own.sent, Relaxed);
        mine.sent.0.shown.store(own.shown, Release);
        mine.taken.0.bytes.store(own.taken, Release);
        mine.sent.0.flags.store(own.flags, Release);
        pause();
        let mut due = 0;
        if shows {
            due |= wants::INPUT;
        }
        if own.flags != before.flags || leaves_room.is_some() {
            due |= wants::OUTPUT;
        }
        if due == 0 {
            return None;
        }
        self.wake(due)
    }

    /// Returns how many bytes must not be published yet: data short of a segment whose writer has more.
    fn held_back(&self) -> u64 {
        let is_corked = self.options.cork || self.options.more;
        if !is_corked || self.is_pushed || self.own.flags & flags::FIN != 0 {
            return 0;
        }
        self.own.sent.saturating_sub(self.own.shown) % u64::from(SEGMENT)
    }

    /// When to call [`Local::push`]; `None` if no bytes are held back.
    pub fn pushes_at(&self) -> Option<Instant> {
        (self.own.shown < self.own.sent && self.held_back() > 0)
            .then(|| self.held_since + HOLDS_BACK)
    }

    /// Has what this end has taken since `before`, or have its grown buffers, left a good deal free for the writer?
    fn leaves_room(&self, before: &Progress, has_grown: bool) -> Option<Room> {
        if self.own.taken == before.taken && !has_grown {
            return None;
        }
        let sender = u64::from(self.theirs().kept.0.send_limit.load(Relaxed));
        let limit = self.limit_of(sender, self.mine()).min(self.peer_cycle);
        let is_room = |taken| (self.peer.sent - taken) * 3 <= limit * 2;
        is_room(self.own.taken).then(|| {
            if has_grown || !is_room(before.taken) {
                Room::New
            } else {
                Room::More
            }
        })
    }

    /// Is what is shown now the first that the peer has not seen: has it read all, or slept, since what was shown `before`?
    fn is_first_unseen(&self, before: &Progress) -> bool {
        let theirs = self.theirs();
        before.shown == self.peer.taken
            || before.shown == theirs.taken.0.bytes.load(Relaxed)
            || theirs.notifier.0.wants.load(Relaxed) & wants::INPUT != 0
    }

    /// Clears the peer's request, and returns how to wake it.
    fn wake(&self, due: u32) -> Option<Wake> {
        let notifier = &self.theirs().notifier.0;
        let wished = wake_word::take(&notifier.wants, due)?;
        let number = notifier.number.load(Acquire);
        if number == holder::NONE {
            None
        } else if wished & wants::ON_WORD == 0 {
            Some(Wake::Notifier(number))
        } else {
            word::wake(&notifier.wants, Scope::Shared);
            Some(Wake::Word(number))
        }
    }

    /// Wakes the peer, whatever its word says, except by its notifier: for an end whose last holder
    /// may have written anything there.
    pub fn wake_peer(&self) {
        let wants = &self.theirs().notifier.0.wants;
        wants.store(0, SeqCst);
        word::wake(wants, Scope::Shared);
    }

    // ---- sleeping ----

    /// Requests a wake-up for what this end waits for. The caller must check once more, and may sleep if it finds
    /// nothing.
    pub fn arm(&self, by: WakeBy) {
        pause();
        let wants = &self.mine().notifier.0.wants;
        wake_word::ask(wants, self.wanted() | by.bits());
    }

    /// Returns the request made by [`Local::arm`], for a thread that sleeps on words.
    pub fn wake_request(&self) -> WakeRequest {
        WakeRequest {
            rings: Arc::clone(&self.rings),
            side: self.side,
            bits: self.wanted() | WakeBy::Word.bits(),
        }
    }

    /// Has the peer fulfilled a request, or was there none?
    pub fn was_rung(&self) -> bool {
        let wanted = self.wanted();
        self.mine().notifier.0.wants.load(Relaxed) & wanted != wanted
    }

    /// Sets the notifier that wakes this end's holder; called by the server, or by a holder whose server is another.
    pub fn give_to(&self, number: u64) {
        self.mine().notifier.0.number.store(number, Release);
    }

    /// Returns the number of the notifier that wakes the peer's holder.
    pub fn peer_notifier(&self) -> u64 {
        self.theirs().notifier.0.number.load(Acquire)
    }

    fn wanted(&self) -> u32 {
        if self.is_blocked {
            wants::INPUT | wants::OUTPUT
        } else {
            wants::INPUT
        }
    }

    // ---- bytes ----

    /// Bytes that were received and not taken yet.
    fn queued(&self) -> u64 {
        self.peer.sent - self.own.taken
    }

    /// Bytes that were sent and that the peer has not taken yet.
    fn unread(&self) -> u64 {
        self.own.sent - self.peer.taken
    }

    /// Maximum fill of a ring: the writer's buffer and the reader's.
    fn limit_of(&self, send_limit: u64, reader: &End) -> u64 {
        let size = self.rings.size() as u64;
        let send_limit = given(send_limit, SEND_BUFFER);
        let receive_limit = given(reader.kept.0.receive_limit.load(Relaxed), RECEIVE_BUFFER);
        (send_limit + receive_limit).clamp(LEAST_ROOM, size)
    }

    /// Maximum fill of the ring now.
    fn limit(&self) -> u64 {
        let limit = self.limit_of(self.send_limit, self.theirs());
        let limit = match self.options.unsent_low_water {
            Some(unsent) => limit.min(self.share(limit) + u64::from(unsent)),
            None => limit,
        };
        if self.may_grow() {
            limit
        } else {
            limit.min(self.cycle)
        }
    }

    /// Has the peer taken nothing since the ring was empty? Then all bytes are in their first cycle.
    fn may_grow(&self) -> bool {
        self.peer.taken <= self.base
    }

    /// The part of the ring that is the reader's buffer: bytes in it have arrived.
    fn share(&self, limit: u64) -> u64 {
        let receive_limit = self.theirs().kept.0.receive_limit.load(Relaxed);
        given(receive_limit, RECEIVE_BUFFER).min(limit)
    }

    /// Bytes that were sent and have not arrived: the reader's buffer is full.
    fn waiting(&self) -> u64 {
        let limit = self.limit_of(self.send_limit, self.theirs());
        self.unread().saturating_sub(self.share(limit))
    }

    fn room(&self) -> u64 {
        self.limit().saturating_sub(self.unread())
    }

    fn has_room(&self) -> bool {
        let limit = self.limit();
        limit.saturating_sub(self.unread()) * 3 >= limit
    }

    /// Is the writer's condition met: room, or after the end of the stream, that all bytes have arrived?
    fn is_unblocked(&self) -> bool {
        if self.own.flags & flags::FIN == 0 {
            self.has_room()
        } else {
            self.waiting() == 0
        }
    }

    fn may_send(&self) -> bool {
        self.own.flags & flags::FIN == 0 && !self.has_failed
    }

    /// Returns the bytes that a read may return: how many to skip before, and how many there are. A
    /// read ends at the mark, and includes the urgent byte only with `urgent_inline`.
    fn span(&self) -> (u64, u64) {
        let queued = self.queued();
        let Some(before) = self
            .mark
            .and_then(|mark| mark.at.checked_sub(self.own.taken))
        else {
            return (0, queued);
        };
        match before {
            0 if self.options.urgent_inline || queued == 0 => (0, queued),
            0 => (1, queued - 1),
            before => (0, queued.min(before)),
        }
    }

    fn copy_out(&self, position: u64, out: &mut [u8]) {
        let ring = (self.peer_base, self.peer_cycle);
        self.copy_from(self.side.other(), ring, position, out);
    }

    fn to_length(bytes: u64) -> usize {
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

/// Returns a chosen size, or the default.
fn given<T: Into<u64>>(chosen: T, default: u64) -> u64 {
    match chosen.into() {
        0 => default,
        chosen => chosen,
    }
}

/// Any value written there is interpreted as a valid cycle.
fn checked_cycle(rings: &Rings, claimed: u64) -> u64 {
    let size = rings.size() as u64;
    if claimed.is_power_of_two() && claimed <= size {
        claimed
    } else {
        size
    }
}
