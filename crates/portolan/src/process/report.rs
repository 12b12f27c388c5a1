//! Statistics of the sessions held here, as `portolan ss` shows them.

use std::time::Duration;

use portolan_local::Stream;
use portolan_proto::report::{STATE_NAMES, SessionFigures, StatisticsRow};
use portolan_stack::{SPUN_US, Session, UdpSession};
use portolan_types::SessionId;

use crate::process::Process;
use crate::runtime::Core;

impl Process {
    /// Publishes the statistics of all sessions to the server.
    pub(crate) fn publish(&self, core: &mut Core) {
        core.stack.observe_round_trips();
        for (slot, session) in core.stack.iter() {
            // The server shows what it knows.
            if core.unregistered.has(slot) {
                continue;
            }
            let spent = core.channel.accounts.spent(slot);
            core.statistics.publish(slot, &row(session, spent));
        }
        for (slot, id, end) in core.locals.iter() {
            core.statistics.publish(slot, &stream_row(id, end));
        }
        for (slot, row) in core.delegations.rows() {
            core.statistics.publish(slot, &row);
        }
        for (row, figures) in core.inboxes.rows() {
            core.statistics.publish_raw(row, &figures);
        }
        let mut counters = core.stack.counters();
        counters[SPUN_US] = u64::try_from(self.spinner.spun().as_micros()).unwrap_or(u64::MAX);
        core.statistics.publish_counters(&counters);
    }
}

fn row(session: &Session, spent: Duration) -> StatisticsRow {
    let mut row = match session {
        Session::Tcp(session) => stream_row(session.id, &session.connection),
        Session::Udp(session) => udp_row(session),
    };
    row.figures.cpu_us = u64::try_from(spent.as_micros()).unwrap_or(u64::MAX);
    row
}

fn stream_row(session: SessionId, stream: &dyn Stream) -> StatisticsRow {
    let figures = stream.tcp_info();
    let timer = stream.running_timer();
    let state = stream.state().to_string();
    let state = STATE_NAMES
        .iter()
        .position(|&name| name == state)
        .unwrap_or(0);
    StatisticsRow {
        session: session.0,
        state: state as u32,
        reserved: 0,
        figures: SessionFigures {
            bytes_in: figures.bytes_in,
            bytes_out: figures.bytes_out,
            segments_in: figures.segments_in,
            segments_out: figures.segments_out,
            retransmits: figures.retransmits,
            cpu_us: 0,
            receive_queue: clamp(figures.receive_queue),
            send_queue: clamp(figures.send_queue),
            cwnd: figures.cwnd,
            ssthresh: figures.ssthresh,
            srtt_us: figures.srtt.map_or(0, micros),
            rttvar_us: micros(figures.rttvar),
            rto_us: micros(figures.rto),
            mss: figures.mss,
            receive_window: figures.receive_window,
            send_window: figures.send_window,
            timer: timer.map_or(0, |(kind, _)| kind as u32),
            retries: figures.backoff.max(figures.probes).max(figures.keepalives),
            timer_at: timer.map_or(0, |(_, due)| due.as_nanos()),
            events: *stream.counts(),
        },
    }
}

fn udp_row(session: &UdpSession) -> StatisticsRow {
    let connected = STATE_NAMES
        .iter()
        .position(|&name| name == "ESTAB")
        .unwrap_or(0);
    StatisticsRow {
        session: session.id.0,
        state: if session.remote.is_some() {
            connected as u32
        } else {
            0
        },
        reserved: 0,
        figures: SessionFigures {
            bytes_in: session.bytes_in,
            bytes_out: session.bytes_out,
            segments_in: session.datagrams_in,
            segments_out: session.datagrams_out,
            receive_queue: clamp(session.queue.iter().map(|d| d.data.len()).sum()),
            ..SessionFigures::default()
        },
    }
}

fn clamp(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
