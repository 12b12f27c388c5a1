//! Local sessions: two programs, perhaps of two users, share memory. Whatever one writes there,
//! requests, or leaves behind spoils the stream between them, and nothing else.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use portolan_local::{Local, Stream, WakeBy};
use portolan_netns::Bed;
use portolan_proto::control::{
    AfterFlush, Blob, DescriptorEvent, Reader, ReplyBody, RequestBody, SocketOptionsBlob,
};
use portolan_proto::local::{Side, flags, holder};
use portolan_proto::qos::{Kind, QosRequest, Scope};
use portolan_sys::shm::Rings;
use portolan_sys::wait::WakeSender;
use portolan_sys::{clock, word};
use portolan_types::{Protocol, SessionId, Slot};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::common::{Client, Library, Near, await_some, control_path, start_server};
use crate::guarantees::requests_about;
use crate::meter::Meter;
use crate::soak::holdings::rows_of_flows;
use crate::{Victim, as_nobody, assert_serves_others, hostile_library, open_to_b, refused};

/// One end, held by a process.
pub(crate) struct End {
    pub id: SessionId,
    rings: Arc<Rings>,
    local: Local,
    near: Near,
}

impl End {
    fn new(id: SessionId, memory: &OwnedFd, side: Side, near: Near) -> End {
        let rings = Arc::new(Rings::map(memory).unwrap());
        let local = Local::new(Arc::clone(&rings), side);
        End {
            id,
            rings,
            local,
            near,
        }
    }

    /// Does what a library does before it sleeps on its notifier.
    pub(crate) fn sleep(&mut self) {
        self.local.look(clock::now());
        self.local.arm(WakeBy::Notifier);
    }

    fn read(&mut self) -> Vec<u8> {
        self.local.look(clock::now());
        let mut bytes = vec![0; self.local.readable()];
        self.local.recv(clock::now(), &mut bytes);
        bytes
    }
}

/// Opens a stream from `opener` to `accepter`.
pub(crate) fn introduce(opener: &mut Library, accepter: &mut Library) -> (End, End) {
    let (_, address, listener) = accepter.listen(([127, 0, 0, 1], 0).into(), 5);
    let (reply, near, _) = opener.connect(Protocol::Tcp, address);
    let ReplyBody::Connecting { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let (event, fds) = near.event();
    assert!(
        matches!(event, DescriptorEvent::EstablishedLocal),
        "{event:?}"
    );
    let opened = End::new(session, &fds[0], Side::Opener, near);
    let (event, mut fds) = listener.event();
    let DescriptorEvent::Accepted { session, .. } = event else {
        panic!("{event:?}");
    };
    let near = Near(fds.remove(0));
    let slot = Slot(7);
    let (reply, fds) = accepter
        .client
        .ask_with(RequestBody::Cache { session, slot }, &[]);
    let ReplyBody::CachedLocal { side, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(side, Side::Accepter);
    (opened, End::new(session, &fds[0], side, near))
}

pub(crate) fn scribble(end: &End, value: u64) {
    let rings = &end.rings;
    for side in [Side::Opener, Side::Accepter] {
        let end = rings.ends().of(side);
        end.sent.0.bytes.store(value, Relaxed);
        end.sent.0.shown.store(value, Relaxed);
        end.sent.0.cycle.store(value, Relaxed);
        end.sent.0.base.store(value, Relaxed);
        end.sent.0.urgent.store(value, Relaxed);
        end.taken.0.bytes.store(value.wrapping_mul(3), Relaxed);
        end.taken.0.room_at.store(value, Relaxed);
        end.sent.0.first_at.store(value, Relaxed);
        end.sent.0.last_at.store(value, Relaxed);
        end.notifier.0.wants.store(u32::MAX, Relaxed);
        end.notifier.0.number.store(value, Relaxed);
    }
}

#[test]
fn rubbish_in_a_local_session_ends_that_session_only() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut honest = Library::start(&path);
    for value in [0, 1, 1 << 20, u64::MAX, u64::MAX / 2, holder::SERVER] {
        let mut hostile = hostile_library(&path);
        let (mut spoiled, mut end) = introduce(&mut hostile, &mut honest);
        let (mut other, mut whole) = introduce(&mut hostile, &mut honest);
        end.local.send(clock::now(), b"some bytes");
        let _ = end.local.publish(clock::now());
        scribble(&spoiled, value);
        let _ = end.read();
        other.local.send(clock::now(), b"well");
        let _ = other.local.publish(clock::now());
        assert_eq!(
            whole.read(),
            b"well",
            "another stream of the same two programs"
        );
        spoiled.local.look(clock::now());
        // The server closes what it leaves behind, whatever its content.
        drop((spoiled, other, hostile));
        let ended = await_some("the end", || {
            whole.local.look(clock::now());
            whole.local.is_receive_shut().then_some(true)
        });
        assert!(ended);
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    meter.finish();
}

/// False flags that the opener's end may set before its process dies.
pub(crate) const LIES: [u32; 4] = [
    flags::CLOSED,
    flags::FIN | flags::CLOSED,
    flags::RESET,
    flags::FIN | flags::CLOSED | flags::RESET,
];

/// Marks the hostile end as ended, without notifying anyone.
pub(crate) fn end_in_silence(hostile: &End, lie: u32) {
    let ends = hostile.rings.ends();
    ends.opener.sent.0.flags.store(lie, Relaxed);
    ends.accepter.notifier.0.number.store(holder::NONE, Relaxed);
    ends.accepter.notifier.0.wants.store(0, Relaxed);
}

#[test]
fn a_peer_that_claims_its_end_and_dies_is_told_of_all_the_same() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    for lie in LIES {
        let mut honest = Library::start(&path);
        let mut hostile = hostile_library(&path);
        let (opened, mut accepted) = introduce(&mut hostile, &mut honest);
        accepted.local.arm(WakeBy::Notifier);
        end_in_silence(&opened, lie);
        drop((opened, hostile));
        await_some("a notification", || {
            honest.wake_receiver.drain().then_some(())
        });
        accepted.local.look(clock::now());
        assert!(accepted.local.is_receive_shut(), "{lie}");
    }
    meter.finish();
}

#[test]
fn who_sleeps_on_a_word_hears_of_such_a_peer_too() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    for lie in LIES {
        let mut honest = Library::start(&path);
        let mut hostile = hostile_library(&path);
        let (opened, mut accepted) = introduce(&mut hostile, &mut honest);
        let is_awake = AtomicBool::new(false);
        thread::scope(|scope| {
            accepted.local.arm(WakeBy::Word);
            let spec = accepted.local.wake_request();
            let is_awake = &is_awake;
            scope.spawn(move || {
                word::sleep_on([spec.word()].into_iter()).expect("futex_waitv");
                is_awake.store(true, Relaxed);
            });
            thread::sleep(Duration::from_millis(50));
            end_in_silence(&opened, lie);
            drop((opened, hostile));
            let slept = await_some_or_wake("a wake-up", &accepted, || is_awake.load(Relaxed));
            assert!(slept, "{lie}: asleep for good");
        });
        accepted.local.look(clock::now());
        assert!(accepted.local.is_receive_shut(), "{lie}");
    }
    meter.finish_but_for_starts();
}

/// Runs `action` while somebody who shares the memory of the session denies that the end of that side has ended.
fn while_denied<T>(rings: &Rings, side: Side, action: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                rings.ends().of(side).sent.0.flags.store(0, Relaxed);
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(action));
        is_over.store(true, Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Waits until the server says that the session's peer has ended.
fn await_news_of_end(library: &mut Library, session: SessionId) {
    await_some("a message", || {
        match library.client.ask(RequestBody::FetchRecalls) {
            ReplyBody::Recalled { ended, .. } => ended.contains(&session).then_some(()),
            other => panic!("{other:?}"),
        }
    });
}

/// What a child of the hostile program does to the memory after its parent's death; the server tells the peer.
#[test]
fn an_accomplice_keeps_no_session_open_by_its_memory() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let mut hostile = hostile_library(&path);
    let (opened, mut accepted) = introduce(&mut hostile, &mut honest);
    let (other, living) = introduce(&mut hostile, &mut honest);
    let shared = Arc::clone(&opened.rings);
    while_denied(&shared, Side::Opener, || {
        drop((opened, other, hostile));
        await_news_of_end(&mut honest, accepted.id);
        accepted.local.note_peer_end(clock::now());
        assert!(accepted.local.is_closed() && accepted.local.error().is_some());
    });
    drop(living);
    meter.finish();
}

/// The server holds the victim's end.
#[test]
fn an_accomplice_keeps_no_relayed_session_open_by_its_memory() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    // The server may look before the accomplice writes.
    for _ in 0..20 {
        let mut hostile = hostile_library(&path);
        let (opened, accepted) = introduce(&mut hostile, &mut honest);
        relay(&mut honest, &accepted);
        let shared = Arc::clone(&opened.rings);
        while_denied(&shared, Side::Opener, || {
            drop((opened, hostile));
            await_some("the end", || {
                let read = rustix::io::read(&accepted.near.0, &mut [0_u8; 1]);
                matches!(read, Ok(0) | Err(Errno::CONNRESET)).then_some(())
            });
        });
    }
    meter.finish_but_for_starts();
}

/// Nobody holds the victim's end: it is taken from the accept queue later.
#[test]
fn nor_a_session_that_is_accepted_after_its_opener_has_died() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let mut hostile = hostile_library(&path);
    let (_, address, listener) = honest.listen(([127, 0, 0, 1], 0).into(), 5);
    let (_, near, _) = hostile.connect(Protocol::Tcp, address);
    let (_, fds) = near.event();
    let shared = Arc::new(Rings::map(&fds[0]).unwrap());
    while_denied(&shared, Side::Opener, || {
        drop((near, hostile));
        let (event, _fds) = listener.event();
        let DescriptorEvent::Accepted { session, .. } = event else {
            panic!("{event:?}");
        };
        await_some("its opener's end", || {
            let sessions = Client::connect(&path).sessions();
            let has_opener = sessions.iter().any(|it| it.remote == Some(address));
            (!has_opener).then_some(())
        });
        let slot = Slot(7);
        let cache = RequestBody::Cache { session, slot };
        let (reply, _) = honest.client.ask_with(cache, &[]);
        assert!(matches!(reply, ReplyBody::CachedLocal { .. }), "{reply:?}");
        await_news_of_end(&mut honest, session);
    });
    meter.finish();
}

/// Connects to a port, and waits for the end of what comes.
const CLIENT: &str = r#"
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
try:
    connection.recv(1)
except ConnectionError:
    pass
"#;

/// What the library of a program makes of the server's message.
#[test]
fn a_program_hears_of_the_end_that_an_accomplice_of_its_peer_denies() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let server = Path::new(env!("CARGO_BIN_EXE_portoland"));
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (_, address, listener) = hostile.listen(([127, 0, 0, 1], 0).into(), 5);
    let mut program = bed.a.exec(server.with_file_name("portolan"));
    program.args(["run", "--require", "--", "python3", "-c", CLIENT]);
    program.arg(address.port().to_string());
    let mut program = program.spawn().unwrap();
    let (event, fds) = listener.event();
    let DescriptorEvent::Accepted { session, .. } = event else {
        panic!("{event:?}");
    };
    let slot = Slot(7);
    let cache = RequestBody::Cache { session, slot };
    let (_, memory) = hostile.client.ask_with(cache, &[]);
    let shared = Rings::map(&memory[0]).unwrap();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(program.try_wait().unwrap(), None, "it waits");
    while_denied(&shared, Side::Accepter, || {
        drop((fds, listener, hostile));
        let start = clock::now();
        let ended = loop {
            let ended = program.try_wait().unwrap();
            if ended.is_some() || clock::now().since(start) > Duration::from_secs(10) {
                break ended;
            }
            thread::sleep(Duration::from_millis(5));
        };
        let _ = program.kill();
        assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    });
    let _ = program.wait();
    meter.finish();
}

/// Waits for a condition; returns false if it does not come, after waking the thread that sleeps on the end's word.
fn await_some_or_wake(what: &str, end: &End, mut has_come: impl FnMut() -> bool) -> bool {
    let start = clock::now();
    while !has_come() {
        if clock::now().since(start) > Duration::from_secs(5) {
            eprintln!("no {what} came");
            let wants = &end.rings.ends().accepter.notifier.0.wants;
            word::wake(wants, word::Scope::Shared);
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Makes the server relay `count` sessions, and notifies it once of data written to all.
pub(crate) fn ring_for_many(
    hostile: &mut Library,
    accepter: &mut Library,
    count: usize,
) -> Vec<(End, End)> {
    let (mut relayed, wake_sender) = relay_many(hostile, accepter, count);
    for (end, _) in &mut relayed {
        end.local.send(clock::now(), &[7; 300_000]);
        let _ = end.local.publish(clock::now());
    }
    wake_sender.wake();
    relayed
}

/// Has the server relay so many sessions; and that by which it is told of them.
fn relay_many(
    hostile: &mut Library,
    accepter: &mut Library,
    count: usize,
) -> (Vec<(End, End)>, WakeSender) {
    let mut relay_one = |_| {
        let (opened, accepted) = introduce(hostile, accepter);
        relay(accepter, &accepted);
        (opened, accepted)
    };
    let relayed: Vec<(End, End)> = (0..count).map(&mut relay_one).collect();
    let session = relayed[0].0.id;
    let (reply, mut fds) = hostile
        .client
        .ask_with(RequestBody::PeerNotifier { session, number: 0 }, &[]);
    let ReplyBody::PeerNotifier { number } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(number, holder::SERVER);
    (relayed, WakeSender::from_fd(fds.remove(0)))
}

/// The holder of an end gives it to the server, which relays.
fn relay(holder: &mut Library, end: &End) {
    let flush = RequestBody::Flush {
        session: end.id,
        capsule: Blob::Inline(Vec::new()).into(),
        then: AfterFlush::Relay(Reader::Sender),
        options_blob: SocketOptionsBlob::default(),
    };
    let reply = holder.client.ask(flush);
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
}

#[test]
fn the_server_has_time_for_others_however_much_it_relays() {
    const SESSIONS: usize = 800;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let mut hostile = hostile_library(&path);
    let mut accepter = hostile_library(&path);
    let relayed = ring_for_many(&mut hostile, &mut accepter, SESSIONS);
    let wait = |_| {
        let start = clock::now();
        honest.client.ask(RequestBody::FetchRecalls);
        clock::now().since(start)
    };
    let longest = (0..300).map(wait).max().expect("there are some");
    assert!(longest < Duration::from_millis(40), "{longest:?}");
    // All are delivered in the end.
    for (_, accepted) in &relayed {
        let mut byte = [0];
        await_some("a byte", || {
            rustix::io::read(&accepted.near.0, &mut byte).ok()
        });
        assert_eq!(byte, [7]);
    }
    meter.finish();
}

/// Each time it looks at all that it relays for the ringer, for nothing.
#[test]
fn who_rings_the_server_without_end_takes_no_time_from_others() {
    const SESSIONS: usize = 800;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut hostile = hostile_library(&path);
    let mut accepter = hostile_library(&path);
    let (relayed, wake_sender) = relay_many(&mut hostile, &mut accepter, SESSIONS);
    let meter = Meter::start(&bed);
    let end = clock::now() + Duration::from_secs(1);
    while clock::now() < end {
        wake_sender.wake();
    }
    meter.finish();
    drop(relayed);
}

#[test]
fn a_notifier_can_be_rung_by_its_peers_and_heard_by_nobody_else() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let mut hostile = hostile_library(&path);
    let mut stranger = hostile_library(&path);
    let (opened, accepted) = introduce(&mut hostile, &mut honest);
    for session in [opened.id, accepted.id, SessionId(1)] {
        let errno = refused(
            &mut stranger,
            RequestBody::PeerNotifier { session, number: 0 },
            &[],
        );
        assert_eq!(errno, libc::EBADF, "not the stranger's");
    }
    let session = opened.id;
    let (reply, fds) = hostile
        .client
        .ask_with(RequestBody::PeerNotifier { session, number: 0 }, &[]);
    let ReplyBody::PeerNotifier { number } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(
        number,
        opened.rings.ends().accepter.notifier.0.number.load(Relaxed)
    );
    assert!(!honest.wake_receiver.is_notified());
    assert_eq!(rustix::io::write(&fds[0], b"!"), Ok(1));
    let mut byte = [0_u8];
    let heard = rustix::net::recv(&fds[0], &mut byte, RecvFlags::DONTWAIT);
    assert_eq!(
        heard.map(|_| ()),
        Err(Errno::AGAIN),
        "who rings does not listen"
    );
    assert!(honest.wake_receiver.is_notified());
    let reopened = as_nobody(|| {
        use std::os::fd::AsRawFd;
        std::fs::File::open(format!("/proc/self/fd/{}", fds[0].as_fd().as_raw_fd()))
    });
    assert!(reopened.is_err(), "nobody opens the side that listens");
    meter.finish_but_for_starts();
}

#[test]
fn the_memory_of_a_local_session_cannot_change_its_size() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let (_, address, _listener) = honest.listen(([127, 0, 0, 1], 0).into(), 5);
    let (_, near, _) = honest.connect(Protocol::Tcp, address);
    let (_, fds) = near.event();
    for size in [0, 4096, 64 << 20] {
        assert_eq!(rustix::fs::ftruncate(&fds[0], size), Err(Errno::PERM));
    }
    meter.finish_but_for_starts();
}

#[test]
fn a_budget_gives_no_rows_to_local_sessions_which_nobody_would_take_away() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let (mut opener, mut accepter) = (Library::start(&path), Library::start(&path));
    let _ends = introduce(&mut opener, &mut accepter);
    let mut client = Client::connect(&path);
    let root = Scope::User { uid: 0 };
    let is_of_receiving = |request: &QosRequest| match request {
        QosRequest::Receive { .. } => true,
        QosRequest::Delete { kind, .. } => *kind == Kind::Receive,
        _ => false,
    };
    for request in requests_about(&root).into_iter().filter(is_of_receiving) {
        client.ask(RequestBody::Qos(request));
    }
    // Another session's row shows that all have been rewritten.
    let (_, _near, _, _peer) = open_to_b(&bed, &mut opener);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(rows_of_flows(&server), 1);
}
