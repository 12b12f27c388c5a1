//! What the server is told of a flood of SYNs at a delegated port, so that the packet filter answers it
//! (ADR 22): that there is one, which flows the filter must leave alone, and whether there is room.

use core::time::Duration;

use portolan_proto::control::AcceptQueue;
use portolan_types::{FlowKey, Instant};

/// The server ends floods by itself, and tells nobody: another is told of again after that time, in which the server
/// looks at floods once.
const AGAIN: Duration = Duration::from_millis(100);

/// For so long SYNs may come that were on their way when a flood was told of.
const SETTLED: Duration = Duration::from_secs(1);

/// Flows that one report names.
const FLOWS_MAX: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FloodReport {
    /// Connections that the filter knows no rows of.
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
    /// There are cookies about that were not made here.
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

    /// A SYN was kept. Those that come after a while were not the filter's to answer.
    pub(super) fn note_kept(&mut self, now: Instant, flow: FlowKey) {
        if self.was_told_within(SETTLED, now) {
            self.pending.push(FloodReport::ExemptFlows(vec![flow]));
        }
    }

    /// A connection came by a cookie, the filter's perhaps.
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
