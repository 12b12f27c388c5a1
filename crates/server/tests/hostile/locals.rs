//! Local sessions: two programs share memory, perhaps of two users. What one writes there, asks for, or
//! leaves behind spoils the stream between them, and nothing else.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use portolan_local::{Local, Stream};
use portolan_netns::Bed;
use portolan_proto::control::{DescriptorEvent, ReplyBody, RequestBody};
use portolan_proto::local::{Side, holder};
use portolan_sys::clock;
use portolan_sys::shm::Rings;
use portolan_types::{Protocol, SessionId, Slot};
use rustix::io::Errno;

use crate::common::{Library, Near, await_some, control_path, start_server};
use crate::{Victim, as_nobody, assert_serves_others, hostile_library, refused};

/// One end in a process's hands.
struct End {
    id: SessionId,
    rings: Arc<Rings>,
    local: Local,
    _near: Near,
}

impl End {
    fn new(id: SessionId, memory: &OwnedFd, side: Side, near: Near) -> End {
        let rings = Arc::new(Rings::map(memory).unwrap());
        let local = Local::new(Arc::clone(&rings), side);
        End {
            id,
            rings,
            local,
            _near: near,
        }
    }

    fn read(&mut self) -> Vec<u8> {
        self.local.look(clock::now());
        let mut octets = vec![0; self.local.readable()];
        self.local.recv(clock::now(), &mut octets);
        octets
    }
}

/// A stream that `opener` opens to `accepter`.
fn introduce(opener: &mut Library, accepter: &mut Library) -> (End, End) {
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

fn scribble(rings: &Rings, value: u64) {
    for side in [Side::Opener, Side::Accepter] {
        let end = rings.ends().of(side);
        end.sent.0.octets.store(value, Relaxed);
        end.sent.0.base.store(value, Relaxed);
        end.sent.0.urgent.store(value, Relaxed);
        end.taken.0.store(value.wrapping_mul(3), Relaxed);
        end.bell.0.wants.store(u32::MAX, Relaxed);
        end.bell.0.number.store(value, Relaxed);
    }
}

#[test]
fn rubbish_in_a_local_session_ends_that_session_only() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut honest = Library::start(&path);
    for value in [0, 1, 1 << 20, u64::MAX, u64::MAX / 2, holder::SERVER] {
        let mut hostile = hostile_library(&path);
        let (mut spoiled, mut end) = introduce(&mut hostile, &mut honest);
        let (mut other, mut whole) = introduce(&mut hostile, &mut honest);
        end.local.send(clock::now(), b"some octets");
        let _ = end.local.publish();
        scribble(&spoiled.rings, value);
        let _ = end.read();
        other.local.send(clock::now(), b"well");
        let _ = other.local.publish();
        assert_eq!(
            whole.read(),
            b"well",
            "another stream of the same two programs"
        );
        spoiled.local.look(clock::now());
        // The server closes what it leaves behind, rubbish and all.
        drop((spoiled, other, hostile));
        let ended = await_some("the end", || {
            whole.local.look(clock::now());
            whole.local.is_receive_shut().then_some(true)
        });
        assert!(ended);
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

#[test]
fn a_bell_can_be_rung_by_its_peers_and_heard_by_nobody_else() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut honest = Library::start(&path);
    let mut hostile = hostile_library(&path);
    let mut stranger = hostile_library(&path);
    let (opened, accepted) = introduce(&mut hostile, &mut honest);
    for session in [opened.id, accepted.id, SessionId(1)] {
        let errno = refused(&mut stranger, RequestBody::Bell { session }, &[]);
        assert_eq!(errno, libc::EBADF, "not the stranger's");
    }
    let session = opened.id;
    let (reply, fds) = hostile.client.ask_with(RequestBody::Bell { session }, &[]);
    let ReplyBody::Bell { number } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(
        number,
        opened.rings.ends().accepter.bell.0.number.load(Relaxed)
    );
    assert_eq!(rustix::io::write(&fds[0], b"!"), Ok(1));
    assert_eq!(rustix::io::read(&fds[0], &mut [0]), Err(Errno::BADF));
    let reopened = as_nobody(|| {
        use std::os::fd::AsRawFd;
        std::fs::File::open(format!("/proc/self/fd/{}", fds[0].as_fd().as_raw_fd()))
    });
    assert!(reopened.is_err(), "nobody opens the side that listens");
}

#[test]
fn the_memory_of_a_local_session_cannot_change_its_size() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut honest = Library::start(&path);
    let (_, address, _listener) = honest.listen(([127, 0, 0, 1], 0).into(), 5);
    let (_, near, _) = honest.connect(Protocol::Tcp, address);
    let (_, fds) = near.event();
    for size in [0, 4096, 64 << 20] {
        assert_eq!(rustix::fs::ftruncate(&fds[0], size), Err(Errno::PERM));
    }
}
