//! `struct tcp_info` in the layout of Linux 6.1 (`include/uapi/linux/tcp.h`). Numbers of segments
//! are computed from bytes: the engine keeps no list of packets.

use std::time::Duration;

use portolan_local::Stream;
use portolan_tcp::{BbrInfo, StateName, TcpInfo};
use portolan_types::Instant;

use crate::socket::SocketPhase;

/// Length of the structure in bytes; callers get as much as fits their buffer.
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

/// Linux's value before the threshold is known.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// No window reaches this: the engine's initial threshold is above it.
const UNSET_THRESHOLD: u32 = 1 << 29;

/// `TCP_TIMEOUT_INIT` in microseconds; half of it is the initial variation of the round-trip time.
const FIRST_RTO: u32 = 1_000_000;
/// `TCP_MSS_DEFAULT`, `TCP_INIT_CWND` and `tcp_reordering`.
const FIRST_MSS: u32 = 536;
const FIRST_WINDOW: u32 = 10;
const FIRST_REORDERING: u32 = 3;

/// The values of a socket without a connection; `backlog` and `waiting` are a listener's.
pub(super) fn of_phase(
    phase: SocketPhase,
    (backlog, waiting): (u32, u32),
    now: Instant,
) -> Vec<u8> {
    let is_listening = phase == SocketPhase::Listening;
    let mut info = vec![0; LENGTH];
    info[0] = match phase {
        SocketPhase::Listening => 10,
        SocketPhase::Connecting => 2,
        _ => 7,
    };
    let mut put = |at: usize, value: u32| {
        info[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    };
    put(80, FIRST_WINDOW);
    put(88, FIRST_REORDERING);
    // No rate is limited.
    for at in [104, 108, 112, 116] {
        put(at, u32::MAX);
    }
    if is_listening {
        put(24, waiting);
        put(28, backlog);
        return info;
    }
    put(8, FIRST_RTO);
    put(16, FIRST_MSS);
    put(24, u32::from(phase == SocketPhase::Connecting));
    // Times since the last data sent, data received, and acknowledgement: never.
    for at in [44, 52, 56] {
        put(at, millis(now.since(Instant::ZERO)));
    }
    put(72, FIRST_RTO / 4);
    put(76, NO_THRESHOLD);
    put(148, u32::MAX);
    info[7] = 1;
    info
}

/// `struct tcp_bbr_info`.
pub(super) fn of_bbr(figures: BbrInfo) -> Vec<u8> {
    let [low, high] = [figures.bandwidth as u32, (figures.bandwidth >> 32) as u32];
    let min_rtt = figures.min_rtt.map_or(0, micros);
    [low, high, min_rtt, figures.pacing_gain, figures.cwnd_gain]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

/// The connection's values; `path_mtu` is the route's, `max_pacing` the application's.
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
    put_counts(&mut info, &figures, now);
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
    info.byte(u8::from(figures.rate_limited_by_application));
}

fn put_path(info: &mut Writer, figures: &TcpInfo, again: u32, path_mtu: u32, now: Instant) {
    let per_segment = |bytes: u32| bytes.div_ceil(figures.mss.max(1));
    let since = |then| millis(now.since(then));
    info.word(micros(figures.rto));
    info.word(micros(figures.ack_delay));
    info.word(figures.mss);
    info.word(figures.full_segment_in);
    info.word(figures.segments_unacknowledged);
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

/// The pacing rate as Linux computes it, even if nothing is paced: twice the window per round trip
/// in slow start, 1.2 times afterwards.
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

fn put_counts(info: &mut Writer, figures: &TcpInfo, now: Instant) {
    let times = figures.chronometer.times(now);
    info.word(narrow(figures.segments_out));
    info.word(narrow(figures.segments_in));
    info.word(figures.unsent);
    info.word(figures.min_rtt.map_or(u32::MAX, micros));
    info.word(narrow(figures.data_segments_in));
    info.word(narrow(figures.data_segments_out));
    info.long(figures.delivery_rate.unwrap_or_else(|| least_rate(figures)));
    info.long(long_micros(times.busy));
    info.long(long_micros(times.window_limited));
    info.long(long_micros(times.buffer_limited));
    info.word(narrow(figures.segments_delivered));
    info.word(narrow(figures.delivered_marked));
    info.long(figures.bytes_out);
    info.long(figures.bytes_retransmitted);
    info.word(figures.duplicates_reported);
    info.word(figures.reorderings);
    info.word(narrow(figures.out_of_order));
    info.word(figures.send_window);
}

/// A lower bound of the delivery rate, while no flight was large enough to measure it: the bytes delivered in one round
/// trip.
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

/// Writes the structure from its start.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_figures_of_bbr_lie_as_in_linux() {
        let figures = BbrInfo {
            bandwidth: 0x0102_0304_0506_0708,
            min_rtt: Some(Duration::from_micros(1_500)),
            pacing_gain: 739,
            cwnd_gain: 512,
        };
        let words: Vec<u32> = of_bbr(figures)
            .chunks(4)
            .map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")))
            .collect();
        assert_eq!(words, [0x0506_0708, 0x0102_0304, 1_500, 739, 512]);
    }
}
