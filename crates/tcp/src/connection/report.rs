//! What a connection reports about itself.

use core::time::Duration;

use super::{Connection, Counters};
use crate::cc::BbrInfo;
use crate::config::CongestionKind;
use crate::event_counters::EVENTS_MAX;
use crate::send::CaState;
use crate::tcp_info::{SendSpace, TcpInfo};

impl Connection {
    pub fn congestion(&self) -> CongestionKind {
        self.send.congestion.kind()
    }

    /// The value of `TCP_CC_INFO`, if the algorithm has one.
    pub fn congestion_info(&self) -> Option<BbrInfo> {
        self.send.congestion.info()
    }

    /// How often each of [`EVENTS`](crate::EVENTS) occurred.
    pub fn counts(&self) -> &[u32; EVENTS_MAX] {
        self.event_counters.counts()
    }

    /// Retransmitted segments that are neither acknowledged nor counted as lost since.
    pub fn retransmissions_in_flight(&self) -> u32 {
        self.send.board.retransmitted().div_ceil(self.send.mss)
    }

    /// The smoothed round-trip time; None before the first sample.
    pub fn smoothed_rtt(&self) -> Option<Duration> {
        self.send.rtt.smoothed()
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

    /// Segments sent that are neither in flight nor lost have arrived, and so has the SYN of the handshake.
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

    /// The state of the send sequence space.
    pub fn edges(&self) -> SendSpace {
        SendSpace {
            una: self.send.una,
            nxt: self.send.nxt,
            end: self.send.data_end(),
        }
    }
}
