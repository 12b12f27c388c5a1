//! `struct tcp_info` as Linux 6.1 lays it out (`include/uapi/linux/tcp.h`). Counts of segments are
//! made from bytes: the engine keeps no list of packets.

use std::time::Duration;

use portolan_local::Stream;
use portolan_tcp::{StateName, TcpInfo};
use portolan_types::Instant;

use crate::socket::SocketPhase;

/// Bytes of the structure; callers get what fits their buffer.
const LENGTH: usize = 232;

/// `TCPI_OPT_…`.
const TIMESTAMPS: u8 = 1;
const SACK: u8 = 2;
const WINDOW_SCALE: u8 = 4;
const ECN: u8 = 8;
const SYN_DATA: u8 = 32;

/// `enum tcp_ca_state`.
const OPEN: u8 = 0;
const DISORDER: u8 = 1;
const RECOVERY: u8 = 3;
const LOSS: u8 = 4;

/// What Linux shows before anything is known.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// No window reaches this: the engine's threshold before a loss lies above.
const UNSET_THRESHOLD: u32 = 1 << 29;

/// What a socket without a connection shows: its state.
pub(super) fn of_phase(phase: SocketPhase) -> Vec<u8> {
    let mut info = vec![0; LENGTH];
    info[0] = match phase {
        SocketPhase::Listening => 10,
        SocketPhase::Connecting => 2,
        _ => 7,
    };
    info
}

/// The connection's own figures; `path_mtu` is the route's, `max_pacing` the application's.
pub(super) fn of_connection(
    connection: &dyn Stream,
    path_mtu: u32,
    max_pacing: Option<u64>,
    now: Instant,
) -> Vec<u8> {
    let figures = connection.tcp_info();
    let mut info = Writer {
        bytes: vec![0; LENGTH],
        at: 0,
    };
    put_bytes(&mut info, &figures, connection.state());
    let again = connection.retransmissions_in_flight();
    put_path(&mut info, &figures, again, path_mtu, now);
    put_rates(&mut info, &figures, max_pacing.unwrap_or(u64::MAX));
    put_counts(&mut info, &figures);
    debug_assert_eq!(info.at, LENGTH);
    info.bytes
}

fn put_bytes(info: &mut Writer, figures: &TcpInfo, state: StateName) {
    let out_of_order = figures.sacked > 0;
    let congestion = match (figures.loss_recovery, figures.fast_recovery) {
        (true, _) => LOSS,
        (_, true) => RECOVERY,
        _ if out_of_order => DISORDER,
        _ => OPEN,
    };
    let flag = |on: bool, bit: u8| if on { bit } else { 0 };
    let options = flag(figures.timestamps, TIMESTAMPS)
        | flag(figures.sack, SACK)
        | flag(figures.window_scaling, WINDOW_SCALE)
        | flag(figures.ecn, ECN)
        | flag(figures.early_data, SYN_DATA);
    info.byte(linux_state(state));
    info.byte(congestion);
    info.byte(capped(figures.backoff));
    info.byte(capped(figures.probes.max(figures.keepalives)));
    info.byte(capped(figures.backoff.max(figures.probes)));
    info.byte(options);
    info.byte(figures.send_scale & 0xf | figures.receive_scale << 4);
    info.byte(0);
}

fn put_path(info: &mut Writer, figures: &TcpInfo, again: u32, path_mtu: u32, now: Instant) {
    let per_segment = |bytes: u32| bytes.div_ceil(figures.mss.max(1));
    let since = |then| millis(now.since(then));
    info.word(micros(figures.rto));
    info.word(micros(figures.ack_delay));
    info.word(figures.mss);
    info.word(figures.full_segment_in);
    info.word(per_segment(figures.unacknowledged));
    info.word(per_segment(figures.sacked));
    info.word(per_segment(figures.lost));
    info.word(again);
    info.word(0); // fackets, which Linux no longer counts
    info.word(since(figures.last_data_sent));
    info.word(0); // last_ack_sent: "not remembered, sorry"
    info.word(since(figures.last_data_received));
    info.word(since(figures.last_heard));
    info.word(path_mtu);
    info.word(figures.receive_window);
    info.word(figures.srtt.map_or(0, micros));
    info.word(micros(figures.rttvar));
    info.word(match figures.ssthresh {
        UNSET_THRESHOLD.. => NO_THRESHOLD,
        bytes => bytes / figures.mss.max(1),
    });
    info.word(figures.cwnd / figures.mss.max(1));
    info.word(figures.receive_mss);
    info.word(figures.reordering);
    info.word(micros(figures.receive_rtt));
    info.word(figures.receive_space);
    info.word(narrow(figures.retransmits));
}

/// Pacing as Linux computes it, also where nothing paces: twice the window per round trip in slow
/// start, 1.2 times afterwards.
fn put_rates(info: &mut Writer, figures: &TcpInfo, max_pacing: u64) {
    let rate = figures.srtt.map_or(u64::MAX, |srtt| {
        let ratio = if figures.cwnd < figures.ssthresh / 2 {
            200
        } else {
            120
        };
        let per_second = u128::from(figures.cwnd) * ratio * 10_000_000;
        u64::try_from(per_second / srtt.as_nanos().max(1)).unwrap_or(u64::MAX)
    });
    let rate = figures.pacing_rate.unwrap_or(rate);
    info.long(rate.min(max_pacing));
    info.long(max_pacing);
    info.long(figures.bytes_acknowledged);
    info.long(figures.bytes_in);
}

fn put_counts(info: &mut Writer, figures: &TcpInfo) {
    info.word(narrow(figures.segments_out));
    info.word(narrow(figures.segments_in));
    info.word(figures.unsent);
    info.word(figures.min_rtt.map_or(u32::MAX, micros));
    info.word(narrow(figures.data_segments_in));
    info.word(narrow(figures.data_segments_out));
    info.long(figures.delivery_rate.unwrap_or_else(|| least_rate(figures)));
    info.long(long_micros(figures.busy));
    info.long(long_micros(figures.window_limited));
    info.long(long_micros(figures.buffer_limited));
    let delivered = figures.bytes_acknowledged + u64::from(figures.sacked);
    info.word(narrow(delivered.div_ceil(u64::from(figures.mss.max(1)))));
    info.word(narrow(figures.delivered_marked));
    info.long(figures.bytes_out);
    info.long(figures.bytes_retransmitted);
    info.word(figures.duplicates_reported);
    info.word(figures.reorderings);
    info.word(narrow(figures.out_of_order));
    info.word(figures.send_window);
}

/// What was delivered in one round trip at most, while no flight was large enough to tell more.
fn least_rate(figures: &TcpInfo) -> u64 {
    let Some(srtt) = figures.srtt else { return 0 };
    let bytes = u64::from(figures.cwnd).min(figures.bytes_acknowledged);
    let rate = u128::from(bytes) * 1_000_000_000 / srtt.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// `enum` of `include/net/tcp_states.h`.
fn linux_state(state: StateName) -> u8 {
    match state {
        StateName::Established => 1,
        StateName::SynSent => 2,
        StateName::SynReceived => 3,
        StateName::FinWait1 => 4,
        StateName::FinWait2 => 5,
        StateName::TimeWait => 6,
        StateName::Closed => 7,
        StateName::CloseWait => 8,
        StateName::LastAck => 9,
        StateName::Closing => 11,
    }
}

fn capped(number: u32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

fn long_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Fills the structure from the front.
struct Writer {
    bytes: Vec<u8>,
    at: usize,
}

impl Writer {
    fn byte(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn word(&mut self, value: u32) {
        self.put(&value.to_ne_bytes());
    }

    fn long(&mut self, value: u64) {
        self.put(&value.to_ne_bytes());
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}
