use portolan_proto::control::Delivery;
use portolan_proto::report::{DeliveryReport, Mapping, SessionFigures};
use portolan_types::SessionId;

use super::*;

fn counter(group: &str, name: &str, value: u64) -> CounterReport {
    CounterReport {
        group: group.into(),
        name: name.into(),
        value,
        holder: None,
    }
}

fn session(program: &str) -> SessionReport {
    SessionReport {
        uid: 0,
        session: SessionId(1),
        protocol: Protocol::Tcp,
        local: ([10, 0, 0, 1], 80).into(),
        remote: Some(([10, 0, 0, 2], 4000).into()),
        holder: Holder::Process {
            pid: 7,
            program: program.into(),
        },
        state: "ESTAB".into(),
        migrations: 0,
        mapping: Mapping::Shared,
        delivery: DeliveryReport::As(Delivery::Shm),
        figures: SessionFigures {
            receive_queue: 10,
            ..SessionFigures::default()
        },
        listener: None,
    }
}

fn family<'a>(families: &'a [Family], name: &str) -> &'a Samples {
    let found = families.iter().find(|family| family.name == name);
    &found.unwrap_or_else(|| panic!("{name} is missing")).samples
}

#[test]
fn without_a_server_there_is_one_metric() {
    let families = of(None);
    assert_eq!(families.len(), 1);
    assert_eq!(
        families[0].samples,
        Samples::Gauges(vec![(Vec::new(), 0.0)])
    );
}

#[test]
fn reasons_are_labels_of_one_family() {
    let families = of_counters(&[
        counter("receive", "delivered", 5),
        counter("receive", "drop_martian", 1),
        counter("receive", "drop_syn", 2),
        counter("stack", "drop_checksum", 3),
        counter("server", "use_kernel_no_route", 4),
    ]);
    let reasons = |name| match family(&families, name) {
        Samples::Counters(samples) => samples
            .iter()
            .map(|(labels, value)| (labels[0].1.as_str(), *value))
            .collect::<Vec<_>>(),
        _ => panic!("{name} is no counter"),
    };
    assert_eq!(
        reasons("portolan_receive_drops"),
        [("martian", 1.0), ("syn", 2.0)]
    );
    assert_eq!(reasons("portolan_stack_drops"), [("checksum", 3.0)]);
    assert_eq!(
        reasons("portolan_server_kernel_sockets"),
        [("no_route", 4.0)]
    );
    assert_eq!(
        *family(&families, "portolan_receive_delivered"),
        Samples::Counters(vec![(Vec::new(), 5.0)])
    );
}

#[test]
fn counts_of_single_holders_are_left_out() {
    let of_process = CounterReport {
        holder: Some(Holder::Server),
        ..counter("tcp", "timeouts", 1)
    };
    assert_eq!(of_counters(&[of_process]), []);
}

#[test]
fn migrations_are_of_three_kinds() {
    let mut times = TimesReport::default();
    let took = std::time::Duration::from_micros(30);
    times.migrations.flushed.observe(took);
    times.round_trips.observe(took);
    let families = of_times(&times);
    let Samples::Histograms(samples) = family(&families, "portolan_migration_seconds") else {
        panic!("durations are a histogram");
    };
    let counts: Vec<_> = samples
        .iter()
        .map(|(labels, histogram)| (labels[0].1.as_str(), histogram.counts.iter().sum()))
        .collect();
    assert_eq!(counts, [("cache", 0_u64), ("flush", 1), ("recall", 0)]);
    assert_eq!(
        *family(&families, "portolan_tcp_round_trip_seconds"),
        Samples::Histograms(vec![(Vec::new(), times.round_trips)])
    );
}

#[test]
fn programs_beyond_the_bound_are_one() {
    let sessions: Vec<_> = (0..2 * PROGRAMS)
        .map(|n| session(&format!("p{n}")))
        .chain((0..3).map(|_| session("busy")))
        .collect();
    let families = of_programs(&sessions);
    let Samples::Gauges(samples) = family(&families, "portolan_program_sessions") else {
        panic!("sessions are a gauge");
    };
    assert_eq!(samples.len(), PROGRAMS + 1);
    assert_eq!(samples[0], (vec![("program", "busy".to_owned())], 3.0));
    let (last, count) = samples.last().expect("not empty");
    assert_eq!(last[0].1, "other");
    assert_eq!(*count, (PROGRAMS + 1) as f64);
}
