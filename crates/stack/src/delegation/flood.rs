//! Reports to the server about a flood of SYNs at a delegated port, so that the packet filter answers it (ADR 22):
//! that there is one, which flows the filter must leave alone, and whether the queue has room.

use core::time::Duration;

use portolan_proto::control::AcceptQueue;
use portolan_types::{FlowKey, Instant};

/// The server ends floods by itself, and tells nobody: another is told of again after that time, in which the server
/// looks at floods once.
const AGAIN: Duration = Duration::from_millis(100);

/// How long SYNs may arrive that were in transit when a flood was reported.
const SETTLED: Duration = Duration::from_secs(1);

/// Maximum number of flows in one report.
const FLOWS_MAX: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FloodReport {
    /// Connections for which the filter has no rows.
    ExemptFlows(Vec<FlowKey>),
    Flooded(AcceptQueue),
}

#[derive(Debug, Default)]
pub(super) struct FloodReports {
    /// When it was told last, and how the queue was.
    told: Option<(Instant, AcceptQueue)>,
    pending: Vec<FloodReport>,
}

impl FloodReports {
    /// Whether a flood was reported, so that the filter may have made cookies.
    pub(super) fn is_told(&self) -> bool {
        self.told.is_some()
    }

    /// SYNs that are not kept are a flood; `known` are the connections that are.
    pub(super) fn note_flood(
        &mut self,
        now: Instant,
        queue: AcceptQueue,
        known: impl Iterator<Item = FlowKey>,
    ) {
        if self.was_told_within(AGAIN, now) {
            return;
        }
        let known: Vec<FlowKey> = known.collect();
        let reports = known.chunks(FLOWS_MAX);
        self.pending
            .extend(reports.map(|flows| FloodReport::ExemptFlows(flows.to_vec())));
        self.tell(now, queue);
    }

    fn was_told_within(&self, time: Duration, now: Instant) -> bool {
        self.told.is_some_and(|(at, _)| now.since(at) < time)
    }

    /// State was kept for a SYN: exempts its flow if a flood was just reported. The filter does not answer later ones.
    pub(super) fn note_kept(&mut self, now: Instant, flow: FlowKey) {
        if self.was_told_within(SETTLED, now) {
            self.pending.push(FloodReport::ExemptFlows(vec![flow]));
        }
    }

    /// A cookie, possibly the filter's, opened a connection.
    pub(super) fn note_opened(&mut self, now: Instant, flow: FlowKey, queue: AcceptQueue) {
        if self.is_told() {
            self.pending.push(FloodReport::ExemptFlows(vec![flow]));
            self.note_queue(now, queue);
        }
    }

    pub(super) fn note_queue(&mut self, now: Instant, queue: AcceptQueue) {
        if self.told.is_some_and(|(_, told)| told != queue) {
            self.tell(now, queue);
        }
    }

    fn tell(&mut self, now: Instant, queue: AcceptQueue) {
        self.told = Some((now, queue));
        self.pending.push(FloodReport::Flooded(queue));
    }

    pub(super) fn take(&mut self) -> Vec<FloodReport> {
        core::mem::take(&mut self.pending)
    }
}
