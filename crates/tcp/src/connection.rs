//! The connection: what its owner calls. Segments come in through `input` and leave through
//! `output`; time passes in `clock`; this file has the calls of the socket layer.

mod clock;

use core::time::Duration;
use std::sync::Arc;

use arrayvec::ArrayVec;
use portolan_types::{Handle, Instant, Memory, SeqNum};
use portolan_wire::tcp::{MAX_COOKIE, TcpHeader};
use serde::{Deserialize, Serialize};

use crate::buffer::LARGEST;
use crate::cc::BbrInfo;
use crate::chrono::Chronometer;
use crate::config::{Config, CongestionKind, Options, OrphanWait};
use crate::cookie;
use crate::demux::{Demux, Edge};
use crate::ecn::Ecn;
use crate::error::{Error, IcmpError, IcmpKind};
use crate::event_counters::{EVENTS_MAX, Event, EventCounters};
use crate::events::Events;
use crate::fastopen::{Cookie, FastOpen, GrantedCookie};
use crate::handshake::{Agreement, FastSyn, Offer, SynReceived, SynSent};
use crate::listen::{ListenAnswer, judge_at_listener};
use crate::output::Reset;
use crate::path_mtu::PathMtu;
use crate::queue::HandoffBuffer;
use crate::receive::{AckSchedule, Receiver};
use crate::send::{CaState, LARGEST_SEGMENT, Sender};
use crate::state::{Closed, Established, State, StateName};
use crate::tcp_info::{SendSpace, TcpInfo};
use crate::timers::Timers;
use crate::timestamps::Timestamps;
use crate::urgent::UrgentMark;

/// Linux's `TCP_TIMEWAIT_LEN` and `tcp_fin_timeout`.
pub(crate) const TIME_WAIT_LEN: Duration = Duration::from_secs(60);
/// One TCP connection.
///
/// Call contract: after each call of `on_segment`, `on_timer`, `on_icmp`, `send`, `recv`,
/// `shutdown_send`, `close` or `abort`, call `transmit` until it returns nothing, then read
/// `deadline` and call `on_timer` when it has come. `events` says what changed for the user.
/// The connection ends in state CLOSED and is then inert.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// A segment without text must provoke an acknowledgement: window probe or keep-alive.
    pub(crate) probe: bool,
    /// No user is left.
    pub(crate) orphan: bool,
    /// The user will not read any more.
    pub(crate) receive_shut: bool,
    pub(crate) challenges: Challenges,
    /// When the peer was last heard of, the keep-alive probes sent since, and when the last was.
    pub(crate) last_rx: Instant,
    pub(crate) keepalives: u32,
    pub(crate) probed: Instant,
    pub(crate) counters: Counters,
    pub(crate) event_counters: EventCounters,
    /// End of the last urgent byte sent, until it is acknowledged (`SND.UP`).
    pub(crate) urgent_end: Option<SeqNum>,
    pub(crate) chronometer: Chronometer,
    /// Text went with the SYN and was taken (RFC 7413).
    pub(crate) early_data: bool,
    /// A Fast Open cookie that the peer has granted, and the largest segment that it takes.
    pub(crate) granted: Option<(ArrayVec<u8, MAX_COOKIE>, u16)>,
    pub(crate) path: PathMtu,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) segments_in: u64,
    pub(crate) segments_out: u64,
    /// Segments with text.
    pub(crate) data_in: u64,
    pub(crate) data_out: u64,
    pub(crate) bytes_out: u64,
    pub(crate) retransmits: u64,
    pub(crate) bytes_retransmitted: u64,
    /// Sequence space that the peer has acknowledged.
    pub(crate) bytes_acknowledged: u64,
    /// Segments that arrived at a peer who echoed a congestion mark then.
    pub(crate) delivered_marked: u64,
}

/// What `recv` with `MSG_OOB` finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutOfBand {
    /// No mark, or its byte was taken, or it lies among the others.
    Nothing,
    /// The peer named a byte that is not here yet.
    Announced,
    Byte(u8),
}

/// Limits answers to segments that an attacker may have sent (RFC 5961 §7).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Challenges {
    last: Option<Instant>,
}

impl Challenges {
    /// Linux's `tcp_invalid_ratelimit`; RFC 5961 §7 proposes ten in five seconds.
    const INTERVAL: Duration = Duration::from_millis(500);

    pub(crate) fn allow(&mut self, now: Instant, event_counters: &mut EventCounters) -> bool {
        let allowed = self
            .last
            .is_none_or(|last| now.since(last) >= Challenges::INTERVAL);
        if allowed {
            self.last = Some(now);
        }
        event_counters.count(if allowed {
            Event::Challenge
        } else {
            Event::ChallengeWithheld
        });
        allowed
    }
}

impl Connection {
    // ---- opening ----

    /// An active open: SYN-SENT.
    pub fn connect(
        config: &Config,
        local_port: u16,
        remote_port: u16,
        iss: SeqNum,
        now: Instant,
    ) -> Connection {
        let receive = Receiver::new(config);
        let offer = Offer::new(config, receive.wanted_scale(config.window_clamp));
        let state = State::SynSent(SynSent {
            iss,
            offer,
            due: true,
            fast: None,
        });
        Connection::new(config, (local_port, remote_port), state, iss, receive, now)
    }

    /// Sends text with the SYN, or asks for the cookie that a later open needs for that; to be
    /// called before the first `transmit` of an active open.
    pub fn open_fast(&mut self, how: FastOpen) {
        if let State::SynSent(state) = &mut self.state {
            let (cookie, mss) = match how {
                FastOpen::Ask => (Some(ArrayVec::new()), state.offer.mss),
                FastOpen::With(granted) => (Some(granted.cookie.0), granted.mss),
                FastOpen::WithoutCookie => (None, state.offer.mss),
            };
            state.fast = Some(FastSyn {
                cookie,
                mss: mss.min(state.offer.mss),
                sent: 0,
                text_follows: false,
            });
        }
    }

    /// After `open_fast`: the user waits for the handshake with text, which will take the
    /// acknowledgement of the SYN+ACK along (Linux: `sk_write_pending`).
    pub fn expect_text(&mut self) {
        if let State::SynSent(SynSent {
            fast: Some(fast), ..
        }) = &mut self.state
        {
            fast.text_follows = true;
        }
    }

    /// The SYN+ACK of a passive open brings its peer a cookie.
    pub fn grant_cookie(&mut self, cookie: Cookie) {
        if let State::SynReceived(state) = &mut self.state {
            state.grant = Some(cookie.0);
        }
    }

    /// While a passive open is held it is not completed: its last acknowledgement is dropped, with
    /// what that carries, and the SYN+ACK is sent again when its time comes. For a listener whose
    /// accept queue is full (Linux: `tcp_check_req`).
    pub fn hold_handshake(&mut self, is_held: bool) {
        if let State::SynReceived(state) = &mut self.state {
            // With Fast Open it was accepted by its SYN.
            state.is_held = is_held && !state.fast && !state.active;
        }
    }

    /// Takes the text that came with the SYN of a passive open; the caller has found its cookie
    /// good. The user may answer at once.
    pub fn take_early(&mut self, now: Instant, payload: &[u8]) {
        let State::SynReceived(state) = &mut self.state else {
            return;
        };
        state.fast = true;
        let (seq, window) = (self.receive.nxt, self.send.window);
        self.send.establish(seq - 1, window, self.send.mss);
        self.receive
            .arrive(now, seq, payload, false, &self.send.rtt);
        self.early_data = !payload.is_empty();
        self.events.insert(Events::READABLE);
    }

    /// The cookie that the peer granted, once.
    pub fn take_cookie(&mut self) -> Option<GrantedCookie> {
        let (cookie, mss) = self.granted.take()?;
        Some(GrantedCookie {
            cookie: Cookie(cookie),
            mss,
        })
    }

    /// A passive open by `syn`: SYN-RECEIVED.
    pub fn accept(config: &Config, syn: &TcpHeader, iss: SeqNum, now: Instant) -> Connection {
        let mut receive = Receiver::new(config);
        receive.synchronize(syn.seq, config.window_clamp, now);
        let scale = receive.wanted_scale(config.window_clamp);
        let mut offer = Offer::new(config, scale).answering(&syn.options);
        offer.ecn = Ecn::accepts(config.ecn, syn);
        let agreement = offer.agree(&syn.options);
        let state = State::SynReceived(SynReceived {
            iss,
            irs: syn.seq,
            offer,
            due: true,
            active: false,
            fast: false,
            grant: None,
            is_held: false,
        });
        let ports = (syn.destination_port, syn.source_port);
        let mut connection = Connection::new(config, ports, state, iss, receive, now);
        connection.settle(agreement, syn, now);
        connection.ecn = offer.ecn.then(Ecn::default);
        connection.send.window = u32::from(syn.window);
        connection
    }

    /// A passive open whose state travelled in a SYN cookie: ESTABLISHED. The caller then passes
    /// the same segment to `on_segment`, for the bytes it may carry.
    pub fn accept_cookie(
        config: &Config,
        ack: &TcpHeader,
        cookie: &cookie::Decoded,
        now: Instant,
    ) -> Connection {
        let mut receive = Receiver::new(config);
        receive.synchronize(ack.seq - 1, config.window_clamp, now);
        let scale = receive.wanted_scale(config.window_clamp);
        let agreement = cookie.agreement(config, scale);
        let state = State::Established(Established);
        let ports = (ack.destination_port, ack.source_port);
        let mut connection = Connection::new(config, ports, state, ack.ack - 1, receive, now);
        connection.settle(agreement, ack, now);
        connection.ecn = cookie.agrees_on_ecn(config).then(Ecn::default);
        connection.establish(ack.seq, u32::from(ack.window) << agreement.send_scale);
        connection
    }

    fn new(
        config: &Config,
        (local_port, remote_port): (u16, u16),
        state: State,
        iss: SeqNum,
        receive: Receiver,
        now: Instant,
    ) -> Connection {
        Connection {
            local_port,
            remote_port,
            state,
            send: Sender::new(config, iss + 1, now),
            receive,
            timers: Timers::new(),
            timestamps: None,
            sack: false,
            ecn: None,
            demux: None,
            scaling: false,
            timestamp_offset: config.timestamp_offset,
            options: Options {
                window_clamp: config.window_clamp,
                ..Options::default()
            },
            events: Events::NONE,
            error: None,
            soft_error: None,
            reset: None,
            probe: false,
            orphan: false,
            receive_shut: false,
            challenges: Challenges::default(),
            last_rx: now,
            keepalives: 0,
            probed: now,
            counters: Counters::default(),
            event_counters: EventCounters::default(),
            urgent_end: None,
            chronometer: Chronometer::default(),
            early_data: false,
            granted: None,
            path: PathMtu::default(),
        }
    }

    /// The options of both SYNs are known.
    pub(crate) fn settle(&mut self, agreement: Agreement, peer: &TcpHeader, now: Instant) {
        self.send.mss = self.clamped(u32::from(agreement.mss));
        self.send.mss_limit = self.send.mss;
        self.send.scale = agreement.send_scale;
        self.receive.scale = agreement.receive_scale;
        self.receive.mss = self.send.mss;
        self.receive.start_tuning();
        self.scaling = agreement.scaling;
        self.sack = agreement.sack;
        self.demux = match agreement.handle_room {
            0 => None,
            room => Some(Demux::with_room(room)),
        };
        self.timestamps = peer
            .options
            .timestamps
            .filter(|_| agreement.timestamps)
            .map(|field| Timestamps::new(self.timestamp_offset, field.value, now));
    }

    /// The handshake is complete with the peer's segment at `seq`; `window` is scaled.
    pub(crate) fn establish(&mut self, seq: SeqNum, window: u32) {
        self.state = State::Established(Established);
        self.send.establish(seq, window, self.send.mss);
        self.timers.clear_send();
        self.events.insert(Events::CONNECTED | Events::WRITABLE);
        if self.send.fin {
            self.state.close();
        }
    }

    fn clamped(&self, mss: u32) -> u32 {
        let clamp = self
            .options
            .max_segment
            .map_or(LARGEST_SEGMENT, |clamp| u32::from(clamp).max(48));
        mss.clamp(1, LARGEST_SEGMENT).min(clamp)
    }

    // ---- the user's bytes ----

    /// Queues bytes; returns how many were taken. None after an end or a shutdown of sending.
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

    /// Takes all of `data`, full or not: bytes that a session has to take along when it moves.
    /// False, and nothing taken, if it sends no more or that would be beyond measure.
    pub fn send_whole(&mut self, data: &[u8]) -> bool {
        let is_possible = self.may_send() && self.send.buffer.len() + data.len() <= LARGEST;
        if is_possible {
            self.send.buffer.push(data);
        }
        is_possible
    }

    /// Sends what waits for a full segment, also where it is corked: `TCP_NODELAY` was set.
    pub fn push(&mut self) {
        self.send.push();
    }

    /// The last byte that was sent ends a record (`MSG_EOR`): what follows goes in segments of its own.
    pub fn end_record(&mut self) {
        if self.may_send() {
            self.send.end_record();
        }
    }

    /// The last byte that was sent is urgent (`MSG_OOB`).
    pub fn mark_urgent(&mut self) {
        let end = self.send.una + self.send.buffer.len() as u32;
        if self.may_send() && end.after(self.send.una) {
            self.urgent_end = Some(end);
        }
    }

    /// Bytes that `send` would take now.
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

    /// Moves bytes that arrived in order to `out`; returns how many.
    pub fn recv(&mut self, now: Instant, out: &mut [u8]) -> usize {
        let place = self.urgent_place();
        let count = self.receive.read(now, out, self.send.rtt.smoothed(), place);
        if count > 0
            && self.state.may_receive()
            && self.receive.window_update_due(self.options.window_clamp)
        {
            self.receive.want_ack(AckSchedule::Now);
        }
        count
    }

    /// Takes bytes back that `recv` has returned last: they are the next that it returns.
    pub fn unread(&mut self, bytes: &[u8]) {
        self.receive.unread(bytes);
    }

    /// All that has arrived and nobody has read, each piece with its offset from the next byte; where they
    /// overlap the later ones count. They span [`Connection::arrived`] bytes.
    pub fn arrived_pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.receive.buffer.pieces()
    }

    /// Bytes from the next one that is read to the last one that has arrived, in order or not.
    pub fn arrived(&self) -> usize {
        self.receive.buffer.span()
    }

    /// The same bytes lie in `memory`, too, and are read there from now on; `false` if it has another
    /// number of them.
    pub fn set_aside(&mut self, memory: Arc<dyn Memory>) -> bool {
        self.receive.set_aside(memory)
    }

    /// What is read elsewhere before all that is stored here; it is none of what is encoded.
    pub fn handoff(&self) -> Option<&HandoffBuffer> {
        self.receive.buffer.handoff()
    }

    /// Gives a connection that was decoded what travelled beside it.
    pub fn lead_with(&mut self, handoff: HandoffBuffer) {
        self.receive.buffer.lead_with(handoff);
    }

    /// Copies bytes that arrived in order, from `offset` on, and leaves them.
    pub fn peek(&self, offset: usize, out: &mut [u8]) -> usize {
        self.receive.peek(offset, out, self.urgent_place())
    }

    /// Bytes that are encoded: unread, out of order, unacknowledged, unsent.
    pub fn stored(&self) -> usize {
        self.receive.buffer.encoded() + self.send.buffer.span()
    }

    /// When text came last.
    pub fn last_text_at(&self) -> Instant {
        self.receive.last_data
    }

    /// Bytes that `recv` would return.
    pub fn readable(&self) -> usize {
        self.receive.readable(self.urgent_place())
    }

    /// Are there as many bytes as `receive_low_water` asks for? Also if no more would fit the
    /// buffer (Linux's `tcp_stream_is_readable`).
    pub fn is_readable(&self) -> bool {
        let readable = self.readable();
        readable > 0
            && (readable >= self.options.receive_low_water
                || self.receive.offered() < self.receive.mss)
    }

    /// What `FIONREAD` tells: bytes up to the urgent mark.
    pub fn inquiry(&self) -> usize {
        self.receive.inquiry(self.urgent_place())
    }

    /// Is a third of the send buffer free, and half of what may be unsent? What Linux calls
    /// writable. If not, `WRITABLE` will tell when it is.
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

    /// Has the reader come to the urgent mark (`SIOCATMARK`)?
    pub fn is_at_mark(&self) -> bool {
        self.receive.is_at_mark()
    }

    /// Is there an urgent byte that nobody took (`POLLPRI`)?
    pub fn has_urgent(&self) -> bool {
        self.receive.has_urgent()
    }

    /// What `recv` with `MSG_OOB` finds.
    pub fn peek_urgent(&self) -> OutOfBand {
        match self.receive.urgent {
            Some(urgent) if !urgent.taken && !self.options.urgent_inline => self
                .receive
                .urgent_byte()
                .map_or(OutOfBand::Announced, OutOfBand::Byte),
            _ => OutOfBand::Nothing,
        }
    }

    /// As `peek_urgent`; a byte is gone afterwards.
    pub fn take_urgent(&mut self) -> OutOfBand {
        let found = self.peek_urgent();
        if let (OutOfBand::Byte(_), Some(urgent)) = (found, &mut self.receive.urgent) {
            urgent.taken = true;
        }
        found
    }

    // ---- acknowledging ----

    /// `TCP_QUICKACK` on: not for good, as on Linux.
    pub fn ack_quickly(&mut self) {
        self.receive.ack_quickly();
    }

    /// `TCP_QUICKACK` off.
    pub fn ack_lazily(&mut self) {
        self.receive.ack_lazily();
    }

    /// Sets the size of the send buffer and ends its auto-tuning.
    pub fn set_send_buffer(&mut self, bytes: usize) {
        self.send.set_limit(bytes.min(LARGEST));
    }

    /// Sets the size of the receive buffer and ends its auto-tuning.
    pub fn set_receive_buffer(&mut self, bytes: usize) {
        self.receive.set_limit(bytes.min(LARGEST));
    }

    // ---- closing ----

    /// The user sends no more: a FIN follows what is queued.
    pub fn shutdown_send(&mut self, _now: Instant) {
        match self.state {
            State::SynSent(_) => self.end(),
            // RFC 9293 §3.10.4: the FIN waits for the handshake.
            State::SynReceived(_) => self.send.fin = true,
            State::Established(_) | State::CloseWait(_) => {
                self.send.fin = true;
                self.state.close();
            }
            _ => {}
        }
    }

    /// The user reads no more.
    pub fn shutdown_receive(&mut self) {
        self.receive_shut = true;
    }

    /// The user is gone. Bytes that nobody read make this a reset (RFC 2525 §2.17).
    pub fn close(&mut self, now: Instant) {
        if self.receive.buffer.len() > 0 || self.options.reset_on_close {
            return self.abort(now);
        }
        self.orphan = true;
        self.shutdown_send(now);
        if matches!(self.state, State::FinWait2(_)) {
            self.linger_orphaned(now);
        }
    }

    /// FIN-WAIT-2 without a user (Linux's `tcp_fin_time`).
    pub(crate) fn linger_orphaned(&mut self, now: Instant) {
        let wait = match self.options.orphan_wait {
            OrphanWait::Default => TIME_WAIT_LEN,
            OrphanWait::For(wait) => wait,
            OrphanWait::Never => return self.abort(now),
        };
        self.timers.end = now + wait.max(self.send.rtt.rto().saturating_mul(7) / 2);
    }

    /// Ends the connection at once, with a RST where the peer knows of it.
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

    /// The connection is over, without an error.
    pub(crate) fn end(&mut self) {
        self.state = State::Closed(Closed);
        self.timers.stop();
        self.send.discard();
        self.receive.stop();
        self.probe = false;
        self.events.insert(Events::CLOSED);
    }

    /// The connection is over because of `error`.
    pub(crate) fn fail(&mut self, error: Error) {
        self.error = Some(error);
        self.events.insert(Events::ERROR);
        self.end();
    }

    // ---- what the user may ask ----

    pub fn state(&self) -> StateName {
        self.state.name()
    }

    /// Whether the user can send nothing more.
    pub fn is_send_closed(&self) -> bool {
        !self.may_send()
    }

    /// Whether all that will ever come is read.
    pub fn is_receive_finished(&self) -> bool {
        self.receive.buffer.len() == 0 && self.is_receive_shut()
    }

    /// Whether the peer's FIN and all before it was read: nothing that comes after changes that.
    pub fn has_read_end(&self) -> bool {
        self.receive.buffer.len() == 0 && self.receive.fin_consumed()
    }

    /// Whether nothing more is expected: the peer's FIN and all before it arrived, the user shut
    /// that direction, or the connection is over.
    pub fn is_receive_shut(&self) -> bool {
        self.receive_shut || self.receive.fin_consumed() || self.is_closed()
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed(_))
    }

    /// In TIME-WAIT, whether `syn` begins a new connection and is no late duplicate: its timestamp
    /// or its number is newer (RFC 9293 §3.10.7.4, RFC 6191 §2; Linux takes either). Gives a number
    /// that the new connection may start with.
    pub fn reopens(&self, now: Instant, syn: &TcpHeader) -> Option<SeqNum> {
        let stamps = self.timestamps.as_ref().zip(syn.options.timestamps);
        let old = stamps.is_some_and(|(state, field)| state.is_old(field, now));
        let newer = syn.seq.after(self.receive.nxt)
            || stamps.is_some_and(|(state, field)| state.is_newer(field));
        let opens = judge_at_listener(syn) == ListenAnswer::Open;
        let fits = matches!(self.state, State::TimeWait(_)) && opens;
        (fits && newer && !old).then(|| self.send.nxt + 0xffff + 2)
    }

    /// Whether all that was queued, a FIN included, is acknowledged.
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

    /// Which algorithm moves the congestion window (`TCP_CONGESTION`); may change at any time.
    pub fn set_congestion(&mut self, kind: CongestionKind) {
        self.send.congestion.set_kind(kind);
    }

    pub fn congestion(&self) -> CongestionKind {
        self.send.congestion.kind()
    }

    /// What `TCP_CC_INFO` tells, if the algorithm has anything to tell.
    pub fn congestion_info(&self) -> Option<BbrInfo> {
        self.send.congestion.info()
    }

    /// How often each of [`EVENTS`](crate::EVENTS) happened.
    pub fn counts(&self) -> &[u32; EVENTS_MAX] {
        self.event_counters.counts()
    }

    /// Segments that were sent again, and neither acknowledged nor given up since.
    pub fn retransmissions_in_flight(&self) -> u32 {
        self.send.board.retransmitted().div_ceil(self.send.mss)
    }

    pub fn tcp_info(&self) -> TcpInfo {
        let (send, receive) = (&self.send, &self.receive);
        TcpInfo {
            srtt: send.rtt.smoothed(),
            rttvar: send.rtt.variation(),
            min_rtt: send.rtt.minimum(),
            rto: send.rtt.rto(),
            cwnd: send.congestion.cwnd(),
            ssthresh: send.congestion.ssthresh(),
            mss: send.mss,
            receive_mss: receive.mss,
            unacknowledged: send.board.outstanding(),
            sacked: send.board.sacked(),
            lost: send.board.lost() + send.lost_and_sent_again(),
            segments_unacknowledged: send.board.segments(send.mss),
            segments_delivered: self.segments_delivered(),
            backoff: send.retries,
            probes: send.probes,
            retransmits: self.counters.retransmits,
            bytes_in: receive.received,
            bytes_out: self.counters.bytes_out,
            segments_in: self.counters.segments_in,
            segments_out: self.counters.segments_out,
            receive_queue: receive.buffer.len(),
            send_queue: send.buffer.len(),
            unsent: send.unsent(),
            send_window: send.window,
            receive_window: receive.offered(),
            send_buffer: send.limit(),
            receive_buffer: receive.limit(),
            send_scale: send.scale,
            receive_scale: receive.scale,
            timestamps: self.timestamps.is_some(),
            sack: self.sack,
            window_scaling: self.scaling,
            congestion: send.congestion.kind(),
            pacing_rate: send
                .pacing_rate(self.options.max_pacing)
                .or_else(|| send.window_rate()),
            delivery_rate: send.delivery_rate(),
            rate_limited_by_application: send.is_rate_limited_by_application(),
            ecn: self.ecn.is_some(),
            undone: send.undone,
            fast_recovery: matches!(send.ca_state, CaState::Recovery { .. }),
            loss_recovery: matches!(send.ca_state, CaState::Loss { .. }),
            last_data_sent: send.last_sent,
            last_data_received: receive.last_data,
            last_heard: self.last_rx,
            full_segment_in: receive.segment,
            ack_delay: receive.ato(),
            pingpong: receive.pingpong,
            data_segments_in: self.counters.data_in,
            data_segments_out: self.counters.data_out,
            bytes_retransmitted: self.counters.bytes_retransmitted,
            bytes_acknowledged: self.counters.bytes_acknowledged,
            out_of_order: receive.out_of_order,
            receive_rtt: receive.measured_rtt(),
            receive_space: receive.space(),
            keepalives: self.keepalives,
            chronometer: self.chronometer,
            early_data: self.early_data,
            duplicates_reported: send.duplicates_reported,
            delivered_marked: self.counters.delivered_marked,
            reordering: send.board.reordering(),
            reorderings: send.board.reorderings(),
        }
    }

    /// What was sent and is neither in flight nor lost has arrived, and so has the SYN of the handshake.
    fn segments_delivered(&self) -> u64 {
        let Counters {
            data_out,
            retransmits,
            ..
        } = self.counters;
        let missing = u64::from(self.send.board.segments_missing(self.send.mss));
        let once = data_out.saturating_sub(retransmits.saturating_add(missing));
        once + u64::from(self.state.is_synchronized())
    }

    /// Where sending stands.
    pub fn edges(&self) -> SendSpace {
        SendSpace {
            una: self.send.una,
            nxt: self.send.nxt,
            end: self.send.data_end(),
        }
    }

    // ---- active demultiplexing ----

    /// Would the peer use a handle?
    pub fn takes_handles(&self) -> bool {
        self.demux.is_some()
    }

    /// The session has a receiver of its own, whom the peer's packets find by `handle`.
    pub fn advertise(&mut self, handle: Handle) {
        let edge = self.edge();
        if let Some(demux) = &mut self.demux {
            demux.advertise(handle, edge);
        }
    }

    /// What was advertised leads nowhere any more.
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

    /// RFC 5927 §4: only what is in flight can have caused an error.
    pub fn is_in_flight(&self, seq: SeqNum) -> bool {
        seq.at_or_after(self.send.una) && seq.before(self.send.nxt)
    }

    /// Bounds what leaves at once, where a larger burst would hold up others.
    pub fn limit_bursts(&mut self, bytes: Option<u32>) {
        self.send.limit_bursts(bytes);
    }

    /// What a packet on the path holds beside IP and TCP headers, as far as is known now: more after
    /// a report has aged (RFC 1191 §6.3) or a larger probe has arrived (RFC 8899), less for a new
    /// route. What is in flight is left to loss recovery.
    pub fn set_path_mtu(&mut self, payload: u16) {
        let payload = self.without_options(payload).min(self.send.mss_limit);
        let mss = self.clamped(payload);
        if self.path.is_searching() {
            // What vanishes without a report is not disproved by there being none.
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

    /// An ICMP error that quotes a segment of this connection (RFC 5927).
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
            // RFC 5927 §4: only what is in flight can have caused it.
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
