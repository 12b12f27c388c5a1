//! The connection and the calls of the socket layer. Segments arrive through `input` and leave through
//! `output`; timers are in `clock`.

mod clock;
mod open;
mod report;

use std::sync::Arc;

use arrayvec::ArrayVec;
use portolan_types::{Handle, Instant, Memory, SeqNum};
use portolan_wire::tcp::MAX_COOKIE;

use crate::buffer::LARGEST;
use crate::challenge::Challenges;
use crate::chrono::Chronometer;
use crate::config::{CongestionKind, Options, OrphanWait};
use crate::demux::{Demux, Edge};
use crate::ecn::Ecn;
use crate::encoding;
use crate::error::{Error, IcmpError, IcmpKind};
use crate::event_counters::{Event, EventCounters};
use crate::events::Events;
use crate::handshake::{SynReceived, SynSent};
use crate::output::Reset;
use crate::path_mtu::PathMtu;
use crate::queue::HandoffBuffer;
use crate::receive::{AckSchedule, Receiver};
use crate::send::Sender;
use crate::send_queue::{Chunk, Placed};
use crate::state::{Closed, State, StateName};
use crate::time_wait::{TIME_WAIT_LEN, TimeWait};
use crate::timers::Timers;
use crate::timestamps::Timestamps;
use crate::urgent::UrgentMark;

/// One TCP connection.
///
/// Call contract: after each call of `on_segment`, `on_timer`, `on_icmp`, `send`, `recv`,
/// `shutdown_send`, `close` or `abort`, call `transmit` until it returns nothing, then read
/// `deadline` and call `on_timer` at that time. `events` reports what changed for the user.
/// The connection ends in state CLOSED and is inert from then on.
#[derive(Clone, Debug)]
pub struct Connection {
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
    pub(crate) state: State,
    pub(crate) send: Sender,
    pub(crate) receive: Receiver,
    pub(crate) timers: Timers,
    pub(crate) timestamps: Option<Timestamps>,
    pub(crate) sack: bool,
    /// Both sides agreed on explicit congestion notification.
    pub(crate) ecn: Option<Ecn>,
    /// Both sides agreed on active demultiplexing.
    pub(crate) demux: Option<Demux>,
    pub(crate) scaling: bool,
    pub(crate) timestamp_offset: u32,
    pub(crate) options: Options,
    pub(crate) events: Events,
    error: Option<Error>,
    soft_error: Option<Error>,
    pub(crate) reset: Option<Reset>,
    /// A segment without payload must elicit an acknowledgement: window probe or keep-alive.
    pub(crate) probe: bool,
    /// The connection has no user any more.
    pub(crate) orphan: bool,
    /// The user has shut down reading.
    pub(crate) receive_shut: bool,
    pub(crate) challenges: Challenges,
    /// When the last segment arrived, the keep-alive probes sent since, and the time of the last probe.
    pub(crate) last_rx: Instant,
    pub(crate) keepalives: u32,
    pub(crate) probed: Instant,
    pub(crate) counters: Counters,
    pub(crate) event_counters: EventCounters,
    /// End of the last urgent byte sent, until it is acknowledged (`SND.UP`).
    pub(crate) urgent_end: Option<SeqNum>,
    pub(crate) chronometer: Chronometer,
    /// Data sent with the SYN was accepted (RFC 7413).
    pub(crate) early_data: bool,
    /// A Fast Open cookie granted by the peer, and the peer's MSS.
    pub(crate) granted: Option<(ArrayVec<u8, MAX_COOKIE>, u16)>,
    pub(crate) path: PathMtu,
}

encoding::fields!(Connection {
    local_port,
    remote_port,
    state,
    send,
    receive,
    timers,
    timestamps,
    sack,
    ecn,
    demux,
    scaling,
    timestamp_offset,
    options,
    events,
    error,
    soft_error,
    reset,
    probe,
    orphan,
    receive_shut,
    challenges,
    last_rx,
    keepalives,
    probed,
    counters,
    event_counters,
    urgent_end,
    chronometer,
    early_data,
    granted,
    path
});

#[derive(Clone, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) segments_in: u64,
    pub(crate) segments_out: u64,
    /// Segments with payload.
    pub(crate) data_in: u64,
    pub(crate) data_out: u64,
    pub(crate) bytes_out: u64,
    pub(crate) retransmits: u64,
    pub(crate) bytes_retransmitted: u64,
    /// Sequence space that the peer has acknowledged.
    pub(crate) bytes_acknowledged: u64,
    /// Segments acknowledged with a congestion mark echoed.
    pub(crate) delivered_marked: u64,
}

encoding::fields!(Counters {
    segments_in,
    segments_out,
    data_in,
    data_out,
    bytes_out,
    retransmits,
    bytes_retransmitted,
    bytes_acknowledged,
    delivered_marked
});

/// What `recv` finds with `MSG_OOB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutOfBand {
    /// No urgent mark, or its byte was already read, or it is delivered in-line.
    Nothing,
    /// The peer announced an urgent byte that has not arrived yet.
    Announced,
    Byte(u8),
}

impl Connection {
    // ---- opening ----

    // ---- the user's bytes ----

    /// Queues bytes; returns how many were accepted: zero after the end or a shutdown of sending.
    pub fn send(&mut self, _now: Instant, data: &[u8]) -> usize {
        if !self.may_send() {
            return 0;
        }
        let room = self.send.unsent_room(self.options.unsent_low_water);
        let count = self.send.enqueue(&data[..data.len().min(room)]);
        if count < data.len() {
            self.send.note_blocked();
        }
        count
    }

    /// Queues a whole chunk if there is any room, however little. The chunk is sent from its own memory, unless it is
    /// too short for that.
    ///
    /// # Errors
    /// Returns the chunk if there is no room, or after the end or a shutdown of sending.
    pub fn send_chunk(&mut self, _now: Instant, chunk: Chunk) -> Result<Placed, Chunk> {
        if self.send_space() == 0 {
            if self.may_send() {
                self.send.note_blocked();
            }
            return Err(chunk);
        }
        Ok(self.send.buffer.push_chunk(chunk))
    }

    /// Queues all of `data` regardless of the buffer's limit: bytes that migrate with a session.
    /// Returns false and queues nothing if the session may not send or the buffer would exceed `LARGEST`.
    pub fn send_whole(&mut self, data: &[u8]) -> bool {
        let is_possible = self.may_send() && self.send.buffer.len() + data.len() <= LARGEST;
        if is_possible {
            self.send.buffer.push(data);
        }
        is_possible
    }

    /// Sends what waits for a full segment, even if corked: `TCP_NODELAY` was set.
    pub fn push(&mut self) {
        self.send.push();
    }

    /// Marks the last queued byte as the end of a record (`MSG_EOR`): later bytes go into separate segments.
    pub fn end_record(&mut self) {
        if self.may_send() {
            self.send.end_record();
        }
    }

    /// Marks the last queued byte as urgent (`MSG_OOB`).
    pub fn mark_urgent(&mut self) {
        let end = self.send.una + self.send.buffer.len() as u32;
        if self.may_send() && end.after(self.send.una) {
            self.urgent_end = Some(end);
        }
    }

    /// Bytes that `send` would accept now.
    pub fn send_space(&self) -> usize {
        if self.may_send() {
            let room = self.send.unsent_room(self.options.unsent_low_water);
            self.send.space().min(room)
        } else {
            0
        }
    }

    fn may_send(&self) -> bool {
        self.state.may_send() && !self.send.fin
    }

    /// Moves bytes that arrived in order to `out`; returns their number.
    pub fn recv(&mut self, now: Instant, out: &mut [u8]) -> usize {
        let place = self.urgent_place();
        let count = self.receive.read(now, out, self.send.rtt.smoothed(), place);
        if count > 0 {
            self.update_window();
        }
        count
    }

    /// Lets the payload of the next segment stay in its frame: if it arrives in order, with `behind` bytes in the
    /// receive queue, it counts as received and as read. [`Connection::stay`] returns how much of it stayed, and must
    /// be called before the next segment.
    pub fn let_stay(&mut self, behind: usize) {
        self.receive.let_stay(behind);
    }

    /// Returns how many bytes of the last segment stay in its frame: all or none. They are *lent*, and count against
    /// the window until [`Connection::give_back`].
    pub fn stay(&mut self) -> usize {
        self.receive.stay()
    }

    /// Stores bytes that had stayed in their frames behind the first `behind` bytes of the receive queue: they are
    /// unread.
    pub fn take_back<'a>(
        &mut self,
        behind: usize,
        pieces: impl DoubleEndedIterator<Item = &'a [u8]>,
    ) {
        self.receive.take_back(behind, pieces);
    }

    /// The program has received `count` bytes that stayed in their frames.
    pub fn note_taken(&mut self, now: Instant, count: usize) {
        let srtt = self.send.rtt.smoothed();
        self.receive.note_taken(now, count, srtt);
    }

    /// The program has returned `count` bytes lent to it.
    pub fn give_back(&mut self, count: usize) {
        self.receive.give_back(count);
        self.update_window();
    }

    /// Size limit of the receive buffer, bytes.
    pub fn receive_buffer(&self) -> usize {
        self.receive.limit()
    }

    /// Bytes that are lent.
    pub fn lent(&self) -> usize {
        self.receive.lent()
    }

    fn update_window(&mut self) {
        if self.state.may_receive() && self.receive.window_update_due(self.options.window_clamp) {
            self.receive.want_ack(AckSchedule::Now);
        }
    }

    /// Puts back the bytes that `recv` returned last; the next `recv` returns them again.
    pub fn unread(&mut self, bytes: &[u8]) {
        self.receive.unread(bytes);
    }

    /// Everything that has arrived and is unread, in pieces with their offsets from the next byte to read; where
    /// pieces overlap, the later one counts. They span [`Connection::arrived`] bytes.
    pub fn arrived_pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.receive.buffer.pieces()
    }

    /// Bytes from the next one to read up to the last one that has arrived, in order or not.
    pub fn arrived(&self) -> usize {
        self.receive.buffer.span()
    }

    /// Reads the same bytes from `memory`, which holds a copy, from now on; returns false if its length
    /// differs.
    pub fn set_aside(&mut self, memory: Arc<dyn Memory>) -> bool {
        self.receive.set_aside(memory)
    }

    /// Memory that is read before the stored bytes; it is not part of the encoded connection.
    pub fn handoff(&self) -> Option<&HandoffBuffer> {
        self.receive.buffer.handoff()
    }

    /// Gives a decoded connection the memory that travelled beside its capsule.
    pub fn lead_with(&mut self, handoff: HandoffBuffer) {
        self.receive.buffer.lead_with(handoff);
    }

    /// Copies bytes that arrived in order, starting at `offset`, without consuming them.
    pub fn peek(&self, offset: usize, out: &mut [u8]) -> usize {
        self.receive.peek(offset, out, self.urgent_place())
    }

    /// Bytes that are encoded with the connection: unread, out of order, unacknowledged, unsent.
    pub fn stored(&self) -> usize {
        self.receive.buffer.encoded() + self.send.buffer.span()
    }

    /// When the last payload arrived.
    pub fn last_text_at(&self) -> Instant {
        self.receive.last_data
    }

    /// Bytes that `recv` would return.
    pub fn readable(&self) -> usize {
        self.receive.readable(self.urgent_place())
    }

    /// Whether at least `receive_low_water` bytes can be read, or the buffer has no room for more
    /// (Linux's `tcp_stream_is_readable`).
    pub fn is_readable(&self) -> bool {
        let readable = self.readable();
        readable > 0
            && (readable >= self.options.receive_low_water
                || self.receive.offered() < self.receive.mss)
    }

    /// The value of `FIONREAD`: bytes up to the urgent mark.
    pub fn inquiry(&self) -> usize {
        self.receive.inquiry(self.urgent_place())
    }

    /// Whether written data or a FIN was never sent.
    pub fn has_unsent(&self) -> bool {
        self.send.has_unsent()
    }

    /// Whether a third of the send buffer is free, and half of what may be unsent: writable, as on Linux.
    /// If not, the event `WRITABLE` reports when it is.
    pub fn poll_writable(&mut self) -> bool {
        let low_water = self.options.unsent_low_water;
        self.may_send() && self.send.poll_writable(low_water)
    }

    // ---- urgent data ----

    pub(crate) fn urgent_place(&self) -> UrgentMark {
        if self.options.urgent_inline {
            UrgentMark::Inline
        } else {
            UrgentMark::Aside
        }
    }

    /// Whether the reader is at the urgent mark (`SIOCATMARK`).
    pub fn is_at_mark(&self) -> bool {
        self.receive.is_at_mark()
    }

    /// Whether an urgent byte is available that was not read (`POLLPRI`).
    pub fn has_urgent(&self) -> bool {
        self.receive.has_urgent()
    }

    /// What `recv` finds with `MSG_OOB`.
    pub fn peek_urgent(&self) -> OutOfBand {
        match self.receive.urgent {
            Some(urgent) if !urgent.taken && !self.options.urgent_inline => self
                .receive
                .urgent_byte()
                .map_or(OutOfBand::Announced, OutOfBand::Byte),
            _ => OutOfBand::Nothing,
        }
    }

    /// Like `peek_urgent`, but consumes the byte.
    pub fn take_urgent(&mut self) -> OutOfBand {
        let found = self.peek_urgent();
        if let (OutOfBand::Byte(_), Some(urgent)) = (found, &mut self.receive.urgent) {
            urgent.taken = true;
        }
        found
    }

    // ---- acknowledging ----

    /// Sets `TCP_QUICKACK`; temporary, as on Linux.
    pub fn ack_quickly(&mut self) {
        self.receive.ack_quickly();
    }

    /// Clears `TCP_QUICKACK`.
    pub fn ack_lazily(&mut self) {
        self.receive.ack_lazily();
    }

    /// Sets the size of the send buffer and disables its auto-tuning.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.send.set_limit(bytes.min(LARGEST));
    }

    /// Sets the size of the receive buffer and disables its auto-tuning.
    pub fn set_receive_buffer(&mut self, bytes: usize) {
        self.receive.set_limit(bytes.min(LARGEST));
    }

    // ---- closing ----

    /// The user sends no more data: a FIN follows what is queued.
    pub fn shutdown_send(&mut self, _now: Instant) {
        match self.state {
            State::SynSent(_) => self.end(),
            // RFC 9293 §3.10.4: the FIN waits for the handshake.
            State::SynReceived(_) => self.send.fin = true,
            _ => self.send.fin |= self.state.close().is_ok(),
        }
    }

    /// The user reads no more.
    pub fn shutdown_receive(&mut self) {
        self.receive_shut = true;
    }

    /// The user closes the connection. If bytes are unread, a RST is sent (RFC 2525 §2.17).
    pub fn close(&mut self, now: Instant) {
        if self.receive.buffer.len() > 0 || self.options.reset_on_close {
            return self.abort(now);
        }
        self.orphan = true;
        self.shutdown_send(now);
        self.linger_orphaned(now);
    }

    /// An orphan leaves FIN-WAIT-2 by itself (Linux's `tcp_fin_time`).
    pub(crate) fn linger_orphaned(&mut self, now: Instant) {
        let State::FinWait2(state) = &mut self.state else {
            return;
        };
        let wait = match self.options.orphan_wait {
            OrphanWait::Default => TIME_WAIT_LEN,
            OrphanWait::For(wait) => wait,
            OrphanWait::Never => return self.abort(now),
        };
        state.until = now + wait.max(self.send.rtt.rto().saturating_mul(7) / 2);
    }

    /// Ends the connection at once, with a RST if the peer knows of it.
    pub fn abort(&mut self, _now: Instant) {
        let known = match &self.state {
            State::SynSent(_) | State::TimeWait(_) | State::Closed(_) => false,
            State::SynReceived(_) => true,
            state => state.is_synchronized(),
        };
        if known {
            self.reset = Some(Reset {
                seq: self.send.nxt,
                ack: Some(self.receive.nxt),
            });
        }
        self.end();
    }

    /// Ends the connection without an error.
    pub(crate) fn end(&mut self) {
        self.state = State::Closed(Closed);
        self.timers.stop();
        self.send.discard();
        self.receive.stop();
        self.probe = false;
        self.events.insert(Events::CLOSED);
    }

    /// Ends the connection with `error`.
    pub(crate) fn fail(&mut self, error: Error) {
        self.error = Some(error);
        self.events.insert(Events::ERROR);
        self.end();
    }

    // ---- queries ----

    pub fn state(&self) -> StateName {
        self.state.name()
    }

    /// Whether the user can send nothing more.
    pub fn is_send_closed(&self) -> bool {
        !self.may_send()
    }

    /// Whether everything that can ever arrive has been read.
    pub fn is_receive_finished(&self) -> bool {
        self.receive.buffer.len() == 0 && self.is_receive_shut()
    }

    /// Whether the peer's FIN and everything before it has been read: nothing that arrives later changes that.
    pub fn has_read_end(&self) -> bool {
        self.receive.buffer.len() == 0 && self.receive.fin_consumed()
    }

    /// Whether nothing more is expected: the peer's FIN and everything before it has arrived, the user
    /// shut down reading, or the connection is over.
    pub fn is_receive_shut(&self) -> bool {
        self.receive_shut || self.receive.fin_consumed() || self.is_closed()
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed(_))
    }

    /// The remains of the connection in TIME-WAIT.
    pub fn time_wait(&self) -> Option<&TimeWait> {
        match &self.state {
            State::TimeWait(state) => Some(state),
            _ => None,
        }
    }

    /// Whether everything queued, a FIN included, is acknowledged.
    pub fn is_flushed(&self) -> bool {
        self.send.buffer.len() == 0 && !self.send.fin
    }

    pub fn local_port(&self) -> u16 {
        self.local_port
    }

    pub fn remote_port(&self) -> u16 {
        self.remote_port
    }

    pub fn error(&self) -> Option<Error> {
        self.error
    }

    pub fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// What happened since the last call.
    pub fn events(&mut self) -> Events {
        self.events.take()
    }

    pub fn options(&mut self) -> &mut Options {
        &mut self.options
    }

    /// Sets the congestion control algorithm (`TCP_CONGESTION`); may change at any time.
    pub fn set_congestion(&mut self, kind: CongestionKind) {
        self.send.congestion.set_kind(kind);
    }

    // ---- active demultiplexing ----

    /// Whether the peer accepts handles.
    pub fn takes_handles(&self) -> bool {
        self.demux.is_some()
    }

    /// Advertises `handle`: the session has a receiver of its own, to which the handle leads the peer's packets.
    pub fn advertise(&mut self, handle: Handle) {
        let edge = self.edge();
        if let Some(demux) = &mut self.demux {
            demux.advertise(handle, edge);
        }
    }

    /// Revokes the advertised handle, which is no longer valid.
    pub fn revoke(&mut self) {
        let edge = self.edge();
        if let Some(demux) = &mut self.demux {
            demux.revoke(edge);
        }
    }

    fn edge(&self) -> Edge {
        Edge {
            sent: self.send.nxt,
            allowed: self.receive.nxt + self.receive.offered(),
        }
    }

    // ---- ICMP ----

    /// RFC 5927 §4: only a segment in flight can have caused an error.
    pub fn is_in_flight(&self, seq: SeqNum) -> bool {
        seq.at_or_after(self.send.una) && seq.before(self.send.nxt)
    }

    /// Limits the size of bursts, which would otherwise delay other traffic.
    pub fn limit_bursts(&mut self, bytes: Option<u32>) {
        self.send.limit_bursts(bytes);
    }

    /// Sets the payload that a packet on the path can hold besides IP and TCP headers, as currently known: it
    /// grows after a report has aged (RFC 1191 §6.3) or a larger probe was delivered (RFC 8899), and may shrink
    /// with a new route. Segments in flight are left to loss recovery.
    pub fn set_path_mtu(&mut self, payload: u16) {
        let payload = self.without_options(payload).min(self.send.mss_limit);
        let mss = self.clamped(payload);
        if self.path.is_searching() {
            // The absence of a report does not disprove a black hole.
            self.path.on_told(mss);
            self.send.mss = self.send.mss.min(mss);
        } else {
            self.send.mss = mss;
        }
    }

    fn without_options(&self, payload: u16) -> u32 {
        let timestamps = if self.timestamps.is_some() { 12 } else { 0 };
        let handle = self.demux.as_ref().map_or(0, Demux::room);
        let options = timestamps + handle;
        u32::from(payload).max(48 + options) - options
    }

    /// Processes an ICMP error that quotes a segment of this connection (RFC 5927).
    pub fn on_icmp(&mut self, icmp: IcmpError) {
        match (&self.state, icmp.kind) {
            (State::Closed(_) | State::TimeWait(_), _) => {}
            (
                State::SynSent(SynSent { iss, .. }) | State::SynReceived(SynReceived { iss, .. }),
                IcmpKind::Unreachable { hard, error },
            ) => {
                if icmp.quoted == *iss && hard {
                    self.fail(error);
                } else {
                    self.soft_error = Some(error);
                }
            }
            // RFC 5927 §4: only a segment in flight can have caused it.
            _ if icmp.quoted.before(self.send.una) || icmp.quoted.at_or_after(self.send.nxt) => {
                self.event_counters.count(Event::IcmpIgnored);
            }
            (_, IcmpKind::Unreachable { error, .. }) => self.soft_error = Some(error),
            (_, IcmpKind::TooBig { mtu_payload }) => {
                let mss = self.without_options(mtu_payload);
                if mss < self.send.mss {
                    self.path.on_told(mss);
                }
                self.send.shrink_mss(mss);
            }
        }
    }
}
