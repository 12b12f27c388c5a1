//! Whatever a peer sends, at any time: no panic, no broken invariant, no unbounded
//! memory. The same harness is a unit test, a property test and a fuzz target.

use core::time::Duration;

use bolero::TypeGenerator;
use portolan_sim::{Packet, Pair, Side};
use portolan_tcp::{Config, Connection, IcmpError, IcmpKind, capsule};
use portolan_types::SeqNum;
use portolan_wire::tcp::{SackBlock, TcpFlags, TcpHeader, Timestamps};

/// Sequence numbers are relative to what the connection expects, so that most of them have an effect.
#[derive(Debug, TypeGenerator)]
enum Step {
    Segment {
        seq: i16,
        seq_shift: u8,
        ack: i16,
        ack_shift: u8,
        flags: u8,
        window: u16,
        length: u16,
        stamp: Option<(i8, i8)>,
        sack: [(i16, u16); 4],
        blocks: u8,
    },
    Send(u16),
    Receive(u16),
    Wait(u32),
    Timer,
    ShutdownSend,
    ShutdownReceive,
    Close,
    Abort,
    Option {
        kind: u8,
        value: u16,
    },
    Icmp {
        offset: i16,
        mtu: u16,
        kind: u8,
    },
    Migrate,
}

/// The peer's view of a connection: the numbers in its last segment.
#[derive(Clone, Copy)]
struct View {
    seq: SeqNum,
    ack: SeqNum,
    stamp: u32,
}

fn watch(pair: &mut Pair, view: &mut View) {
    pair.flush(Side::A);
    while let Some(packet) = pair.a_to_b.receive(pair.now + Duration::from_secs(1)) {
        view.seq = packet.header.seq + packet.payload.len() as u32;
        view.ack = packet.header.ack;
        view.stamp = packet
            .header
            .options
            .timestamps
            .map_or(view.stamp, |t| t.value);
    }
}

fn offset(base: SeqNum, by: i16, shift: u8) -> SeqNum {
    base + ((i32::from(by) << (shift % 17)) as u32)
}

fn apply(pair: &mut Pair, view: &mut View, step: &Step) {
    let now = pair.now;
    let mut buffer = [0; 65_536];
    match *step {
        Step::Segment {
            seq,
            seq_shift,
            ack,
            ack_shift,
            flags,
            window,
            length,
            stamp,
            sack,
            blocks,
        } => {
            let mut header = TcpHeader {
                source_port: 2000,
                destination_port: 1000,
                seq: offset(view.ack, seq, seq_shift),
                ack: offset(view.seq, ack, ack_shift),
                flags: TcpFlags(flags),
                window,
                ..TcpHeader::default()
            };
            header.options.window_scale = Some(blocks);
            header.options.mss = Some(window);
            header.options.sack_permitted = flags & 0x80 == 0;
            header.options.timestamps = stamp.map(|(value, echo)| Timestamps {
                value: (now.as_millis() as u32).wrapping_add(value as u32),
                echo: view.stamp.wrapping_add(echo as u32),
            });
            for (start, length) in sack.iter().take(usize::from(blocks % 5)) {
                let start = offset(view.seq, *start, 0);
                header.options.sack.push(SackBlock {
                    start,
                    end: start + u32::from(*length),
                });
            }
            let payload = buffer[..usize::from(length)].to_vec();
            pair.inject(Side::A, &Packet::new(header, payload));
        }
        Step::Send(count) => {
            pair.a.tcp().send(now, &buffer[..count.into()]);
        }
        Step::Receive(count) => {
            pair.a.tcp().recv(now, &mut buffer[..count.into()]);
        }
        Step::Wait(micros) => pair.now += Duration::from_micros(micros.into()),
        Step::Timer => {
            if let Some(at) = pair.a.tcp().deadline() {
                pair.now = pair.now.max(at);
                let now = pair.now;
                pair.a.tcp().on_timer(now);
            }
        }
        Step::ShutdownSend => pair.a.tcp().shutdown_send(now),
        Step::ShutdownReceive => pair.a.tcp().shutdown_receive(),
        Step::Close => pair.a.tcp().close(now),
        Step::Abort => pair.a.tcp().abort(now),
        Step::Option { kind, value } => set_option(pair.a.tcp(), kind, value),
        Step::Icmp {
            offset: by,
            mtu,
            kind,
        } => {
            let error = portolan_tcp::Error::HostUnreachable;
            let kind = match kind % 3 {
                0 => IcmpKind::TooBig { mtu_payload: mtu },
                hard => IcmpKind::Unreachable {
                    hard: hard == 1,
                    error,
                },
            };
            pair.a.tcp().on_icmp(IcmpError {
                quoted: offset(view.seq, by, 0),
                kind,
            });
        }
        Step::Migrate => {
            let capsule = capsule::to_bytes(pair.a.tcp());
            *pair.a.tcp() = capsule::from_bytes(&capsule).expect("and decode");
        }
    }
}

fn set_option(connection: &mut Connection, kind: u8, value: u16) {
    let time = Duration::from_millis(value.into());
    match kind % 8 {
        0 => connection.options().nodelay ^= true,
        1 => connection.options().cork ^= true,
        2 => connection.ack_quickly(),
        3 => connection.options().user_timeout = Some(time),
        4 => connection.options().window_clamp = Some(value.into()),
        5 => connection.set_send_buffer(value.into()),
        6 => connection.set_receive_buffer(value.into()),
        _ => {
            let keepalive = &mut connection.options().keepalive;
            keepalive.enabled ^= true;
            // The least that a socket accepts is a second.
            keepalive.idle = time + Duration::from_secs(1);
        }
    }
}

fn run(mut pair: Pair, steps: &[Step]) {
    let mut view = View {
        seq: SeqNum(0),
        ack: SeqNum(0),
        stamp: 0,
    };
    watch(&mut pair, &mut view);
    for step in steps {
        apply(&mut pair, &mut view, step);
        assert_eq!(
            pair.a.tcp().validate(),
            Ok(()),
            "after {step:?}: {:?}",
            pair.a.tcp()
        );
        watch(&mut pair, &mut view);
        assert_eq!(
            pair.a.tcp().validate(),
            Ok(()),
            "after {step:?}: {:?}",
            pair.a.tcp()
        );
    }
}

#[test]
fn an_established_connection_survives_any_peer() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<Step>>()
        .for_each(|steps| {
            let mut pair = Pair::new(1, Duration::from_millis(1), &Config::default());
            pair.establish();
            run(pair, steps);
        });
}

#[test]
fn an_opening_connection_survives_any_peer() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<Step>>()
        .for_each(|steps| {
            let mut pair = Pair::new(1, Duration::from_millis(1), &Config::default());
            pair.connect(Side::A);
            run(pair, steps);
        });
}

/// Changes one byte of a genuine capsule.
#[derive(Debug, TypeGenerator)]
struct Damage {
    at: u16,
    value: u8,
}

#[test]
fn a_damaged_capsule_is_refused_or_harmless() {
    let mut pair = Pair::new(1, Duration::from_millis(1), &Config::default());
    pair.links(|link| link.loss = 100);
    pair.establish();
    let now = pair.now;
    pair.a.tcp().send(now, &[1; 20_000]);
    pair.run_for(Duration::from_micros(3500));
    let genuine = capsule::to_bytes(pair.a.tcp());
    portolan_fuzz::check!(2000)
        .with_type::<(Vec<Damage>, Vec<Step>)>()
        .for_each(|(damages, steps)| {
            let mut capsule = genuine.clone();
            for damage in damages {
                let at = usize::from(damage.at) % capsule.len();
                capsule[at] = damage.value;
            }
            let Ok(connection) = capsule::from_bytes(&capsule) else {
                return;
            };
            if connection.validate().is_err() {
                return;
            }
            // A capsule may claim any segment size.
            let config = Config {
                mss: u16::MAX,
                ..Config::default()
            };
            let mut pair = Pair::new(1, Duration::from_millis(1), &config);
            pair.now = now;
            pair.a.connection = Some(connection);
            run(pair, steps);
        });
}
