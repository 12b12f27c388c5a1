//! Live figures of a connection, for `TCP_INFO` and `ss`.

use core::time::Duration;

use portolan_types::SeqNum;

use crate::chrono::Chronometer;
use crate::config::CongestionKind;

/// What a connection waits for, as the kernel's `idiag_timer` tells it apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunningTimer {
    /// Retransmission, loss probe or reordering.
    On = 1,
    KeepAlive,
    TimeWait,
    Persist,
}

/// A snapshot; sizes and windows in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpInfo {
    pub srtt: Option<Duration>,
    pub rttvar: Duration,
    pub min_rtt: Option<Duration>,
    pub rto: Duration,
    pub cwnd: u32,
    pub ssthresh: u32,
    pub mss: u32,
    pub receive_mss: u32,
    /// Sent and not cumulatively acknowledged.
    pub unacknowledged: u32,
    pub sacked: u32,
    /// What counts as lost, sent again or not.
    pub lost: u32,
    /// Segments of `unacknowledged`, and those that have arrived; the SYN is one.
    pub segments_unacknowledged: u32,
    pub segments_delivered: u64,
    /// Time-outs in a row.
    pub backoff: u32,
    pub probes: u32,
    pub retransmits: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub segments_in: u64,
    pub segments_out: u64,
    pub receive_queue: usize,
    /// Queued bytes that the peer has not acknowledged.
    pub send_queue: usize,
    pub unsent: u32,
    pub send_window: u32,
    pub receive_window: u32,
    pub send_buffer: usize,
    pub receive_buffer: usize,
    pub send_scale: u8,
    pub receive_scale: u8,
    pub timestamps: bool,
    pub sack: bool,
    pub window_scaling: bool,
    pub congestion: CongestionKind,
    /// Bytes per second: what is sent at most, and what was delivered recently.
    pub pacing_rate: Option<u64>,
    pub delivery_rate: Option<u64>,
    /// The application, not the path, set the latter.
    pub rate_limited_by_application: bool,
    pub ecn: bool,
    /// Reductions of the window that were taken back.
    pub undone: u64,
    pub fast_recovery: bool,
    pub loss_recovery: bool,
    pub last_data_sent: portolan_types::Instant,
    pub last_data_received: portolan_types::Instant,
    pub last_heard: portolan_types::Instant,
    /// The largest payload of one segment seen.
    pub full_segment_in: u32,
    /// How long acknowledgements wait; zero before the first arrival.
    pub ack_delay: Duration,
    /// Acknowledgements ride on answers.
    pub pingpong: bool,
    /// Segments with text.
    pub data_segments_in: u64,
    pub data_segments_out: u64,
    /// Bytes sent again.
    pub bytes_retransmitted: u64,
    pub bytes_acknowledged: u64,
    /// Segments that arrived out of order.
    pub out_of_order: u64,
    /// Round trip as the receiver sees it; zero if it does not.
    pub receive_rtt: Duration,
    /// The most that was read in one round trip, or what the first window held.
    pub receive_space: u32,
    /// Keep-alive probes without an answer.
    pub keepalives: u32,
    /// What the time was spent with.
    pub chronometer: Chronometer,
    /// Text went with the SYN and was taken.
    pub early_data: bool,
    /// Segments that the peer reported to have had twice (RFC 2883).
    pub duplicates_reported: u32,
    /// Segments that arrived at a peer who echoed a congestion mark then.
    pub delivered_marked: u64,
    /// How many segments one was late, at most, and how often one was.
    pub reordering: u32,
    pub reorderings: u32,
}

/// Where sending stands (RFC 9293 §3.3.1): oldest unacknowledged byte, next to be sent, and the end of what
/// the application has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendSpace {
    pub una: SeqNum,
    pub nxt: SeqNum,
    pub end: SeqNum,
}
