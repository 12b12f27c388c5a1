//! A session as a row of `portolan ss`.

use portolan_proto::control::Delivery;
use portolan_proto::report::{
    DeliveryReport, ListenerReport, Mapping, SessionFigures, SessionReport, SharedReason,
    TIMER_NAMES,
};
use portolan_sys::clock;
use portolan_tcp::EVENTS;
use portolan_types::Instant;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Map;

use super::{Place, SocketView};
use crate::json;

/// A threshold of this size or larger has not been set yet.
const INFINITE: u32 = 1 << 30;

/// Live figures; for UDP, those of TCP are zero. Of the kernel's sockets, connections have figures.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct FiguresView {
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub segments_in: u64,
    pub segments_out: u64,
    pub retransmits: u64,
    /// CPU time of protocol processing in microseconds, estimated from samples; null for the kernel's sockets.
    pub cpu_us: Option<u64>,
    /// In bytes.
    pub cwnd_bytes: u32,
    /// In segments of `mss`.
    pub cwnd: u32,
    /// In bytes; null: not set yet.
    pub ssthresh_bytes: Option<u32>,
    pub srtt_us: u32,
    pub rttvar_us: u32,
    pub rto_us: u32,
    pub mss: u32,
    /// Null for the kernel's sockets.
    pub receive_window: Option<u32>,
    pub send_window: u32,
    /// `off`, `on`, `keepalive`, `timewait` or `persist`.
    pub timer: &'static str,
    /// Null: no timer runs.
    pub timer_ms: Option<u64>,
    /// Consecutive retransmissions or probes.
    pub retries: u32,
    /// Counts that are not zero, by their names in the reference of counters.
    pub events: Map<String, serde_json::Value>,
}

/// State and counts of a TCP listener.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct ListenerView {
    /// A program performs its handshakes.
    pub delegated: bool,
    /// The packet filter answers its SYNs now.
    pub flooded: bool,
    pub floods: u64,
    pub syns_answered: u64,
    pub syns_dropped: u64,
    pub cookies_sent: u64,
    pub cookies_good: u64,
    pub cookies_bad: u64,
}

pub(super) fn view(session: &SessionReport) -> SocketView {
    let (mapping, mapping_refused) = mapping(session.mapping);
    let (delivery, delivery_refused) = match session.delivery {
        DeliveryReport::As(form) => (form, None),
        DeliveryReport::NotInDriver => (Delivery::Shm, Some("no-driver-hook")),
    };
    let place = Place::of(session.protocol, session.local, session.remote);
    let protocol = json::protocol(session.protocol);
    SocketView {
        receive_queue: session.figures.receive_queue.into(),
        send_queue: session.figures.send_queue.into(),
        holder: Some((&session.holder).into()),
        uid: session.uid,
        session: json::session(session.session),
        migrations: Some(session.migrations),
        mapping: Some(mapping),
        mapping_refused,
        delivery: Some(delivery.name()),
        delivery_refused,
        figures: Some(figures(&session.figures, clock::now())),
        listener: session.listener.as_ref().map(listener),
        ..SocketView::bare("portolan", protocol, &session.state, place)
    }
}

fn mapping(mapping: Mapping) -> (&'static str, Option<String>) {
    let reason = |reason: &str| ("shared", Some(reason.to_owned()));
    match mapping {
        Mapping::Shared => ("shared", None),
        Mapping::Direct => ("direct", None),
        Mapping::Refused(SharedReason::ProcessLimit) => reason("process-limit"),
        Mapping::Refused(SharedReason::HostLimit) => reason("host-limit"),
        Mapping::Refused(SharedReason::Delivery) => reason("delivery"),
        Mapping::Refused(SharedReason::NotMade) => reason("not-made"),
    }
}

fn figures(figures: &SessionFigures, now: Instant) -> FiguresView {
    let timer = TIMER_NAMES.get(figures.timer as usize);
    let left = figures.timer_at.saturating_sub(now.as_nanos()) / 1_000_000;
    FiguresView {
        bytes_in: figures.bytes_in,
        bytes_out: figures.bytes_out,
        segments_in: figures.segments_in,
        segments_out: figures.segments_out,
        retransmits: figures.retransmits,
        cpu_us: Some(figures.cpu_us),
        cwnd_bytes: figures.cwnd,
        cwnd: segments(figures.cwnd, figures.mss),
        ssthresh_bytes: Some(figures.ssthresh).filter(|&bytes| bytes < INFINITE),
        srtt_us: figures.srtt_us,
        rttvar_us: figures.rttvar_us,
        rto_us: figures.rto_us,
        mss: figures.mss,
        receive_window: Some(figures.receive_window),
        send_window: figures.send_window,
        timer: timer.unwrap_or(&TIMER_NAMES[0]),
        timer_ms: (figures.timer != 0).then_some(left),
        retries: figures.retries,
        events: events(figures),
    }
}

/// Converts a window to segments, in which the kernel counts it.
pub(super) fn segments(bytes: u32, mss: u32) -> u32 {
    bytes.checked_div(mss).unwrap_or(0)
}

/// Returns the event counts that are not zero.
fn events(figures: &SessionFigures) -> Map<String, serde_json::Value> {
    let named = EVENTS.iter().map(|(name, _)| *name).zip(figures.events);
    let some = named.filter(|(_, count)| *count != 0);
    some.map(|(name, count)| (name.to_owned(), count.into()))
        .collect()
}

fn listener(report: &ListenerReport) -> ListenerView {
    ListenerView {
        delegated: report.is_delegated,
        flooded: report.is_flooded,
        floods: report.filter.floods,
        syns_answered: report.filter.answered,
        syns_dropped: report.filter.dropped,
        cookies_sent: report.cookies.sent,
        cookies_good: report.cookies.accepted,
        cookies_bad: report.cookies.refused,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use portolan_proto::report::Holder;
    use portolan_types::{Protocol, SessionId};

    use super::*;

    pub(crate) fn established() -> SessionReport {
        SessionReport {
            session: SessionId(u64::MAX),
            protocol: Protocol::Tcp,
            local: "10.0.0.2:80".parse().unwrap(),
            remote: Some("10.0.0.1:40000".parse().unwrap()),
            holder: Holder::Process {
                pid: 42,
                program: "nginx".into(),
            },
            uid: 33,
            state: "ESTAB".into(),
            migrations: 1,
            mapping: Mapping::Shared,
            delivery: DeliveryReport::As(Delivery::Shm),
            listener: None,
            figures: SessionFigures {
                send_queue: 5,
                srtt_us: 1_250,
                mss: 1448,
                cwnd: 14_480,
                ssthresh: INFINITE,
                ..Default::default()
            },
        }
    }

    pub(crate) fn unconnected() -> SessionReport {
        SessionReport {
            protocol: Protocol::Udp,
            remote: None,
            holder: Holder::Relayed,
            state: "UNCONN".into(),
            ..established()
        }
    }

    pub(crate) fn listening() -> SessionReport {
        SessionReport {
            remote: None,
            state: "LISTEN".into(),
            listener: Some(ListenerReport::default()),
            figures: SessionFigures {
                receive_queue: 3,
                send_queue: 511,
                ..Default::default()
            },
            ..established()
        }
    }

    #[test]
    fn numbers_of_sessions_are_strings_and_hidden_ones_null() {
        let value = serde_json::to_value(view(&established())).unwrap();
        assert_eq!(value["session"], u64::MAX.to_string());
        assert_eq!(value["holder"]["kind"], "process");
        assert_eq!(value["figures"]["ssthresh_bytes"], serde_json::Value::Null);
        let hidden = SessionReport {
            session: SessionId(0),
            ..established()
        };
        let value = serde_json::to_value(view(&hidden)).unwrap();
        assert_eq!(value["session"], serde_json::Value::Null);
    }

    #[test]
    fn a_ring_of_its_own_is_told_and_why_there_is_none() {
        let with = |mapping| {
            let view = view(&SessionReport {
                mapping,
                ..established()
            });
            (view.mapping.unwrap(), view.mapping_refused)
        };
        assert_eq!(with(Mapping::Shared), ("shared", None));
        assert_eq!(with(Mapping::Direct), ("direct", None));
        let refused = with(Mapping::Refused(SharedReason::ProcessLimit));
        assert_eq!(refused, ("shared", Some("process-limit".to_owned())));
    }

    #[test]
    fn events_that_happened_are_named() {
        let mut session = established();
        session.figures.events[0] = 3;
        let events = view(&session).figures.unwrap().events;
        assert_eq!(events.len(), 1);
        assert_eq!(events[EVENTS[0].0], 3);
    }

    #[test]
    fn a_timer_says_how_long_it_has_still_to_run() {
        let running = SessionFigures {
            timer: 1,
            retries: 2,
            timer_at: 1_500_000_000,
            ..Default::default()
        };
        let shown = figures(&running, Instant::from_nanos(1_300_000_000));
        assert_eq!(
            (shown.timer, shown.timer_ms, shown.retries),
            ("on", Some(200), 2)
        );
        let odd = SessionFigures {
            timer: 77,
            ..running
        };
        assert_eq!(figures(&odd, Instant::from_nanos(0)).timer, "off");
    }
}
