//! Live statistics of a connection, for `TCP_INFO` and `ss`.

use core::time::Duration;

use portolan_types::SeqNum;

use crate::chrono::Chronometer;
use crate::config::CongestionKind;

/// The timer that is running, as the kernel's `idiag_timer` numbers them.
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
    /// Bytes counted as lost, retransmitted or not.
    pub lost: u32,
    /// Segments in `unacknowledged`, and segments delivered; the SYN counts as one.
    pub segments_unacknowledged: u32,
    pub segments_delivered: u64,
    /// Consecutive time-outs.
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
    /// Bytes per second: the pacing rate, and the delivery rate measured last.
    pub pacing_rate: Option<u64>,
    pub delivery_rate: Option<u64>,
    /// The delivery rate was limited by the application, not by the path.
    pub rate_limited_by_application: bool,
    pub ecn: bool,
    /// Reductions of the window that were undone.
    pub undone: u64,
    pub fast_recovery: bool,
    pub loss_recovery: bool,
    pub last_data_sent: portolan_types::Instant,
    pub last_data_received: portolan_types::Instant,
    pub last_heard: portolan_types::Instant,
    /// The largest payload received in one segment.
    pub full_segment_in: u32,
    /// Delay of acknowledgements; zero before the first arrival.
    pub ack_delay: Duration,
    /// Acknowledgements are carried by the user's answers.
    pub pingpong: bool,
    /// Segments with payload.
    pub data_segments_in: u64,
    pub data_segments_out: u64,
    /// Bytes retransmitted.
    pub bytes_retransmitted: u64,
    pub bytes_acknowledged: u64,
    /// Segments that arrived out of order.
    pub out_of_order: u64,
    /// Round trip as estimated by the receiver; zero if unknown.
    pub receive_rtt: Duration,
    /// The most read in one round trip, or the size of the first window.
    pub receive_space: u32,
    /// Unanswered keep-alive probes.
    pub keepalives: u32,
    /// Time spent busy and limited.
    pub chronometer: Chronometer,
    /// Data sent with the SYN was accepted.
    pub early_data: bool,
    /// Segments that the peer reported as received twice (RFC 2883).
    pub duplicates_reported: u32,
    /// Segments acknowledged with a congestion mark echoed.
    pub delivered_marked: u64,
    /// Largest delay of a late segment, in segments, and the number of late segments.
    pub reordering: u32,
    pub reorderings: u32,
}

/// The send sequence space (RFC 9293 §3.3.1): the oldest unacknowledged byte, the next one to send, and the end of the
/// data queued by the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendSpace {
    pub una: SeqNum,
    pub nxt: SeqNum,
    pub end: SeqNum,
}
