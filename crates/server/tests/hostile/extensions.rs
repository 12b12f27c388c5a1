//! Running protocol extensions of user nobody: what is permitted works, and everything else is contained and counted.
//! Others receive their packets as usual.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{
    Code, Event, Extension, ExtensionReply, ExtensionRequest, ExtensionState, Guard, MapDefinition,
    MapKind,
};
use portolan_proto::raw;
use portolan_types::{Protocol, Slot};
use rustix::net::{self, AddressFamily, SendFlags, SocketType};

use crate::common::{Client, Configuration, Library, await_some, control_path, start_server};
use crate::handlers::{
    CONSUME, DELIVER, FORWARD, FROM_PORT, LENGTH, Owner, PASS, PAYLOAD, REPLY, TO, TO_PORT, always,
    answer, ask, assert_silent, code, exit, filter_counter, list, map, mov, op, peer, refusal,
    send_from_first_cpu, slow,
};
use crate::meter::Meter;
use crate::{NOBODY, Victim, assert_serves_others, counter, hostile_library};

#[test]
fn a_handler_answers_in_its_owners_stead() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    for address in [Bed::A4, Bed::A6] {
        let mut owner = Owner::of(hostile_library(&path), SocketAddr::new(address, 0));
        owner.install(always(REPLY));
        let peer = peer(&bed, owner.port);
        for length in [0, 1, 2, 3, 8, 100, 511, 512] {
            let question: Vec<u8> = (0..length).map(|n| (n % 251) as u8 + 1).collect();
            assert_eq!(answer(&peer, &question), question, "{length} bytes");
        }
        // Of longer packets the view has the beginning.
        assert_eq!(answer(&peer, &[7; 600]), [7; 512]);
        assert_eq!(owner.frames(), 0);
    }
    assert_eq!(filter_counter(&path, "replied"), 18);
    meter.finish_but_for_starts();
}

#[test]
fn a_handlers_edits_are_sent_with_the_right_sums() {
    let bed = Bed::veth();
    // The checksums of these frames are complete, and must be afterwards.
    bed.b.enter(|| {
        let off = std::process::Command::new("ethtool")
            .args(["-K", Bed::DEVICE, "tx", "off"])
            .output();
        assert!(off.unwrap().status.success());
    });
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    for address in [Bed::A4, Bed::A6] {
        let mut owner = Owner::of(hostile_library(&path), SocketAddr::new(address, 0));
        // Five bytes, "XX" first; the sixth is written, too, but not part of the answer.
        owner.install(code([
            op(0x6a, 1, 0, PAYLOAD, 0x5858),
            op(0x72, 1, 0, PAYLOAD + 5, 0x59),
            op(0x62, 1, 0, LENGTH, 5),
            mov(0, REPLY),
            exit(),
        ]));
        let peer = peer(&bed, owner.port);
        assert_eq!(answer(&peer, b"abcdefgh"), b"XXcde");
        assert_eq!(answer(&peer, b"a"), b"XX\0\0\0");
    }
    assert_eq!(filter_counter(&path, "bad_checksum"), 0);
    meter.finish_but_for_starts();
}

#[test]
fn handlers_are_called_in_their_order_until_one_decides() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let peer = peer(&bed, owner.port);
    // Each handler adds its letter at the byte counted by `mark`.
    let adds = |letter: i32, verdict| {
        code([
            op(0x61, 2, 1, LENGTH, 0),
            op(0x25, 2, 0, 4, 100),
            op(0xbf, 3, 1, 0, 0),
            op(0x0f, 3, 2, 0, 0),
            op(0x72, 3, 0, PAYLOAD, letter),
            op(0x07, 2, 0, 0, 1),
            op(0x63, 1, 2, LENGTH, 0),
            mov(0, verdict),
            exit(),
        ])
    };
    let last = owner.install_at(200, adds(i32::from(b'd'), REPLY));
    owner.install_at(10, adds(i32::from(b'a'), PASS));
    owner.install_at(100, adds(i32::from(b'b'), PASS));
    owner.install_at(100, adds(i32::from(b'c'), PASS));
    assert_eq!(answer(&peer, b"-"), b"-abcd");
    let removed = owner.ask(ExtensionRequest::Remove { number: last });
    assert_eq!(removed, ExtensionReply::Removed);
    // All pass: the owner gets the packet unchanged.
    assert_silent(&peer, b"-");
    let record = owner.library.ring.next().expect("the frame");
    assert!(record.frame.ends_with(b"-"), "{:?}", record.frame);
    assert_eq!(filter_counter(&path, "passed"), 1);
    meter.finish_but_for_starts();
}

#[test]
fn a_predicate_chooses_and_a_handler_may_end_or_deliver() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let peer = peer(&bed, owner.port);
    // Selects packets that begin with 'c' and consumes them.
    let number = owner.install_at(
        1,
        Code {
            predicate: Some(2),
            ..code([
                mov(0, CONSUME),
                exit(),
                op(0x71, 0, 1, PAYLOAD, 0),
                op(0x15, 0, 0, 2, b'c'.into()),
                mov(0, 0),
                exit(),
                mov(0, 1),
                exit(),
            ])
        },
    );
    owner.install_at(2, always(DELIVER));
    owner.install_at(3, always(REPLY));
    assert_silent(&peer, b"c");
    assert_eq!(owner.frames(), 0);
    assert_silent(&peer, b"d");
    assert_eq!(owner.frames(), 1);
    let reports = list(&mut owner.library.client);
    let counted = reports
        .iter()
        .find(|report| report.number == number)
        .unwrap()
        .statistics;
    assert_eq!((counted.consumed, counted.skipped, counted.runs), (1, 1, 1));
    assert_eq!(filter_counter(&path, "consumed"), 1);
    assert_eq!(filter_counter(&path, "delivered"), 1);
    meter.finish_but_for_starts();
}

#[test]
fn one_that_takes_too_long_is_stopped_and_removed() {
    let bed = Bed::veth();
    let configuration = Configuration::new(&bed.a, "[extension]\ntime_limit_ns = 500");
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut owner = Owner::start(&path);
    let number = owner.install(slow());
    let peer = peer(&bed, owner.port);
    send_from_first_cpu();
    for _ in 0..8 {
        answer(&peer, b"slow");
    }
    // From the ninth on the owner gets them, at once.
    assert_silent(&peer, b"slow");
    assert_eq!(owner.frames(), 1);
    assert_eq!(filter_counter(&path, "stopped"), 1);
    assert_eq!(filter_counter(&path, "overruns"), 8);
    await_some("removal", || {
        (counter(&path, "server", "extensions_over_budget") == 1).then_some(())
    });
    let reports = list(&mut owner.library.client);
    assert_eq!(reports[0].number, number);
    assert_eq!(reports[0].standing, ExtensionState::OverBudget);
    assert_eq!(reports[0].statistics.overruns, 8);
    assert_eq!(reports[0].uid, NOBODY);
    // Another one can replace it.
    owner.install(always(REPLY));
    assert_eq!(answer(&peer, b"quick"), b"quick");
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn extensions_go_with_their_owner_and_with_its_socket() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut observer = Client::connect(&path);

    let mut owner = Owner::start(&path);
    owner.install(always(REPLY));
    let port = owner.port;
    let first = peer(&bed, port);
    assert_eq!(answer(&first, b"here"), b"here");
    assert_eq!(list(&mut observer).len(), 1);
    drop(owner);
    await_some("its end", || list(&mut observer).is_empty().then_some(()));
    assert_silent(&first, b"gone");

    let mut owner = Owner::start(&path);
    owner.install(always(REPLY));
    let session = owner.session;
    let released = owner.library.client.ask(RequestBody::Release { session });
    assert!(matches!(released, ReplyBody::Done), "{released:?}");
    assert_eq!(list(&mut observer), []);
    meter.finish_but_for_starts();
}

/// A program shows the maps of an extension that the previous server had installed for it.
#[test]
fn maps_that_a_program_shows_are_like_its_extensions_or_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let with = |maps: Vec<MapDefinition>| Code {
        maps,
        ..always(REPLY)
    };
    let hash = map(MapKind::Hash, 4, 8, 16);
    let install = |owner: &mut Owner, code, shown: &[BorrowedFd<'_>]| {
        let spec = ExtensionRequest::Install(owner.spec(code));
        let client = &mut owner.library.client;
        match client.ask_with(RequestBody::Extension(spec), shown) {
            (ReplyBody::Extension(reply), fds) => (reply, fds),
            (other, _) => panic!("{other:?}"),
        }
    };
    let (_, maps) = install(&mut owner, with(vec![hash.clone()]), &[]);
    let [own] = &maps[..] else {
        panic!("{maps:?}");
    };
    let (reply, maps) = install(&mut owner, with(vec![hash.clone()]), &[own.as_fd()]);
    assert!(
        matches!(reply, ExtensionReply::Installed { .. }),
        "{reply:?}"
    );
    assert_eq!(maps.len(), 1);
    let ring = owner.library.maps.ring.try_clone().unwrap();
    let socket = net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
    for (maps, shown) in [
        (vec![map(MapKind::Hash, 4, 8, 17)], own),
        (vec![map(MapKind::Hash, 4, 16, 16)], own),
        (vec![map(MapKind::LruHash, 4, 8, 16)], own),
        (vec![hash.clone(), hash.clone()], own),
        (vec![hash.clone()], &ring),
        (vec![hash.clone()], &socket),
    ] {
        let (reply, _) = install(&mut owner, with(maps), &[shown.as_fd()]);
        assert_eq!(refusal(reply).errno, libc::EINVAL);
    }
    let peer = peer(&bed, owner.port);
    assert_eq!(answer(&peer, b"here"), b"here");
    meter.finish_but_for_starts();
}

#[test]
fn a_view_shows_nothing_of_other_packets() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut secret = Owner::of(Library::start(&path), SocketAddr::new(Bed::A4, 0));
    secret.install(always(CONSUME));
    let mut spy = Owner::start(&path);
    // Answers with everything that a view can hold.
    spy.install(code([op(0x62, 1, 0, LENGTH, 512), mov(0, REPLY), exit()]));
    let (told, asked) = (peer(&bed, secret.port), peer(&bed, spy.port));
    for _ in 0..32 {
        told.send(&[0x55; 512]).unwrap();
        let seen = answer(&asked, b"?");
        assert_eq!(seen[0], b'?');
        assert!(seen[1..].iter().all(|byte| *byte == 0), "{seen:?}");
    }
    meter.finish_but_for_starts();
}

#[test]
fn an_answer_of_no_length_that_there_is_is_dropped_and_counted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    owner.install(code([op(0x62, 1, 0, LENGTH, 513), mov(0, REPLY), exit()]));
    let peer = peer(&bed, owner.port);
    assert_silent(&peer, b"long");
    assert_eq!(filter_counter(&path, "refused"), 1);
    let number = list(&mut owner.library.client)[0].number;
    owner.ask(ExtensionRequest::Remove { number });
    owner.install(always(77));
    assert_silent(&peer, b"what");
    assert_eq!(filter_counter(&path, "refused"), 2);
    meter.finish_but_for_starts();
}

/// Sends a datagram with a wrong checksum.
fn send_spoilt(to: SocketAddr) {
    let raw = net::socket(
        AddressFamily::INET,
        SocketType::RAW,
        Some(net::ipproto::UDP),
    )
    .unwrap();
    let words = b"spoilt";
    let length = (8 + words.len()) as u16;
    let header = [5555, to.port(), length, 0xbad].map(u16::to_be_bytes);
    let datagram = [header.as_flattened(), words].concat();
    net::sendto(&raw, &datagram, SendFlags::empty(), &to).unwrap();
}

#[test]
fn a_datagram_with_a_wrong_sum_is_shown_to_nobody() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    owner.install(always(CONSUME));
    bed.b.enter(|| send_spoilt(owner.port));
    await_some("a count", || {
        (filter_counter(&path, "bad_checksum") == 1).then_some(())
    });
    assert_eq!(owner.frames(), 1);
    meter.finish_but_for_starts();
}

/// Forwards everything to one endpoint.
fn forwards(to: SocketAddr, from_port: u16) -> Code {
    let std::net::IpAddr::V4(address) = to.ip() else {
        panic!("the tests use IPv4");
    };
    code([
        op(0x62, 1, 0, TO, 0),
        op(0x62, 1, 0, TO + 4, 0),
        op(0x62, 1, 0, TO + 8, i32::from_le_bytes([0, 0, 0xff, 0xff])),
        op(0x62, 1, 0, TO + 12, i32::from_le_bytes(address.octets())),
        op(0x6a, 1, 0, TO_PORT, to.port().into()),
        op(0x6a, 1, 0, FROM_PORT, from_port.into()),
        mov(0, FORWARD),
        exit(),
    ])
}

#[test]
fn packets_are_forwarded_only_from_ports_of_their_handler_and_to_others() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut owner = Owner::start(&path);
    let other = Owner::of(Library::start(&path), SocketAddr::new(Bed::A4, 0));
    let (asking, hearing) = (peer(&bed, owner.port), peer(&bed, owner.port));
    let to = hearing.local_addr().unwrap();
    let own = owner.port.port();

    let number = owner.install(forwards(to, own));
    asking.send(b"on").unwrap();
    // The receiver is connected to the owner's port: it would not receive from any other.
    let mut heard = [0; 8];
    assert_eq!(hearing.recv(&mut heard).unwrap(), 2);
    owner.ask(ExtensionRequest::Remove { number });

    let here = SocketAddr::new(Bed::A4, 9);
    let group = "224.0.0.1:9".parse().unwrap();
    let no_port = SocketAddr::new(to.ip(), 0);
    let refused = [
        (to, other.port.port()),
        (to, 22),
        (here, own),
        (group, own),
        (no_port, own),
        ("127.0.0.1:9".parse().unwrap(), own),
    ];
    for (count, (to, from)) in (1..).zip(refused) {
        let number = owner.install(forwards(to, from));
        asking.send(b"on").unwrap();
        await_some("a count", || {
            (filter_counter(&path, "refused") == count).then_some(())
        });
        owner.ask(ExtensionRequest::Remove { number });
    }
    assert_eq!(filter_counter(&path, "forwarded"), 1);
    assert_eq!(owner.frames(), 0);
    meter.finish_but_for_starts();
}

#[test]
fn a_listeners_segments_are_its_owners_to_handle_and_nobody_elses() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut library = hostile_library(&path);
    let (session, local, _near) = library.listen(SocketAddr::new(Bed::A4, 0), 8);
    let mut honest = Library::start(&path);
    let (others, others_local, _others_near) = honest.listen(SocketAddr::new(Bed::A4, 0), 8);
    let mut spec = |session| {
        let spec = Extension {
            name: "screen".to_owned(),
            event: Event::TcpReceive,
            guards: vec![Guard::Session(session)],
            priority: 0,
            code: always(CONSUME),
        };
        ask(&mut library.client, ExtensionRequest::Install(spec))
    };
    assert_eq!(refusal(spec(others)).errno, libc::EPERM);
    let ExtensionReply::Installed { number, .. } = spec(session) else {
        panic!("it is its own listener");
    };
    let connect = |to| {
        let limit = Duration::from_millis(300);
        bed.b
            .enter(|| std::net::TcpStream::connect_timeout(&to, limit).is_ok())
    };
    // The handler drops the owner's SYNs, not those of others.
    assert!(!connect(local));
    assert!(connect(others_local));
    assert!(filter_counter(&path, "consumed") > 0);
    ask(&mut library.client, ExtensionRequest::Remove { number });
    assert!(connect(local));
    victim.assert_unharmed();
}

const OWN: raw::Guard = raw::Guard::EtherType(0x88b5);
const OWN_IP: raw::Guard = raw::Guard::IpProtocol(253);

fn claim(client: &mut Client, guard: raw::Guard) {
    let request = RequestBody::ClaimProtocol {
        guard,
        slot: Slot(9),
    };
    let reply = client.ask(request);
    assert!(matches!(reply, ReplyBody::Claimed { .. }), "{reply:?}");
}

/// Neither packets sent to others nor the host's essential protocols can be handled.
#[test]
fn frames_of_a_protocol_are_its_owners_to_handle_and_nobody_elses() {
    let bed = Bed::veth();
    let rule = format!(
        "[[raw]]\nuser = \"{NOBODY}\"\nethertypes = [0x88b5]\nprotocols = [253]\nudp_ports = [7777]\n"
    );
    let configuration = Configuration::new(&bed.a, &rule);
    let _server = configuration.start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut other = Library::start(&path);
    claim(&mut other.client, raw::Guard::EtherType(0x88b6));
    let mut hostile = Owner::start(&path);
    let at_port = raw::Guard::Port {
        protocol: Protocol::Udp,
        local: "0.0.0.0:7777".parse().unwrap(),
    };
    for guard in [OWN, OWN_IP, at_port] {
        claim(&mut hostile.library.client, guard);
    }
    let session = Guard::Session(hostile.session);
    for (guard, event, errno) in [
        (
            Guard::Raw(raw::Guard::EtherType(0x88b6)),
            Event::EthernetReceive,
            libc::EPERM,
        ),
        (
            Guard::Raw(raw::Guard::EtherType(0x0800)),
            Event::EthernetReceive,
            libc::EPERM,
        ),
        (
            Guard::Raw(raw::Guard::EtherType(0x0806)),
            Event::EthernetReceive,
            libc::EPERM,
        ),
        (
            Guard::Raw(raw::Guard::IpProtocol(6)),
            Event::IpReceive,
            libc::EPERM,
        ),
        (
            Guard::Raw(raw::Guard::IpProtocol(89)),
            Event::IpReceive,
            libc::EPERM,
        ),
        (Guard::Raw(OWN), Event::IpReceive, libc::EINVAL),
        (Guard::Raw(OWN), Event::UdpReceive, libc::EINVAL),
        (Guard::Raw(OWN_IP), Event::EthernetReceive, libc::EINVAL),
        (Guard::Raw(at_port), Event::TcpReceive, libc::EINVAL),
        (session, Event::EthernetReceive, libc::EINVAL),
        (session, Event::IpReceive, libc::EINVAL),
    ] {
        let spec = Extension {
            event,
            guards: vec![guard],
            ..hostile.spec(always(CONSUME))
        };
        let refusal = refusal(hostile.ask(ExtensionRequest::Install(spec)));
        let reason = refusal.reason;
        assert_eq!(refusal.errno, errno, "{guard:?} {event:?}: {reason}");
    }
    // Closing a flow removes its handler.
    let spec = Extension {
        event: Event::EthernetReceive,
        guards: vec![Guard::Raw(OWN)],
        ..hostile.spec(always(REPLY))
    };
    let reply = hostile.ask(ExtensionRequest::Install(spec));
    assert!(
        matches!(reply, ExtensionReply::Installed { .. }),
        "{reply:?}"
    );
    let request = RequestBody::UnclaimProtocol {
        guard: OWN,
        slot: Slot(9),
    };
    hostile.library.client.send(request, &[]);
    assert_eq!(list(&mut hostile.library.client), []);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}
