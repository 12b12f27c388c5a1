//! Answers for commands: sessions, counters, status. Values of cached sessions are the claims of
//! their libraries.

use portolan_control::{Holder, SessionEntry, SessionPhase};
use portolan_local::Stream;
use portolan_proto::control::ReplyBody;
use portolan_proto::encode;
use portolan_proto::report::{
    CounterReport, FilterReport, Holder as ReportedHolder, STATE_NAMES, SessionFigures,
    SessionReport, StatisticsRow, StatusReport, TimesReport,
};
use portolan_stack::{COUNTERS, counter_names, round_trip_times};
use portolan_sys::shm::StatisticsReader;
use portolan_types::{ChannelId, Protocol};

use crate::local_ends::LocalEnd;
use crate::report::reported;
use crate::requests::Answer;
use crate::server::Server;

impl Server {
    pub(crate) fn report(&self, session: &SessionEntry) -> SessionReport {
        let row = self.claimed(session);
        let unheld = self.handles.local(session.id);
        let (state, figures) = match (session.holder, session.protocol) {
            (Holder::None, _) if unheld.is_some() => {
                let end = unheld.map(LocalEnd::open);
                end.map_or_else(Default::default, |end| {
                    (end.state().to_string(), figures(&end))
                })
            }
            (Holder::Server(slot), Protocol::Tcp) => match self.stack.get(slot) {
                Some(portolan_stack::Session::Tcp(tcp)) => (
                    tcp.connection.state().to_string(),
                    SessionFigures {
                        events: *tcp.connection.counts(),
                        ..figures(&tcp.connection)
                    },
                ),
                _ => ("LAST-ACK".to_owned(), SessionFigures::default()),
            },
            _ => (
                state_of(session, row.as_ref()),
                row.map_or_else(Default::default, |r| r.figures),
            ),
        };
        SessionReport {
            session: session.id,
            protocol: session.protocol,
            local: session.local,
            remote: session.remote,
            holder: self.holder_of(session),
            uid: session.uid,
            state,
            migrations: session.migrations,
            mapping: self.mapping_of(session),
            delivery: self.delivery_of(session.id),
            figures,
            listener: None,
        }
    }

    /// Returns the statistics that the holding library claims.
    fn claimed(&self, session: &SessionEntry) -> Option<StatisticsRow> {
        let Holder::Process(channel, slot) = session.holder else {
            return None;
        };
        let row = self.channels.get(&channel)?.statistics.row(slot)?;
        (row.session == session.id.0).then_some(row)
    }

    fn holder_of(&self, session: &SessionEntry) -> ReportedHolder {
        let channel = match session.holder {
            Holder::Process(channel, _) => Some(channel),
            // The server performs the work of a listener, but its port belongs to a process.
            _ if matches!(
                session.phase(),
                SessionPhase::Listening | SessionPhase::Bound
            ) =>
            {
                session.owner()
            }
            _ => None,
        };
        match channel.and_then(|channel| self.control.registry.process(channel)) {
            Some(process) => reported(process),
            None if session.phase() == SessionPhase::Relayed => ReportedHolder::Relayed,
            None => ReportedHolder::Server,
        }
    }

    /// Returns all counters of filters and server, and those of sessions: of all holders together,
    /// then of each. The values of libraries are their claims.
    pub(crate) fn read_counters(&mut self) -> Answer {
        self.control.counters.wire_overflow = self.wire.lost;
        self.control.counters.reinject_failed = self.inject.lost;
        self.count_refusals();
        let fragments = self.stack.fragment_counters();
        let mut counters = self
            .control
            .counters
            .report(fragments, self.early.unclaimed);
        counters.extend(
            self.filter
                .counters()
                .into_iter()
                .map(|counter| CounterReport {
                    group: counter.group.to_owned(),
                    name: counter.name.to_owned(),
                    value: counter.value,
                    holder: None,
                }),
        );
        self.report_holders(&mut counters);
        Answer::List(encode(&counters), ReplyBody::Counters)
    }

    fn count_refusals(&mut self) {
        let [processes, sessions, bindings] = self.control.registry.refusals();
        self.control.counters.connections_refused = self.connections.refused();
        self.control.counters.processes_refused = processes;
        self.control.counters.sessions_refused = sessions;
        self.control.counters.bindings_refused = bindings;
        self.control.counters.shared_ports_refused = self.sharing.refused();
        self.control.counters.groups_refused = self.sharing.refused_groups();
    }

    /// Returns what the library of each process claims.
    fn claimed_counters(&self) -> impl Iterator<Item = (ChannelId, [u64; COUNTERS])> {
        self.channels.iter().map(|(channel, ends)| {
            let mut claimed = [0; COUNTERS];
            add(&mut claimed, &ends.statistics.counters());
            (*channel, claimed)
        })
    }

    /// Returns the sums of the counters of all holders, former ones included. `claimed` are those of the processes.
    fn sum_of_holders(&self, claimed: impl Iterator<Item = [u64; COUNTERS]>) -> [u64; COUNTERS] {
        let mut sum = self.ended;
        add(&mut sum, &self.stack.counters());
        claimed.for_each(|counters| add(&mut sum, &counters));
        sum
    }

    fn report_holders(&self, counters: &mut Vec<CounterReport>) {
        // Read once: a sum is that of the parts.
        let claimed: Vec<_> = self.claimed_counters().collect();
        let sum = self.sum_of_holders(claimed.iter().map(|(_, counters)| *counters));
        let mut holders = vec![(ReportedHolder::Server, self.stack.counters())];
        for (channel, claimed) in claimed {
            if let Some(process) = self.control.registry.process(channel) {
                let holder = reported(process);
                counters.extend(self.losses_of(channel, &holder));
                holders.push((holder, claimed));
            }
        }
        counters.extend(name_counters(&sum, None));
        for (holder, values) in holders {
            // Zeros are omitted: there may be many processes.
            let named = name_counters(&values, Some(holder));
            counters.extend(named.filter(|counter| counter.value != 0));
        }
    }

    /// Returns what the packet filter dropped of a process, if anything; not a claim of the process.
    fn losses_of(
        &self,
        channel: ChannelId,
        holder: &ReportedHolder,
    ) -> impl Iterator<Item = CounterReport> {
        let losses = self.filter.losses(channel);
        let named = [
            ("drop_ring_full", losses.ring_full),
            ("drop_over_budget", losses.over_budget),
            ("drop_early", losses.early),
        ];
        let some = named.into_iter().filter(|(_, value)| *value != 0);
        some.map(|(name, value)| CounterReport {
            group: "receive".to_owned(),
            name: name.to_owned(),
            value,
            holder: Some(holder.clone()),
        })
    }

    /// Adds the counters of an exited process to the sum.
    pub(crate) fn add_to_ended(&mut self, statistics: &StatisticsReader) {
        add(&mut self.ended, &statistics.counters());
    }

    pub(crate) fn read_status(&mut self) -> Answer {
        self.stack.observe_round_trips();
        let claimed = self.claimed_counters().map(|(_, counters)| counters);
        let holders = self.sum_of_holders(claimed);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let run_time = self.filter.run_time();
        ReplyBody::Status(StatusReport {
            version: portolan_manual::release(),
            protocol: portolan_proto::PROTOCOL,
            pid: std::process::id(),
            config: self
                .source
                .file
                .as_ref()
                .map(|path| path.display().to_string()),
            interfaces: self.config.interfaces.clone(),
            processes: count(self.control.registry.process_count()),
            sessions: count(self.control.registry.session_count()),
            direct: count(self.directs.taken()),
            uptime_s: self.now.since(self.started).as_secs(),
            filter: FilterReport {
                algorithm: self.config.filter.algorithm.name().to_owned(),
                runs: run_time.runs,
                nanoseconds: run_time.nanoseconds,
                driver_hooks: self.report_driver_hooks(),
            },
            obeys_policy: self.obeys_policy,
            faults: self.faults(),
            times: Box::new(TimesReport {
                round_trips: round_trip_times(&holders),
                migrations: self.control.migration_times,
            }),
        })
        .into()
    }
}

fn add(sum: &mut [u64; COUNTERS], counters: &[u64]) {
    for (sum, count) in sum.iter_mut().zip(counters) {
        *sum = sum.wrapping_add(*count);
    }
}

fn name_counters(
    values: &[u64; COUNTERS],
    holder: Option<ReportedHolder>,
) -> impl Iterator<Item = CounterReport> {
    counter_names()
        .zip(*values)
        .map(move |((group, name, _), value)| CounterReport {
            group: group.to_owned(),
            name: name.to_owned(),
            value,
            holder: holder.clone(),
        })
}

fn state_of(session: &SessionEntry, row: Option<&StatisticsRow>) -> String {
    let claimed = row.and_then(|row| STATE_NAMES.get(row.state as usize));
    let known = match (session.protocol, session.phase()) {
        (Protocol::Tcp, SessionPhase::Listening) => "LISTEN",
        (Protocol::Tcp, SessionPhase::Connected) => claimed.copied().unwrap_or("ESTAB"),
        (Protocol::Udp, SessionPhase::Connected) => "ESTAB",
        _ => "UNCONN",
    };
    known.to_owned()
}

fn figures(stream: &dyn Stream) -> SessionFigures {
    let (f, timer) = (stream.tcp_info(), stream.running_timer());
    let micros = |d: std::time::Duration| u32::try_from(d.as_micros()).unwrap_or(u32::MAX);
    let bytes = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    SessionFigures {
        bytes_in: f.bytes_in,
        bytes_out: f.bytes_out,
        segments_in: f.segments_in,
        segments_out: f.segments_out,
        retransmits: f.retransmits,
        cpu_us: 0,
        receive_queue: bytes(f.receive_queue),
        send_queue: bytes(f.send_queue),
        cwnd: f.cwnd,
        ssthresh: f.ssthresh,
        srtt_us: f.srtt.map_or(0, micros),
        rttvar_us: micros(f.rttvar),
        rto_us: micros(f.rto),
        mss: f.mss,
        receive_window: f.receive_window,
        send_window: f.send_window,
        timer: timer.map_or(0, |(kind, _)| kind as u32),
        retries: f.backoff.max(f.probes).max(f.keepalives),
        timer_at: timer.map_or(0, |(_, due)| due.as_nanos()),
        events: Default::default(),
    }
}
