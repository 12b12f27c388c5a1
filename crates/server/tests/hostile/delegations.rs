//! Delegated listeners: what a process can do with its own port, and with those of others.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::{
    AcceptQueue, Blob, HandshakeOptions, PartOffer, ReplyBody, RequestBody, Reuse, SessionRef,
};
use portolan_proto::extension::{Event, Extension, ExtensionReply, ExtensionRequest, Guard};
use portolan_proto::journal::JournalRecord;
use portolan_sys::shm::JournalWriter;
use portolan_sys::unix::{PairKind, socket_pair};
use portolan_types::{FlowKey, Protocol, SessionId, Slot};

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use crate::common::{Library, Near, control_path, start_server, start_server_with};
use crate::handlers::{CONSUME, always, ask, filter_counter};
use crate::meter::Meter;
use crate::{Victim, assert_serves_others, counter, hostile_library, refused};

const PERM: i32 = 1;
const BADF: i32 = 9;
const INVAL: i32 = 22;
const PROTO: i32 = 71;
const ADDRINUSE: i32 = 98;
const NOBUFS: i32 = 105;

/// Opens a listener, delegated if `slot` and the options request it.
pub(crate) fn listen(
    library: &mut Library,
    port: u16,
    slot: Option<Slot>,
) -> (SessionId, Near, bool) {
    let local = SocketAddr::new(Bed::A4, port);
    let (reply, _replaced) = library.bind_with(Protocol::Tcp, local, Slot(0), Reuse::default());
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let (near, is_delegated) = listen_again(library, session, slot);
    (session, near, is_delegated)
}

fn listen_again(library: &mut Library, session: SessionId, slot: Option<Slot>) -> (Near, bool) {
    let body = RequestBody::Listen {
        session: SessionRef::Known(session),
        backlog: 4,
        options: HandshakeOptions {
            is_delegated: Some(true),
            ..HandshakeOptions::default()
        },
        options_blob: Default::default(),
        slot,
    };
    let (reply, near) = library.ask_new(PairKind::SeqPacket, body);
    let ReplyBody::Listening { rules, .. } = reply else {
        panic!("{reply:?}");
    };
    (near, rules.is_some())
}

pub(crate) fn claim(listener: SessionId, local: SocketAddr, remote: SocketAddr) -> RequestBody {
    RequestBody::Register {
        port: listener,
        local,
        remote,
        slot: Slot(5),
    }
}

pub(crate) fn claim_refused(library: &mut Library, body: RequestBody) -> i32 {
    let (near, far) = socket_pair(PairKind::Stream).unwrap();
    refused(library, body, &[far.as_fd(), near.as_fd()])
}

pub(crate) fn a(port: u16) -> SocketAddr {
    SocketAddr::new(Bed::A4, port)
}

pub(crate) fn b(port: u16) -> SocketAddr {
    SocketAddr::new(Bed::B4, port)
}

#[test]
fn only_the_delegate_claims_and_only_connections_of_its_port() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut owner = Library::start(&path);
    let (others, _others_near, is_delegated) = listen(&mut owner, 4000, Some(Slot(3)));
    assert!(is_delegated);
    let mut hostile = hostile_library(&path);
    let (own, _near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let (plain, _plain_near, is_delegated) = listen(&mut hostile, 4002, None);
    assert!(!is_delegated);

    let elsewhere: SocketAddr = "192.0.2.1:4001".parse().unwrap();
    let nobody = |text: &str| text.parse::<SocketAddr>().unwrap();
    let cases = [
        ("another's listener", claim(others, a(4000), b(1)), PERM),
        ("not delegated", claim(plain, a(4002), b(1)), PERM),
        ("no listener", claim(SessionId(77), a(4001), b(1)), BADF),
        ("another's port", claim(own, a(4000), b(1)), INVAL),
        ("nobody's port", claim(own, a(4444), b(1)), INVAL),
        ("a foreign address", claim(own, elsewhere, b(1)), INVAL),
        ("no port", claim(own, a(4001), b(0)), INVAL),
        ("itself", claim(own, a(4001), a(9)), INVAL),
        ("all", claim(own, a(4001), nobody("0.0.0.0:9")), INVAL),
        ("a group", claim(own, a(4001), nobody("224.0.0.1:9")), INVAL),
        (
            "loopback",
            claim(own, a(4001), nobody("127.0.0.1:9")),
            INVAL,
        ),
        (
            "another family",
            claim(own, a(4001), nobody("[2001:db8::1]:9")),
            INVAL,
        ),
    ];
    for (case, body, errno) in cases {
        assert_eq!(claim_refused(&mut hostile, body), errno, "{case}");
    }
    let without_descriptor = refused(&mut hostile, claim(own, a(4001), b(1)), &[]);
    assert_eq!(without_descriptor, INVAL);

    let (reply, _near) = hostile.ask_new(PairKind::Stream, claim(own, a(4001), b(1)));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let twice = claim_refused(&mut hostile, claim(own, a(4001), b(1)));
    assert_eq!(twice, ADDRINUSE);
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

#[test]
fn claims_are_charged_to_the_process() {
    let bed = Bed::veth();
    let config = std::env::temp_dir().join(format!("portolan-claims-{}.toml", std::process::id()));
    std::fs::write(&config, "[limits]\nsessions_per_process = 5\n").unwrap();
    let _server = start_server_with(&bed.a, &["--config", config.to_str().unwrap()]);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (own, _near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let mut held = Vec::new();
    for port in 1..5 {
        let (reply, near) = hostile.ask_new(PairKind::Stream, claim(own, a(4001), b(port)));
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
        held.push(near);
    }
    assert_eq!(
        claim_refused(&mut hostile, claim(own, a(4001), b(9))),
        NOBUFS
    );
    meter.finish_but_for_starts();
}

#[test]
fn forged_surrenders_are_refused_and_counted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (own, _near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let (plain, _plain_near, _) = listen(&mut hostile, 4002, None);
    let (_, _session_near, slot, _peer) = crate::open_to_b(&bed, &mut hostile);
    let Some(portolan_stack::Session::Tcp(session)) = hostile.stack.remove(slot) else {
        panic!("a connection");
    };
    // A connection, but not of the listener.
    let foreign = session.to_capsule();
    for bytes in [Vec::new(), vec![0xff; 3000], foreign.clone()] {
        let surrender = RequestBody::ReturnPending {
            listener: own,
            capsule: Blob::Inline(bytes),
        };
        assert_eq!(refused(&mut hostile, surrender, &[]), PROTO);
    }
    let surrender = RequestBody::ReturnPending {
        listener: plain,
        capsule: Blob::Inline(foreign),
    };
    assert_eq!(refused(&mut hostile, surrender, &[]), PERM);
    assert_eq!(counter(&path, "server", "capsules_refused"), 3);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

#[test]
fn forged_closed_connections_are_refused_and_counted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (own, _near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let (plain, _plain_near, _) = listen(&mut hostile, 4002, None);
    let (_, _session_near, slot, _peer) = crate::open_to_b(&bed, &mut hostile);
    let Some(portolan_stack::Session::Tcp(session)) = hostile.stack.remove(slot) else {
        panic!("a connection");
    };
    let foreign = session.to_capsule();
    for (listener, errno) in [(own, PROTO), (plain, PERM), (SessionId(77), BADF)] {
        let closed = RequestBody::ReturnClosed {
            port: listener,
            capsule: Blob::Inline(foreign.clone()),
        };
        assert_eq!(refused(&mut hostile, closed, &[]), errno);
    }
    assert_eq!(counter(&path, "server", "unregistered_closed"), 0);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

/// Only connections on the process's own port are probed, whatever its journal says.
#[test]
fn a_hostile_journal_is_read_as_claims() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut owner = Library::start(&path);
    let (others, _others_near, _) = listen(&mut owner, 4000, Some(Slot(3)));
    let mut hostile = hostile_library(&path);
    let (own, near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let flow = |local, remote| FlowKey {
        protocol: Protocol::Tcp,
        local,
        remote,
    };
    let elsewhere: SocketAddr = "192.0.2.1:4001".parse().unwrap();
    let mut journal = JournalWriter::map(&hostile.maps.journal).unwrap();
    for record in [
        JournalRecord::new(others, &flow(a(4000), b(1))),
        JournalRecord::new(own, &flow(a(4000), b(1))),
        JournalRecord::new(own, &flow(elsewhere, b(1))),
        JournalRecord::new(own, &flow(a(4001), a(9))),
        JournalRecord::new(own, &flow(a(4001), b(0))),
        JournalRecord::new(SessionId(u64::MAX), &flow(a(4001), b(1))),
        JournalRecord::new(own, &flow(a(4001), b(1))),
    ] {
        journal.enter(&record).unwrap();
    }
    let memory = std::fs::File::from(hostile.maps.journal.try_clone().unwrap());
    // A count beyond the memory, and records of any bytes.
    memory.write_all_at(&[0xff; 8], 0).unwrap();
    memory.write_all_at(&[0xff; 4096], 1024).unwrap();
    drop((hostile, near));
    let lost = || counter(&path, "server", "unregistered_lost");
    let until = std::time::Instant::now() + Duration::from_secs(3);
    while lost() == 0 && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    assert_eq!(lost(), 1);
}

#[test]
fn who_performs_no_handshakes_has_nothing_to_say_of_floods() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (plain, _near, _) = listen(&mut hostile, 4002, None);
    let flow = FlowKey {
        protocol: Protocol::Tcp,
        local: a(4002),
        remote: b(9),
    };
    for (listener, errno) in [(plain, PERM), (SessionId(77), BADF)] {
        let queue = AcceptQueue::Full;
        let flooded = RequestBody::Flooded { listener, queue };
        assert_eq!(refused(&mut hostile, flooded, &[]), errno);
        let flows = vec![flow];
        let spare = RequestBody::ExemptFlows { listener, flows };
        assert_eq!(refused(&mut hostile, spare, &[]), errno);
    }
    assert_eq!(counter(&path, "server", "syn_floods"), 0);
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

#[test]
fn a_delegate_that_does_not_give_the_port_back_loses_it() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (own, near, _) = listen(&mut hostile, 4001, Some(Slot(3)));
    let mut other = Library::start(&path);
    let (probed, _) = other.client.ask_with(RequestBody::Probe, &[near.0.as_fd()]);
    assert!(matches!(probed, ReplyBody::Probed(Some(_))), "{probed:?}");
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(claim_refused(&mut hostile, claim(own, a(4001), b(1))), PERM);
    assert_eq!(counter(&path, "server", "recall_timeouts"), 1);
    let connected = bed
        .b
        .enter(|| std::net::TcpStream::connect(a(4001)))
        .is_ok();
    assert!(connected, "the server answers");
    meter.finish();
}

#[test]
fn a_listeners_extension_goes_where_its_handshakes_go() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut library = hostile_library(&path);
    let (session, _near, is_delegated) = listen(&mut library, 4003, None);
    assert!(!is_delegated);
    let spec = Extension {
        name: "screen".to_owned(),
        event: Event::TcpReceive,
        guards: vec![Guard::Session(session)],
        priority: 0,
        code: always(CONSUME),
    };
    let reply = ask(&mut library.client, ExtensionRequest::Install(spec));
    assert!(
        matches!(reply, ExtensionReply::Installed { .. }),
        "{reply:?}"
    );
    let assert_screened = || {
        let before = filter_counter(&path, "consumed");
        let limit = Duration::from_millis(100);
        let connected = bed.b.enter(|| TcpStream::connect_timeout(&a(4003), limit));
        assert!(connected.is_err(), "{connected:?}");
        assert!(filter_counter(&path, "consumed") > before);
    };
    assert_screened();
    let (_near, is_delegated) = listen_again(&mut library, session, Some(Slot(3)));
    assert!(is_delegated);
    assert_screened();
    let reply = library
        .client
        .ask(RequestBody::EndDelegation { listener: session });
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    assert_screened();
    meter.finish_but_for_starts();
}

/// Returns whether the process performs a part of the listener's handshakes from now on.
fn take_part(library: &mut Library, listener: SessionId, offer: PartOffer) -> bool {
    let reply = library
        .client
        .ask(RequestBody::TakePart { listener, offer });
    match reply {
        ReplyBody::Listening { rules, .. } => rules.is_some(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_performer_has_the_flows_of_its_listener_only_and_leaves_nothing_behind() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut owner = Library::start(&path);
    let (listener, _near, _) = listen(&mut owner, 4005, None);
    let mut hostile = hostile_library(&path);
    let anew = PartOffer::Anew(Slot(3));

    let guessed = RequestBody::TakePart {
        listener: SessionId(77),
        offer: anew,
    };
    assert_eq!(refused(&mut hostile, guessed, &[]), BADF);
    let early = claim(listener, a(4005), b(1));
    assert_eq!(claim_refused(&mut hostile, early), PERM);
    let invented = PartOffer::AsBefore(Slot(3));
    assert!(!take_part(&mut hostile, listener, invented));

    // One that has the listener, too, and says nothing to those that connect.
    let connect = || {
        let limit = Duration::from_millis(100);
        bed.b.enter(|| TcpStream::connect_timeout(&a(4005), limit))
    };
    assert!(connect().is_ok(), "the server's");
    assert!(take_part(&mut hostile, listener, anew));
    assert!(connect().is_err(), "its own");
    let others = claim(listener, a(4004), b(1));
    assert_eq!(claim_refused(&mut hostile, others), INVAL);
    let meter = Meter::start(&bed);
    for slot in 0..500 {
        let offer = PartOffer::Anew(Slot(slot));
        assert!(take_part(&mut hostile, listener, offer));
    }
    meter.finish_but_for_starts();

    let mut another = hostile_library(&path);
    assert!(take_part(&mut another, listener, anew));
    drop(hostile);
    drop(another);
    let is_servers = (0..50).any(|_| connect().is_ok());
    assert!(is_servers, "it has no other performer");
    assert_serves_others(&bed, &path);
}
