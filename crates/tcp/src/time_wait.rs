//! TIME-WAIT (RFC 9293 §3.6.1, RFC 6191): the state kept of a connection while late segments may arrive. It is small,
//! since it lasts a minute and thousands may exist.

use core::time::Duration;

use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::{TcpFlags, TcpHeader, TcpOptions};

use crate::challenge::Challenges;
use crate::encoding;
use crate::event_counters::{Event, EventCounters};
use crate::listen::opens_connection;
use crate::receive::MAX_SCALE;
use crate::timestamps::Timestamps;

/// Linux's `TCP_TIMEWAIT_LEN` and `tcp_fin_timeout`.
pub(crate) const TIME_WAIT_LEN: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct TimeWait {
    /// When it ends; at once after a RST.
    pub(crate) until: Instant,
    pub(crate) challenges: Challenges,
    pub(crate) timestamps: Option<Timestamps>,
    /// `SND.NXT` and `RCV.NXT`: nothing is in flight.
    pub(crate) seq: SeqNum,
    pub(crate) ack: SeqNum,
    /// Acknowledgements within this distance are plausible (RFC 5961 §5.2).
    pub(crate) max_window: u32,
    pub(crate) window: u16,
    pub(crate) scale: u8,
    /// An acknowledgement is due.
    pub(crate) due: bool,
}

const _: () = assert!(size_of::<TimeWait>() < 64);

encoding::fields!(TimeWait {
    until,
    challenges,
    timestamps,
    seq,
    ack,
    max_window,
    window,
    scale,
    due
});

impl TimeWait {
    pub(crate) fn is_consistent(&self) -> bool {
        self.scale <= MAX_SCALE && self.max_window <= 0xffff << MAX_SCALE
    }

    /// Whether the state has expired.
    pub fn is_over(&self, now: Instant) -> bool {
        self.until <= now
    }

    pub fn deadline(&self) -> Instant {
        self.until
    }

    /// When it began, or was restarted.
    pub fn since(&self) -> Instant {
        Instant::from_nanos(
            self.until
                .as_nanos()
                .saturating_sub(TIME_WAIT_LEN.as_nanos() as u64),
        )
    }

    /// Restarts the wait.
    fn restart(&mut self, now: Instant) {
        self.until = now + TIME_WAIT_LEN;
    }

    /// Processes a segment with `length` bytes of payload (RFC 9293 §3.10.7.4).
    pub fn on_segment(
        &mut self,
        now: Instant,
        header: &TcpHeader,
        length: usize,
        counters: &mut EventCounters,
    ) {
        let has = |flag| header.flags.contains(flag);
        let (syn, fin, rst) = (has(TcpFlags::SYN), has(TcpFlags::FIN), has(TcpFlags::RST));
        let end = header.seq + length as u32 + u32::from(fin) + u32::from(syn);
        let stamps = self.timestamps.as_ref().zip(header.options.timestamps);
        let wrapped = !rst && stamps.is_some_and(|(state, field)| state.is_old(field, now));
        if wrapped || end.before(self.ack) || header.seq.after(self.edge()) {
            counters.count(if wrapped {
                Event::DropWrapped
            } else {
                Event::DropWindow
            });
            // Segments with payload or FIN are not part of an acknowledgement loop.
            let loops = syn || (length == 0 && !fin);
            if !rst && (!loops || self.challenges.allow(now, counters)) {
                self.answer(now, fin);
            }
        } else if rst {
            self.on_reset(now, header.seq, counters);
        } else if syn {
            counters.count(Event::DropSyn);
            self.due |= self.challenges.allow(now, counters);
        } else if !has(TcpFlags::ACK) {
            counters.count(Event::DropNoAck);
        } else if header.ack.after(self.seq) || header.ack.before(self.seq - self.max_window) {
            counters.count(Event::DropBadAck);
            self.due |= self.challenges.allow(now, counters);
        } else {
            if let (Some(state), Some(field)) = (&mut self.timestamps, header.options.timestamps)
                && header.seq.at_or_before(self.ack)
            {
                state.update(field, now);
            }
            if length > 0 || fin {
                counters.count(Event::DropClosed);
            }
            // A retransmitted FIN: the acknowledgement was lost.
            if fin {
                self.answer(now, fin);
            }
        }
    }

    pub(crate) fn answer(&mut self, now: Instant, fin: bool) {
        self.due = true;
        if fin {
            self.restart(now);
        }
    }

    /// A RST ends the state (RFC 9293 §3.10.7.4, second). RFC 1337 §3 would ignore it, as would Linux with
    /// `tcp_rfc1337`, which is off by default.
    fn on_reset(&mut self, now: Instant, seq: SeqNum, counters: &mut EventCounters) {
        if seq == self.ack {
            counters.count(Event::ResetIn);
            self.until = Instant::ZERO;
            self.due = false;
            return;
        }
        counters.count(Event::DropReset);
        let in_window = seq.at_or_after(self.ack) && seq.before(self.edge());
        self.due |= in_window && self.challenges.allow(now, counters);
    }

    fn edge(&self) -> SeqNum {
        self.ack + (u32::from(self.window) << self.scale)
    }

    /// Returns the acknowledgement if it is due; `ports` are the local and the peer's.
    pub fn transmit(&mut self, now: Instant, ports: (u16, u16)) -> Option<TcpHeader> {
        let due = core::mem::take(&mut self.due);
        due.then(|| TcpHeader {
            source_port: ports.0,
            destination_port: ports.1,
            seq: self.seq,
            ack: self.ack,
            flags: TcpFlags::ACK,
            window: self.window,
            options: TcpOptions {
                timestamps: self.timestamps.as_ref().map(|t| t.field(now)),
                ..TcpOptions::default()
            },
            ..TcpHeader::default()
        })
    }

    /// Whether `syn` opens a new connection and is not a late duplicate: its timestamp or its sequence number is newer
    /// (RFC 9293 §3.10.7.4, RFC 6191 §2; Linux accepts either). Returns an initial sequence number for the new
    /// connection.
    pub fn reopens(&self, now: Instant, syn: &TcpHeader) -> Option<SeqNum> {
        let is_next = opens_connection(syn) && self.is_older_than(now, syn.seq, syn);
        is_next.then(|| self.seq + 0xffff + 2)
    }

    /// Whether `header`, which completes a handshake by a cookie, is of a new connection and not a late duplicate; as for
    /// a SYN.
    pub fn is_followed_by(&self, now: Instant, header: &TcpHeader) -> bool {
        self.is_older_than(now, header.seq - 1, header)
    }

    fn is_older_than(&self, now: Instant, isn: SeqNum, header: &TcpHeader) -> bool {
        let stamps = self.timestamps.as_ref().zip(header.options.timestamps);
        let old = stamps.is_some_and(|(state, field)| state.is_old(field, now));
        let newer =
            isn.after(self.ack) || stamps.is_some_and(|(state, field)| state.is_newer(field));
        newer && !old
    }
}
