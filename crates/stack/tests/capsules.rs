//! Capsules from a hostile process: any that is accepted can be driven by packets, time and its user
//! without a panic, without an endless loop, and within bounds.

use core::time::Duration;
use std::sync::Arc;

use bolero::TypeGenerator;
use bolero::generator::*;
use portolan_proto::ip::{IpOptions, MtuDiscovery};
use portolan_stack::TcpSession;
use portolan_tcp::capsule::{Reader, Refused};
use portolan_tcp::{Config, Connection, HandoffBuffer, capsule};
use portolan_types::{FlowKey, Instant, Protocol, SeqNum, SessionId};
use portolan_wire::tcp::{SackBlock, TcpFlags, TcpHeader, Timestamps};

/// More segments than any send buffer can make due at one time.
const BURST: usize = 100_000;

fn start() -> Instant {
    Instant::from_millis(1_000_000)
}

/// An active session with bytes in flight, lost, SACKed, unread and out of order.
fn genuine(stage: u8) -> TcpSession {
    let mut now = start();
    let config = Config::default();
    let mut connection = Connection::connect(&config, 1000, 2000, SeqNum(7), now);
    drain(&mut connection, now);
    let mut header = TcpHeader {
        source_port: 2000,
        destination_port: 1000,
        seq: SeqNum(99),
        ack: SeqNum(8),
        flags: TcpFlags::SYN.with(TcpFlags::ACK),
        window: 60_000,
        ..TcpHeader::default()
    };
    header.options.mss = Some(1000);
    header.options.sack_permitted = true;
    header.options.window_scale = Some(3);
    header.options.timestamps = Some(Timestamps { value: 5, echo: 0 });
    now += Duration::from_millis(10);
    connection.on_segment(now, &header, &[]);
    drain(&mut connection, now);
    header.options = Default::default();
    header.options.timestamps = Some(Timestamps { value: 6, echo: 0 });
    header.flags = TcpFlags::ACK;
    connection.send(now, &[1; 40_000]);
    drain(&mut connection, now);
    now += Duration::from_millis(10);
    header.seq = SeqNum(100);
    header.ack = SeqNum(1008);
    header.options.sack.push(SackBlock {
        start: SeqNum(3008),
        end: SeqNum(9008),
    });
    connection.on_segment(now, &header, &[2; 500]);
    header.seq = SeqNum(1600);
    connection.on_segment(now, &header, &[3; 700]);
    drain(&mut connection, now);
    match stage % 4 {
        0 => {}
        1 => connection.shutdown_send(now),
        2 => connection.on_timer(now + Duration::from_secs(2)),
        _ => {
            header.seq = SeqNum(600);
            header.flags = TcpFlags::ACK.with(TcpFlags::FIN);
            connection.on_segment(now, &header, &[4; 1700]);
        }
    }
    TcpSession::new(
        SessionId(1),
        flow("10.0.0.1:1000", "10.0.0.2:2000"),
        connection,
    )
}

fn flow(local: &str, remote: &str) -> FlowKey {
    FlowKey {
        protocol: Protocol::Tcp,
        local: local.parse().expect("an address"),
        remote: remote.parse().expect("an address"),
    }
}

fn drain(connection: &mut Connection, now: Instant) {
    for count in 0.. {
        assert!(count < BURST, "transmits for ever: {connection:?}");
        let Some(segment) = connection.transmit(now) else {
            break;
        };
        assert!(segment.payload_len() <= 1 << 16);
    }
    connection.events();
}

#[derive(Debug, TypeGenerator)]
enum Step {
    Segment {
        seq: i16,
        ack: i16,
        flags: u8,
        window: u16,
        length: u16,
        stamp: Option<(u32, u32)>,
        block: Option<(i16, u16)>,
    },
    Timer,
    Wait(u32),
    Write(u16),
    Read(u16),
    Shutdown,
    Close,
    Again,
}

#[derive(Debug, TypeGenerator)]
struct Attack {
    stage: u8,
    /// What has arrived is stored beside the capsule.
    is_aside: bool,
    #[generator(produce::<Vec<(u16, u8)>>().with().len(0..4usize))]
    changes: Vec<(u16, u8)>,
    /// Written over whole words that hold lengths and numbers.
    #[generator(produce::<Vec<(u16, u8)>>().with().len(0..2usize))]
    insertions: Vec<(u16, u8)>,
    #[generator(produce::<Vec<Step>>().with().len(0..40usize))]
    steps: Vec<Step>,
}

#[test]
fn a_damaged_capsule_is_refused_or_harmless() {
    portolan_fuzz::check!(4000)
        .with_type::<Attack>()
        .for_each(|attack| {
            let mut session = genuine(attack.stage);
            if attack.is_aside {
                set_aside(&mut session);
            }
            let memory = session.connection.handoff().cloned();
            let mut capsule = session.to_capsule();
            // The control block lies before and after the bytes: damage these places, too.
            let length = capsule.len();
            for &(at, value) in &attack.changes {
                let at = usize::from(at) % 600;
                let at = if value % 2 == 0 { at } else { length - 1 - at };
                capsule[at] = value;
            }
            for &(at, value) in &attack.insertions {
                let at = usize::from(at) % capsule.len();
                capsule.insert(at, value);
            }
            drive(&capsule, memory, &attack.steps);
        });
}

/// The sessions whose capsules are in `tests/golden`, with version and name.
fn golden() -> Vec<(String, TcpSession)> {
    let mut connection = Connection::connect(&Config::default(), 1000, 2000, SeqNum(7), start());
    drain(&mut connection, start());
    let flow = flow("[2001:db8::1]:1000", "[fe80::2%3]:2000");
    let mut opening = TcpSession::new(SessionId(2), flow, connection);
    opening.ip = IpOptions {
        ttl: 7,
        tos: 8,
        min_ttl: 9,
        discovery: MtuDiscovery::Probe,
    };
    let stages = (0..4).map(|stage| (format!("stage-{stage}"), genuine(stage)));
    stages.chain([("opening".to_owned(), opening)]).collect()
}

/// `tests/protocol.rs` of `portolan-proto` detects changes of the fields.
#[test]
fn kept_capsules_of_this_version_are_read_and_written_as_they_are() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let is_wanted = std::env::var_os("PORTOLAN_GOLDEN").is_some();
    for (name, session) in golden() {
        let path = folder.join(format!("v{}-{name}.capsule", capsule::VERSION));
        if is_wanted {
            std::fs::write(&path, session.to_capsule()).expect("the folder is there");
        }
        let kept = std::fs::read(&path).expect("PORTOLAN_GOLDEN=1 writes files of a new version");
        let read = TcpSession::from_capsule(&kept).expect("a capsule of this version");
        assert_eq!(
            (read.id, read.flow, &read.ip),
            (session.id, session.flow, &session.ip)
        );
        assert_eq!(
            read.connection.state(),
            session.connection.state(),
            "{name}"
        );
        assert!(
            read.to_capsule() == kept,
            "{name} is not written as it was read: raise capsule::VERSION"
        );
    }
}

#[test]
fn what_is_no_capsule_is_refused_with_the_reason() {
    let genuine = genuine(0).to_capsule();
    let refused = |bytes: &[u8]| TcpSession::from_capsule(bytes).map(drop).unwrap_err();
    assert_eq!(refused(&[]), Refused::Short);
    assert_eq!(refused(&genuine[..genuine.len() - 1]), Refused::Short);
    assert_eq!(refused(&[&genuine[..], &[0]].concat()), Refused::Long(1));
    let changed = |at: usize, value: u8| {
        let mut bytes = genuine.clone();
        bytes[at] = value;
        refused(&bytes)
    };
    assert_eq!(changed(0, 2), Refused::Version(2));
    // The session's number is followed by the family of its own endpoint.
    assert_eq!(changed(9, 5), Refused::Value("the family of an endpoint"));
    // Both endpoints and the IP options are followed by the ports and the state.
    assert_eq!(changed(9 + 14 + 3, 6), Refused::Value("path MTU discovery"));
    assert_eq!(changed(9 + 14 + 4 + 4, 99), Refused::Value("State"));
}

#[test]
fn a_genuine_capsule_is_accepted_at_every_stage() {
    for stage in 0..4 {
        let mut session = genuine(stage);
        let capsule = session.to_capsule();
        assert!(TcpSession::from_capsule(&capsule).is_ok(), "stage {stage}");
        set_aside(&mut session);
        let (capsule, memory) = (session.to_capsule(), session.connection.handoff().cloned());
        assert!(TcpSession::from_parts(&capsule, memory).is_ok());
        assert!(
            stage == 3 || TcpSession::from_capsule(&capsule).is_err(),
            "its memory is missing"
        );
    }
}

#[test]
fn no_bytes_make_the_decoder_panic() {
    portolan_fuzz::check!(3000).for_each(|bytes| {
        let mut capsule = vec![capsule::VERSION];
        capsule.extend(bytes);
        drive(&capsule, None, &[]);
        drive(bytes, None, &[]);
    });
}

fn set_aside(session: &mut TcpSession) {
    let mut image = vec![0; session.connection.arrived()];
    for (at, bytes) in session.connection.arrived_pieces() {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
    assert!(session.connection.set_aside(Arc::new(image)), "it fits");
}

fn drive(capsule: &[u8], memory: Option<HandoffBuffer>, steps: &[Step]) {
    let Ok(session) = TcpSession::from_parts(capsule, memory) else {
        return;
    };
    let mut connection = session.connection;
    let mut now = start() + Duration::from_millis(30);
    let mut buffer = vec![0; 1 << 16];
    let bound = connection.tcp_info();
    let bound = bound.send_queue.max(bound.send_buffer) + bound.receive_queue + (64 << 20);
    drain(&mut connection, now);
    for step in steps {
        apply(&mut connection, &mut now, &mut buffer, step);
        drain(&mut connection, now);
        assert_eq!(
            connection.validate(),
            Ok(()),
            "after {step:?}: {connection:?}"
        );
        let figures = connection.tcp_info();
        assert!(figures.send_queue + figures.receive_queue <= bound);
    }
    rest(&mut connection, now);
}

fn apply(connection: &mut Connection, now: &mut Instant, buffer: &mut [u8], step: &Step) {
    match *step {
        Step::Segment {
            seq,
            ack,
            flags,
            window,
            length,
            stamp,
            block,
        } => {
            let mut header = TcpHeader {
                source_port: 2000,
                destination_port: 1000,
                seq: SeqNum(1000) + i32::from(seq) as u32,
                ack: SeqNum(9000) + i32::from(ack) as u32,
                flags: TcpFlags(flags),
                window,
                ..TcpHeader::default()
            };
            header.options.timestamps = stamp.map(|(value, echo)| Timestamps { value, echo });
            if let Some((start, length)) = block {
                let start = SeqNum(9000) + i32::from(start) as u32;
                header.options.sack.push(SackBlock {
                    start,
                    end: start + u32::from(length),
                });
            }
            connection.on_segment(*now, &header, &buffer[..length.into()]);
        }
        Step::Timer => {
            if let Some(at) = connection.deadline() {
                *now = (*now).max(at);
            }
            connection.on_timer(*now);
        }
        Step::Wait(micros) => *now += Duration::from_micros(micros.into()),
        Step::Write(count) => {
            connection.send(*now, &buffer[..count.into()]);
        }
        Step::Read(count) => {
            connection.recv(*now, &mut buffer[..count.into()]);
        }
        Step::Shutdown => connection.shutdown_send(*now),
        Step::Close => connection.close(*now),
        Step::Again => {
            let memory = connection.handoff().cloned();
            let bytes = capsule::to_bytes(connection);
            let reader = Reader::new(&bytes).expect("of this version");
            *connection = capsule::parse(reader, memory).expect("as it was");
        }
    }
}

/// Timers may run forever, but each must advance the clock or end.
fn rest(connection: &mut Connection, mut now: Instant) {
    let mut stood = 0;
    for _ in 0..200 {
        let Some(at) = connection.deadline() else {
            return;
        };
        stood = if at > now { 0 } else { stood + 1 };
        assert!(stood < 16, "a busy loop: {connection:?}");
        now = now.max(at);
        connection.on_timer(now);
        drain(connection, now);
    }
}
