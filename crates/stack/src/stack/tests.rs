//! Two stacks on one wire, without a kernel: who gets a frame, who may send, what waits.

use core::net::SocketAddr;
use core::time::Duration;

use portolan_proto::metastate::{Address, Interface, Metastate, Neighbour, Route};
use portolan_tcp::{Config, Connection, StateName};
use portolan_types::{FlowKey, MacAddr, Protocol, SeqNum, SessionId};

use super::*;
use crate::counters::round_trip_times;
use crate::frame::{Frame, Wire};
use crate::packet::Transport;
use crate::stack::output::{FAR_STEP, coarse};
use portolan_proto::ip::MtuDiscovery;
use portolan_proto::metastate::RouteKind::Unicast;

mod early;
mod expected;
mod tx_queues;

/// A wire that keeps frames, and accepts a limited number at a time.
struct KeptFrames {
    frames: Vec<Vec<u8>>,
    room: usize,
}

impl KeptFrames {
    fn with_room(room: usize) -> KeptFrames {
        KeptFrames {
            frames: Vec::new(),
            room,
        }
    }
}

impl Wire for KeptFrames {
    fn transmit(&mut self, frame: &Frame<'_>) {
        self.frames
            .push([frame.head, frame.payload[0], frame.payload[1]].concat());
    }

    fn is_full(&self) -> bool {
        self.frames.len() >= self.room
    }
}

const A: &str = "10.0.0.1:1000";
const B: &str = "10.0.0.2:2000";

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn now() -> Instant {
    Instant::from_millis(1_000)
}

/// Routes of the host at `own`, which may know its neighbour's link-layer address.
fn routes(generation: u32, own: SocketAddr, peer: SocketAddr, knows_peer: bool) -> Routes {
    let mac = |address: SocketAddr| match address.ip() {
        IpAddr::V4(v4) => MacAddr([2, 0, 0, 0, 0, v4.octets()[3]]),
        IpAddr::V6(_) => MacAddr::default(),
    };
    let interface = Interface {
        index: 2,
        name: "eth0".into(),
        mac: mac(own),
        mtu: 1500,
        up: true,
        managed: true,
    };
    let route = Route {
        destination: "10.0.0.0".parse().unwrap(),
        prefix: 24,
        gateway: None,
        interface: 2,
        source: Some(own.ip()),
        metric: 0,
        mtu: None,
        kind: Unicast,
    };
    let neighbour = Neighbour {
        interface: 2,
        address: peer.ip(),
        mac: mac(peer),
    };
    Routes::new(
        generation,
        Metastate {
            obeys_policy: false,
            interfaces: vec![interface],
            addresses: vec![Address {
                interface: 2,
                address: own.ip(),
                prefix: 24,
            }],
            routes: vec![route],
            neighbours: if knows_peer {
                vec![neighbour]
            } else {
                Vec::new()
            },
        },
    )
}

fn udp(stack: &mut Stack, own: SocketAddr) -> Slot {
    let session = UdpSession::new(SessionId(1), own, None, Generation(7), 10_000);
    stack.insert(now(), Session::Udp(Box::new(session)))
}

fn record(slot: Slot, generation: u32) -> RecordHeader {
    RecordHeader {
        slot: slot.0,
        generation,
        ..RecordHeader::default()
    }
}

/// The frame as the receiving host's filter delivers it: without the virtio-net header.
fn received(frame: &[u8]) -> &[u8] {
    &frame[10..]
}

fn send(stack: &mut Stack, slot: Slot, routes: &Routes, wire: &mut KeptFrames) -> Vec<u8> {
    stack
        .send_datagram(
            slot,
            Some(at(B)),
            [b"hel", b"lo"],
            &Sending::default(),
            routes,
            wire,
        )
        .unwrap();
    wire.frames.pop().unwrap()
}

#[test]
fn a_datagram_arrives_at_the_slot_and_generation_that_the_record_names() {
    let (mut a, mut b) = (Stack::new(now()), Stack::new(now()));
    let (from, to) = (udp(&mut a, at(A)), udp(&mut b, at(B)));
    let frame = send(
        &mut a,
        from,
        &routes(2, at(A), at(B), true),
        &mut KeptFrames::with_room(9),
    );

    let input = b.input(now(), &record(to, 7), received(&frame));
    assert!(matches!(input, Input::Delivered(slot) if slot == to));
    let datagram = b.udp(to).unwrap().receive().unwrap();
    assert_eq!(
        (datagram.from, datagram.data.as_slice()),
        (at(A), b"hello".as_slice())
    );

    let old = b.input(now(), &record(to, 6), received(&frame));
    assert!(matches!(old, Input::Unclaimed(_)), "{old:?}");
    let nobody = b.input(now(), &record(Slot(99), 7), received(&frame));
    assert!(matches!(nobody, Input::Unclaimed(_)), "{nobody:?}");
}

#[test]
fn a_damaged_datagram_is_dropped() {
    let (mut a, mut b) = (Stack::new(now()), Stack::new(now()));
    let (from, to) = (udp(&mut a, at(A)), udp(&mut b, at(B)));
    let mut frame = send(
        &mut a,
        from,
        &routes(2, at(A), at(B), true),
        &mut KeptFrames::with_room(9),
    );
    // Complete the checksum as the device would, then damage the payload.
    let (head, udp_at) = (10, 10 + 14 + 20);
    let sum: u32 = frame[udp_at..]
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    frame[udp_at + 6..udp_at + 8].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    assert!(matches!(
        b.input(now(), &record(to, 7), &frame[head..]),
        Input::Delivered(_)
    ));
    *frame.last_mut().unwrap() ^= 1;
    let input = b.input(now(), &record(to, 7), &frame[head..]);
    assert!(
        matches!(input, Input::Dropped(Drop::BadChecksum)),
        "{input:?}"
    );
}

#[test]
fn a_datagram_goes_to_no_station_until_its_neighbour_is_known() {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    let stations = [false, true].map(|known| {
        let routes = routes(2 + u32::from(known), at(A), at(B), known);
        let frame = send(&mut a, slot, &routes, &mut KeptFrames::with_room(9));
        frame[10..16].to_vec()
    });
    assert_eq!(stations[0], [0; 6]);
    assert_ne!(stations[1], [0; 6]);
    assert_eq!(a.deadline(), None, "the kernel keeps it");
    assert_eq!(a.unresolved().next(), None, "the kernel asks for it");
}

#[test]
fn who_waits_for_a_neighbour_looks_again_ever_later() {
    let mut a = Stack::new(now());
    connecting(&mut a);
    let mut wire = KeptFrames::with_room(9);
    let unknown = routes(2, at(A), at(B), false);
    let mut time = now();
    let mut waits = Vec::new();
    for _ in 0..3 {
        a.output(time, &unknown, &mut wire);
        let next = a.deadline().unwrap();
        waits.push(next.since(time).as_millis());
        time = next;
        a.expire(time);
    }
    assert_eq!(waits, [2, 4, 8]);
    a.output(time, &routes(4, at(A), at(B), true), &mut wire);
    assert_eq!(wire.frames.len(), 1);
    let syn_again = a.deadline().unwrap();
    assert!(
        syn_again.since(time).as_millis() >= 100,
        "nothing to look for"
    );
}

#[test]
fn what_a_datagram_cannot_do_has_its_own_error() {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    let known = routes(2, at(A), at(B), true);
    let mut wire = KeptFrames::with_room(1);
    let long = [0; 65_508];
    let mut try_send = |to: Option<&str>, data: &[u8]| {
        a.send_datagram(
            slot,
            to.map(at),
            [data, b""],
            &Sending::default(),
            &known,
            &mut wire,
        )
    };
    assert_eq!(try_send(None, b""), Err(SendError::NoDestination));
    assert_eq!(try_send(Some(B), &long), Err(SendError::TooLong));
    assert_eq!(try_send(Some("192.0.2.1:9"), b""), Err(SendError::NoRoute));
    assert_eq!(try_send(Some(B), &long[..65_507]), Ok(65_507));
    assert_eq!(try_send(Some(B), b""), Err(SendError::Full));
}

/// A connection that sends single segments.
fn connecting(stack: &mut Stack) -> Slot {
    let config = Config {
        gso_max: 0,
        ..Config::default()
    };
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: at(A),
        remote: at(B),
    };
    let connection = Connection::connect(&config, 1000, 2000, SeqNum(1), now());
    stack.insert(
        now(),
        Session::Tcp(Box::new(TcpSession::new(SessionId(1), flow, connection))),
    )
}

#[test]
fn a_full_wire_holds_output_back_and_loses_nothing() {
    let mut a = Stack::new(now());
    let known = routes(2, at(A), at(B), true);
    connecting(&mut a);
    connecting(&mut a);
    let mut wire = KeptFrames::with_room(1);
    a.output(now(), &known, &mut wire);
    assert_eq!(wire.frames.len(), 1);
    assert!(a.has_output());
    wire.room = 9;
    a.output(now(), &known, &mut wire);
    assert_eq!(wire.frames.len(), 2);
    assert!(!a.has_output());
}

#[test]
fn a_syn_has_a_sound_header_and_is_sent_again_when_its_timer_is_due() {
    let mut a = Stack::new(now());
    let known = routes(2, at(A), at(B), true);
    connecting(&mut a);
    let mut wire = KeptFrames::with_room(9);
    a.output(now(), &known, &mut wire);
    let parsed = etherparse::PacketHeaders::from_ethernet_slice(received(&wire.frames[0])).unwrap();
    let Some(etherparse::NetHeaders::Ipv4(ip, _)) = parsed.net else {
        panic!("not IPv4")
    };
    assert_eq!(ip.header_checksum, ip.calc_header_checksum());
    assert_eq!(ip.source, [10, 0, 0, 1]);
    let Some(etherparse::TransportHeader::Tcp(tcp)) = parsed.transport else {
        panic!("not TCP")
    };
    assert!(tcp.syn && !tcp.ack && tcp.destination_port == 2000);

    let due = a.deadline().unwrap();
    assert!(due > now());
    a.expire(due + core::time::Duration::from_millis(1));
    a.output(
        due + core::time::Duration::from_millis(1),
        &known,
        &mut wire,
    );
    assert_eq!(wire.frames.len(), 2);
}

#[test]
fn a_removed_session_leaves_its_slot_and_its_timer() {
    let mut a = Stack::new(now());
    let slot = connecting(&mut a);
    assert!(a.remove(slot).is_some());
    assert!(a.get(slot).is_none());
    let mut wire = KeptFrames::with_room(9);
    a.output(now(), &routes(2, at(A), at(B), true), &mut wire);
    assert!(wire.frames.is_empty());
    assert_eq!(a.reserve(), slot);
}

#[test]
fn no_capsule_of_random_bytes_is_accepted_or_panics() {
    portolan_fuzz::check!(2000)
        .with_type::<Vec<u8>>()
        .for_each(|bytes| {
            if let Ok(session) = TcpSession::from_capsule(bytes) {
                assert!(session.connection.validate().is_ok());
            }
        });
}

#[test]
fn a_capsule_comes_back_as_it_was() {
    let mut a = Stack::new(now());
    let slot = connecting(&mut a);
    let session = a.tcp(slot).unwrap();
    let copy = TcpSession::from_capsule(&session.to_capsule()).unwrap();
    assert_eq!((copy.id, copy.flow), (session.id, session.flow));
    assert_eq!(copy.to_capsule(), session.to_capsule());
}

/// Sends a datagram with `discovery` over a path of 1,500 bytes; `Err` if refused, else the fragment size
/// for the kernel, if any, and whether "don't fragment" is set.
fn sent_with(
    discovery: MtuDiscovery,
    length: usize,
    mtu: Option<u32>,
) -> Result<(Option<u16>, bool), SendError> {
    let mut a = Stack::new(now());
    let slot = udp(&mut a, at(A));
    a.udp(slot).unwrap().ip.discovery = discovery;
    if let Some(mtu) = mtu {
        a.mtus.learn(now(), at(B).ip(), mtu);
    }
    let known = routes(2, at(A), at(B), true);
    let mut wire = KeptFrames::with_room(9);
    a.send_datagram(
        slot,
        Some(at(B)),
        [&vec![7; length], b""],
        &Sending::default(),
        &known,
        &mut wire,
    )?;
    let (vnet, frame) = portolan_wire::vnet::VnetHeader::parse(&wire.frames[0]).unwrap();
    let (ip, _) = portolan_wire::ipv4::Ipv4Header::parse(&frame[14..]).unwrap();
    assert!(!ip.is_fragment());
    Ok((vnet.gso().map(|(_, size)| size), ip.dont_fragment))
}

#[test]
fn what_does_not_fit_is_fragmented_or_refused_as_the_socket_wants() {
    use MtuDiscovery::*;
    let too_long = Err(SendError::DoesNotFit { mtu: 1500 });
    for (discovery, whole, long) in [
        (Dont, (None, false), Ok((Some(1480), false))),
        (Want, (None, true), Ok((Some(1480), false))),
        (Do, (None, true), too_long),
        (Probe, (None, true), too_long),
        (Interface, (None, false), too_long),
        (Omit, (None, false), Ok((Some(1480), false))),
    ] {
        assert_eq!(sent_with(discovery, 1472, None), Ok(whole), "{discovery:?}");
        assert_eq!(sent_with(discovery, 1473, None), long, "{discovery:?}");
    }
    // A router has reported a path MTU of 1,000.
    for (discovery, long) in [
        (Want, Ok((Some(976), false))),
        (Do, Err(SendError::DoesNotFit { mtu: 1000 })),
        (Probe, Ok((None, true))),
        (Omit, Ok((None, false))),
    ] {
        assert_eq!(
            sent_with(discovery, 1400, Some(1000)),
            long,
            "{discovery:?}"
        );
    }
}

/// A router's report about the first `quoted` bytes of a frame that `A` sent.
fn too_big(sent: &[u8], mtu: u32) -> Vec<u8> {
    use portolan_wire::icmp::{Cause, IcmpError, IcmpMessage as Message};
    let packet = &received(sent)[14..];
    let error = Message::Error(IcmpError {
        cause: Cause::TooBig { mtu },
        quoted: &packet[..28],
    });
    let mut body = vec![0; error.emitted_len()];
    error.emit_v4(&mut body);
    let mut frame = received(sent)[..14].to_vec();
    let mut header = [0; 20];
    portolan_wire::ipv4::Ipv4Header {
        traffic_class: 0,
        identification: 0,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: 1,
        source: "10.0.0.254".parse().unwrap(),
        destination: "10.0.0.1".parse().unwrap(),
        payload_len: body.len() as u16,
    }
    .emit(&mut header);
    frame.extend(header);
    frame.extend(body);
    frame
}

fn error_record(slot: Slot) -> RecordHeader {
    RecordHeader {
        flags: RecordHeader::ICMP_ERROR,
        ..record(slot, 7)
    }
}

#[test]
fn a_report_of_a_narrow_path_holds_for_all_sessions_for_ten_minutes() {
    let mut a = Stack::new(now());
    let (one, two) = (udp(&mut a, at(A)), udp(&mut a, at("10.0.0.1:1001")));
    a.udp(one).unwrap().remote = Some(at(B));
    let known = routes(2, at(A), at(B), true);
    let mut wire = KeptFrames::with_room(99);
    let mut send = |a: &mut Stack, slot| {
        let sent = a.send_datagram(
            slot,
            Some(at(B)),
            [&[7; 1400], b""],
            &Sending::default(),
            &known,
            &mut wire,
        );
        assert_eq!(sent, Ok(1400));
        let frame = wire.frames.pop().unwrap();
        let (vnet, _) = portolan_wire::vnet::VnetHeader::parse(&frame).unwrap();
        (vnet.gso().map(|(_, size)| size), frame)
    };
    let (size, frame) = send(&mut a, one);
    assert_eq!(size, None);
    let lie = too_big(&frame, 1450);
    a.input(now(), &error_record(one), &lie);
    assert_eq!(
        send(&mut a, two).0,
        None,
        "a packet that fits is not too big"
    );

    let report = too_big(&frame, 1000);
    assert!(matches!(
        a.input(now(), &error_record(one), &report),
        Input::Delivered(_)
    ));
    assert_eq!(a.udp(one).unwrap().error, Some(90));
    assert_eq!(send(&mut a, one).0, Some(976));
    assert_eq!(send(&mut a, two).0, Some(976));
    assert_eq!(a.path_mtu(at(B).ip(), &known), Some(1000));

    a.expire(now() + core::time::Duration::from_secs(600));
    assert_eq!(send(&mut a, two).0, None);
    assert_eq!(a.path_mtu(at(B).ip(), &known), Some(1500));
}

#[test]
fn a_round_trip_time_counts_when_it_has_changed_and_when_its_session_leaves() {
    let (mut a, mut b) = (Stack::new(now()), Stack::new(now()));
    let (at_a, at_b) = connected(&mut a, &mut b);
    let count = |stack: &Stack| -> u64 { round_trip_times(&stack.counters()).counts.iter().sum() };
    assert_eq!(count(&a), 0, "no packet's way leads to the histogram");
    a.observe_round_trips();
    a.observe_round_trips();
    assert_eq!(count(&a), 1);
    let session = a.take(at_a).expect("it is there");
    a.insert_at(now(), at_a, session);
    a.observe_round_trips();
    assert_eq!(count(&a), 1, "it left and came back as it was");
    b.remove(at_b);
    assert_eq!(count(&b), 1, "it left before anybody looked");
}

/// A connection between two stacks, whose segments hold 1448 bytes.
fn connected(a: &mut Stack, b: &mut Stack) -> (Slot, Slot) {
    let config = Config {
        mss: 1460,
        ..Config::default()
    };
    let (there, back) = (flow(A, B), flow(B, A));
    let syn = Connection::connect(
        &config,
        there.local.port(),
        there.remote.port(),
        SeqNum(1),
        now(),
    );
    let at_a = a.insert(
        now(),
        Session::Tcp(Box::new(TcpSession::new(SessionId(1), there, syn))),
    );
    let mut wire = KeptFrames::with_room(8);
    a.output(now(), &routes(1, at(A), at(B), true), &mut wire);
    let frame = wire.frames.pop().unwrap();
    let Ok(Packet {
        transport: Transport::Tcp { header, .. },
        ..
    }) = Packet::parse(
        &frame[portolan_wire::vnet::HEADER_LEN..],
        &RecordHeader::default(),
    )
    else {
        panic!("it is a SYN");
    };
    let answer = Connection::accept(&config, &header, SeqNum(9), now());
    let at_b = b.insert(
        now(),
        Session::Tcp(Box::new(TcpSession::new(SessionId(2), back, answer))),
    );
    pass(b, a, at_a);
    pass(a, b, at_b);
    (at_a, at_b)
}

/// Passes all frames that one stack sends to the other; returns their number.
fn pass(from: &mut Stack, to: &mut Stack, slot: Slot) -> usize {
    let (own, peer) = match from.get(Slot(0)) {
        Some(Session::Tcp(session)) => (session.flow.local, session.flow.remote),
        _ => panic!("one connection is there"),
    };
    let mut wire = KeptFrames::with_room(64);
    from.output(now(), &routes(1, own, peer, true), &mut wire);
    for frame in &wire.frames {
        let record = RecordHeader {
            slot: slot.0,
            ..RecordHeader::default()
        };
        to.input(now(), &record, &frame[portolan_wire::vnet::HEADER_LEN..]);
    }
    wire.frames.len()
}

fn flow(local: &str, remote: &str) -> FlowKey {
    FlowKey {
        protocol: Protocol::Tcp,
        local: at(local),
        remote: at(remote),
    }
}

fn write(stack: &mut Stack, slot: Slot, bytes: usize) {
    let session = stack.tcp(slot).unwrap();
    assert_eq!(session.connection.send(now(), &vec![b'x'; bytes]), bytes);
    stack.touch(slot);
}

/// Exchanges data until acknowledgements are no longer sent at once.
fn talk(a: &mut Stack, b: &mut Stack, (at_a, at_b): (Slot, Slot)) {
    for _ in 0..20 {
        write(a, at_a, 1448);
        pass(a, b, at_b);
        write(b, at_b, 1);
        pass(b, a, at_a);
    }
    pass(a, b, at_b);
}

/// Two stacks, of which the second has received 1460 bytes and defers its acknowledgement.
fn after_a_segment_and_a_little() -> ((Stack, Slot), (Stack, Slot)) {
    let (mut a, mut b) = (Stack::new(now()), Stack::new(now()));
    b.defer_acknowledgements();
    let (at_a, at_b) = connected(&mut a, &mut b);
    talk(&mut a, &mut b, (at_a, at_b));
    write(&mut a, at_a, 1460);
    pass(&mut a, &mut b, at_b);
    ((a, at_a), (b, at_b))
}

#[test]
fn an_acknowledgement_for_little_more_than_a_segment_goes_with_the_answer() {
    let ((mut a, at_a), (mut b, at_b)) = after_a_segment_and_a_little();
    assert_eq!(pass(&mut b, &mut a, at_a), 0, "it waits");
    assert!(b.owes_acknowledgements());
    write(&mut b, at_b, 1);
    assert_eq!(pass(&mut b, &mut a, at_a), 1, "with the answer");
    b.settle_acknowledgements();
    assert_eq!(pass(&mut b, &mut a, at_a), 0, "nothing is owed");
}

#[test]
fn an_acknowledgement_that_waits_for_no_answer_goes_when_it_is_settled() {
    let ((mut a, at_a), (mut b, at_b)) = after_a_segment_and_a_little();
    b.settle_acknowledgements();
    assert_eq!(pass(&mut b, &mut a, at_a), 1);
    assert!(!b.owes_acknowledgements());
    // An acknowledgement of two full segments is not deferred.
    write(&mut a, at_a, 2 * 1448);
    pass(&mut a, &mut b, at_b);
    assert_eq!(pass(&mut b, &mut a, at_a), 1);
}

#[test]
fn connections_in_time_wait_end_together_and_wake_nobody_before() {
    const MINUTE: Duration = Duration::from_secs(60);
    let (mut a, mut b) = (Stack::new(now()), Stack::new(now()));
    let (at_a, at_b) = connected(&mut a, &mut b);
    talk(&mut a, &mut b, (at_a, at_b));
    // Soon an acknowledgement is due.
    write(&mut b, at_b, 1);
    pass(&mut b, &mut a, at_a);
    assert!(a.deadline() < Some(now() + Duration::from_secs(1)));
    a.tcp(at_a).unwrap().connection.shutdown_send(now());
    a.touch(at_a);
    pass(&mut a, &mut b, at_b);
    b.tcp(at_b).unwrap().connection.shutdown_send(now());
    b.touch(at_b);
    pass(&mut b, &mut a, at_a);
    pass(&mut a, &mut b, at_b);
    let state = a.tcp(at_a).unwrap().connection.state();
    assert_eq!(state, StateName::TimeWait);
    assert!(a.deadline() > Some(now() + MINUTE / 2));
    let ends = a.tcp(at_a).unwrap().connection.deadline().unwrap();
    let step = FAR_STEP.as_nanos() as u64;
    let scheduled = coarse(now(), ends).as_nanos();
    assert!(scheduled - ends.as_nanos() < step && scheduled.is_multiple_of(step));
}
