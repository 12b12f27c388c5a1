//! How connections begin: active and passive opens, Fast Open, and the options agreed in a handshake.

use arrayvec::ArrayVec;
use portolan_types::{Instant, SeqNum};
use portolan_wire::tcp::TcpHeader;

use super::{Connection, Counters};
use crate::challenge::Challenges;
use crate::chrono::Chronometer;
use crate::config::{Config, Options};
use crate::cookie;
use crate::demux::Demux;
use crate::ecn::Ecn;
use crate::event_counters::EventCounters;
use crate::events::Events;
use crate::fastopen::{Cookie, FastOpen, GrantedCookie};
use crate::handshake::{Agreement, FastSyn, Offer, SynReceived, SynSent};
use crate::path_mtu::PathMtu;
use crate::receive::Receiver;
use crate::send::{LARGEST_SEGMENT, Sender};
use crate::state::{Established, State};
use crate::timers::Timers;
use crate::timestamps::Timestamps;

impl Connection {
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

    /// Sends data with the SYN, or requests the cookie that a later open needs for that; must be
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

    /// Called after `open_fast` if the user already has data to send: the data will carry the
    /// acknowledgement of the SYN+ACK (Linux: `sk_write_pending`).
    pub fn expect_text(&mut self) {
        if let State::SynSent(SynSent {
            fast: Some(fast), ..
        }) = &mut self.state
        {
            fast.text_follows = true;
        }
    }

    /// Sends the peer a cookie in the SYN+ACK of a passive open.
    pub fn grant_cookie(&mut self, cookie: Cookie) {
        if let State::SynReceived(state) = &mut self.state {
            state.grant = Some(cookie.0);
        }
    }

    /// Holds a passive open: the final acknowledgement of its handshake is dropped with its data, and
    /// the SYN+ACK is retransmitted when due. Used while the listener's accept queue is full (Linux:
    /// `tcp_check_req`).
    pub fn hold_handshake(&mut self, is_held: bool) {
        if let State::SynReceived(state) = &mut self.state {
            // With Fast Open the connection was accepted by its SYN.
            state.is_held = is_held && !state.fast && !state.active;
        }
    }

    /// Accepts the data that came with the SYN of a passive open; the caller has verified its cookie.
    /// The user may answer at once.
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

    /// Takes the cookie granted by the peer; returns it once.
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

    /// A passive open whose state travelled in a SYN cookie: ESTABLISHED. The caller then passes the
    /// same segment to `on_segment`, for the data it may carry.
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

    /// Applies what the options of both SYNs agree on.
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
        self.state = self.established();
        self.send.establish(seq, window, self.send.mss);
        self.timers.clear_send();
        self.events.insert(Events::CONNECTED | Events::WRITABLE);
    }

    /// The state after the handshake: FIN-WAIT-1 if the user has already shut down sending.
    pub(crate) fn established(&self) -> State {
        if self.send.fin {
            State::FinWait1(Established.close())
        } else {
            State::Established(Established)
        }
    }

    pub(super) fn clamped(&self, mss: u32) -> u32 {
        let clamp = self
            .options
            .max_segment
            .map_or(LARGEST_SEGMENT, |clamp| u32::from(clamp).max(48));
        mss.clamp(1, LARGEST_SEGMENT).min(clamp)
    }
}
