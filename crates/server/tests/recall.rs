//! Sessions that processes request from each other through the server: only with the descriptor as proof, and no
//! process keeps one indefinitely.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::scene::{Scene, scene};
use common::{Library, await_some, start_server};
use portolan_netns::Bed;
use portolan_proto::control::{AfterFlush, Blob, Capsule, Reader, ReplyBody, RequestBody};
use portolan_stack::Session;
use portolan_sys::shm::{self, SetAside};
use portolan_types::Slot;

const TIMEOUT: Duration = Duration::from_secs(20);
const BADF: i32 = 9;
const INVAL: i32 = 22;
const CONNRESET: i32 = 104;

#[test]
fn a_session_goes_to_who_asks_once_its_holder_gave_it_back() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    scene.holder.write(scene.slot, b"first");
    let request = scene.ask();
    assert_eq!(scene.recalled(), [scene.id]);
    scene.holder.flush(scene.id, scene.slot, AfterFlush::Park);
    let answer = scene.answer(request);
    assert!(matches!(answer, ReplyBody::Cached { .. }), "{answer:?}");
    let mut first = [0; 5];
    scene.peer.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first");
}

#[test]
fn a_session_that_is_wanted_by_two_is_relayed() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    let requests = [scene.ask(), scene.ask()];
    assert_eq!(scene.recalled(), [scene.id]);
    scene.holder.flush(scene.id, scene.slot, AfterFlush::Park);
    for request in requests {
        let answer = scene.answer(request);
        assert!(matches!(answer, ReplyBody::Relayed), "{answer:?}");
    }
    let near = scene.near.0.try_clone().unwrap();
    let mut descriptor = UnixStream::from(near);
    descriptor.write_all(b"relay").unwrap();
    let mut relay = [0; 5];
    scene.peer.read_exact(&mut relay).unwrap();
    assert_eq!(&relay, b"relay");
}

/// The last holder may want the session back at once, so the descriptor gets little at first.
#[test]
fn what_is_held_back_of_a_relay_follows() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    let bytes: Vec<u8> = (0..300_000).map(|index| (index % 251) as u8).collect();
    let Some(Session::Tcp(session)) = scene.holder.stack.remove(scene.slot) else {
        panic!("no session");
    };
    let memory = SetAside::write(bytes.len(), [(0, &bytes[..])].into_iter()).unwrap();
    let request = RequestBody::Flush {
        session: scene.id,
        capsule: Capsule {
            state: Blob::Inline(session.to_capsule()),
            unread: shm::stretch(0, bytes.len()),
        },
        then: AfterFlush::Relay(Reader::Other),
        options_blob: Default::default(),
    };
    let (reply, _) = scene.holder.client.ask_with(request, &[memory.as_fd()]);
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    let mut descriptor = UnixStream::from(scene.near.0.try_clone().unwrap());
    descriptor.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut got = vec![0; bytes.len()];
    descriptor.read_exact(&mut got).unwrap();
    assert!(got == bytes);
}

/// Data that the peer sends after the holder has announced its flush no longer reaches the holder, but is in the
/// session when it is cached again.
#[test]
fn what_comes_for_a_session_on_its_way_waits_at_the_server() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    for _ in 0..2 {
        scene.depart();
    }
    scene.peer.write_all(b"on its way").unwrap();
    let mut held = || scene.other.client.counter("stack", "held");
    await_some("the segment", || (held() > 0).then_some(()));
    scene.holder.turn();
    let session = scene.holder.stack.tcp(scene.slot).expect("it is here");
    assert_eq!(session.connection.readable(), 0);
    scene
        .holder
        .flush(scene.id, scene.slot, AfterFlush::Relay(Reader::Sender));
    let mut descriptor = UnixStream::from(scene.near.0.try_clone().unwrap());
    descriptor.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut got = [0; 10];
    descriptor.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"on its way");
    let lost = scene.other.client.counter("server", "reinjected_frames");
    assert_eq!(lost, 0, "none went the long way round");
}

#[test]
fn a_session_that_could_not_be_packed_goes_on_where_it_is() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    scene.depart();
    scene.peer.write_all(b"retransmitted, ").unwrap();
    let session = scene.id;
    scene
        .holder
        .client
        .send(RequestBody::AbortFlush { session }, &[]);
    scene.peer.write_all(b"and sent").unwrap();
    let got = scene.holder.read(scene.slot, 23);
    assert_eq!(got, b"retransmitted, and sent");
}

#[test]
fn a_holder_that_dies_while_it_packs_loses_its_session() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    scene.depart();
    scene.peer.write_all(b"for nobody").unwrap();
    let Scene {
        holder, mut peer, ..
    } = scene;
    drop(holder);
    let error = peer.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn nobody_gets_a_session_without_its_descriptor() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    let (_, own, _) = scene.other.open(scene.kernel.local_addr().unwrap());
    let spec = |session| RequestBody::Cache {
        session,
        slot: Slot(1),
    };
    let refused = |(reply, _): (ReplyBody, _)| matches!(reply, ReplyBody::Error { errno: BADF });
    let thief = &mut scene.other.client;
    assert!(refused(thief.ask_with(spec(scene.id), &[])));
    assert!(refused(thief.ask_with(spec(scene.id), &[own.0.as_fd()])));
    let relay = || RequestBody::Relay {
        session: scene.id,
        reader: Reader::Other,
    };
    assert!(refused(thief.ask_with(relay(), &[own.0.as_fd()])));
    let share = || RequestBody::Share {
        session: scene.id,
        is_v6: false,
        unread: Blob::Inline(Vec::new()),
    };
    assert!(refused(thief.ask_with(share(), &[own.0.as_fd()])));
    for request in [relay(), share()] {
        let (bare, _) = thief.ask_with(request, &[]);
        assert!(matches!(bare, ReplyBody::Error { errno: INVAL }));
    }
    let counted = thief.counter("server", "sessions_recalled");
    assert_eq!(counted, 0);
}

#[test]
fn a_holder_that_does_not_answer_or_dies_loses_the_session() {
    for dies in [false, true] {
        let bed = Bed::veth();
        let _server = start_server(&bed.a);
        let mut scene = scene(&bed);
        let request = scene.ask();
        assert_eq!(scene.recalled(), [scene.id]);
        if dies {
            scene.holder = Library::start(&scene.path);
        }
        let answer = scene.answer(request);
        assert!(
            matches!(answer, ReplyBody::Error { errno: CONNRESET }),
            "{answer:?}"
        );
        let ended = scene.peer.read(&mut [0; 1]).map_err(|error| error.kind());
        assert_eq!(ended, Err(std::io::ErrorKind::ConnectionReset));
        let late = scene.other.client.counter("server", "recall_timeouts");
        assert_eq!(late, u64::from(!dies));
    }
}
