//! Capsules from a hostile process: what is accepted can be driven by packets, time and its user
//! without a panic, without an endless loop, and within bounds.

use core::time::Duration;
use std::sync::Arc;

use bolero::TypeGenerator;
use bolero::generator::*;
use portolan_stack::TcpSession;
use portolan_tcp::{Config, Connection, HandoffBuffer};
use portolan_types::{FlowKey, Instant, Protocol, SeqNum, SessionId};
use portolan_wire::tcp::{SackBlock, TcpFlags, TcpHeader, Timestamps};

/// More segments than any send buffer makes due at one instant.
const BURST: usize = 100_000;

fn start() -> Instant {
    Instant::from_millis(1_000_000)
}

/// A session in the middle of its life: bytes in flight, lost, SACKed, unread and out of order.
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
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: "10.0.0.1:1000".parse().expect("an address"),
        remote: "10.0.0.2:2000".parse().expect("an address"),
    };
    TcpSession::new(SessionId(1), flow, connection)
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
    /// What has arrived lies beside the capsule.
    is_aside: bool,
    #[generator(produce::<Vec<(u16, u8)>>().with().len(0..4usize))]
    changes: Vec<(u16, u8)>,
    /// Written in place of whole words, where lengths and numbers are.
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
            // The control block lies behind and before the bytes: aim at its places, too.
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
        let mut capsule = vec![2];
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
            let bytes = postcard::to_allocvec(connection).expect("connections encode");
            *connection = postcard::from_bytes(&bytes).expect("and decode");
            if let Some(memory) = memory {
                connection.lead_with(memory);
            }
        }
    }
}

/// Timers may go on forever, but each moves the clock or the end.
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
