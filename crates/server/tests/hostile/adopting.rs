//! Connections that are claimed to be of the previous server's time. A ring proves whose channel it is, and the row of a
//! flow whose connection: nobody gets what was another's.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Acquire;

use portolan_netns::{Bed, Daemon};
use portolan_proto::PROTOCOL;
use portolan_proto::control::{Delivery, Evidence, ReplyBody, RequestBody, Reuse};
use portolan_proto::local::{RING_MIN, Side};
use portolan_sys::shm::Rings;
use portolan_sys::unix::{PairKind, socket_pair};
use portolan_types::{FlowKey, Generation, Protocol, SessionId, Slot};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::Signal;

use crate::common::{Client, Library, Near, await_some, control_path, start_server};
use crate::leases::lease;
use crate::{as_nobody, hostile_library, open_to_b};

/// A process with a connection, under a server that dies.
struct Left {
    library: Library,
    _near: Near,
    peer: TcpStream,
    connection: Connection,
}

#[derive(Clone, Copy)]
struct Connection {
    id: SessionId,
    flow: FlowKey,
    slot: Slot,
    generation: Generation,
}

fn open(bed: &Bed, mut library: Library) -> Left {
    let (id, near, slot, peer) = open_to_b(bed, &mut library);
    let session = library.stack.tcp(slot).expect("it is here");
    let (flow, generation) = (session.flow, session.generation);
    Left {
        library,
        _near: near,
        peer,
        connection: Connection {
            id,
            flow,
            slot,
            generation,
        },
    }
}

/// Kills the server, and starts another.
fn replace(bed: &Bed, mut server: Daemon) -> Daemon {
    server.signal(Signal::KILL);
    server.await_end();
    start_server(&bed.a)
}

fn hello(path: &Path, ring: BorrowedFd<'_>) -> (Client, bool) {
    let mut client = Client::connect(path);
    let continues = greet(&mut client, ring);
    (client, continues)
}

fn greet(client: &mut Client, ring: BorrowedFd<'_>) -> bool {
    let hello = RequestBody::Hello {
        version: PROTOCOL,
        program: "test".into(),
    };
    match client.ask_with(hello, &[ring]) {
        (ReplyBody::Welcome { continues, .. }, fds) => {
            assert_eq!(fds.len(), if continues { 6 } else { 8 });
            continues
        }
        (reply, _) => panic!("{reply:?}"),
    }
}

/// Returns what the server says, and the descriptor.
fn adopt(client: &mut Client, connection: Connection) -> (Option<i32>, OwnedFd) {
    let evidence = Evidence::Row(connection.generation);
    adopt_by(client, connection, (evidence, None))
}

fn adopt_by(
    client: &mut Client,
    connection: Connection,
    (evidence, memory): (Evidence, Option<BorrowedFd<'_>>),
) -> (Option<i32>, OwnedFd) {
    let (near, far) = socket_pair(PairKind::Stream).unwrap();
    let request = RequestBody::Adopt {
        session: connection.id,
        local: connection.flow.local,
        remote: connection.flow.remote,
        slot: connection.slot,
        evidence,
        reuse: Reuse::default(),
        v6_only: false,
        delivery: Delivery::Shm,
        priority: 0,
    };
    let ends = [far.as_fd(), near.as_fd()];
    let fds: Vec<_> = ends.into_iter().chain(memory).collect();
    let errno = match client.ask_with(request, &fds).0 {
        ReplyBody::Adopted { .. } => None,
        ReplyBody::Error { errno } => Some(errno),
        reply => panic!("{reply:?}"),
    };
    (errno, near)
}

#[test]
fn a_program_continues_with_its_own_connection_once() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut left = open(&bed, hostile_library(&path));
    let server = replace(&bed, server);
    let ring = left.library.maps.ring.as_fd();
    let (mut client, continues) = as_nobody(|| hello(&path, ring));
    assert!(continues);
    let elsewhere = [
        Connection {
            slot: Slot(left.connection.slot.0 + 1),
            ..left.connection
        },
        Connection {
            generation: Generation(left.connection.generation.0 + 1),
            ..left.connection
        },
        Connection {
            flow: left.connection.flow.reversed(),
            ..left.connection
        },
    ];
    for wrong in elsewhere {
        assert_eq!(adopt(&mut client, wrong).0, Some(libc::EPERM));
    }
    let nameless = Connection {
        id: SessionId(0),
        ..left.connection
    };
    assert_eq!(adopt(&mut client, nameless).0, Some(libc::EINVAL));
    let (adopted, near) = adopt(&mut client, left.connection);
    assert_eq!(adopted, None);
    assert_eq!(adopt(&mut client, left.connection).0, Some(libc::EPERM));
    // The ring is one process's.
    let (_, continues) = as_nobody(|| hello(&path, ring));
    assert!(!continues);
    assert_eq!(client.counter("server", "connections_adopted"), 1);
    assert_eq!(client.counter("server", "adoptions_refused"), 5);
    assert_eq!(client.counter("server", "channels_refused"), 1);
    // It is like any other: the last close without its state resets it.
    drop(near);
    let reset = left.peer.read(&mut [0]);
    assert!(reset.is_err(), "{reset:?}");
    drop(server);
}

#[test]
fn nobody_continues_with_what_was_anothers() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let victim = open(&bed, Library::start(&path));
    let own = open(&bed, hostile_library(&path));
    let _server = replace(&bed, server);
    let victims = victim.library.maps.ring.as_fd();
    // Another user's ring, and things that are none.
    let null = std::fs::File::open("/dev/null").unwrap();
    let doorbell = own.library.maps.doorbell.as_fd();
    for shown in [victims, doorbell, null.as_fd(), own.peer.as_fd()] {
        let (mut client, continues) = as_nobody(|| hello(&path, shown));
        assert!(!continues);
        for connection in [victim.connection, own.connection] {
            assert_eq!(adopt(&mut client, connection).0, Some(libc::EPERM));
        }
    }
    // The right ring, and another's connection.
    let ring = own.library.maps.ring.as_fd();
    let (mut client, continues) = as_nobody(|| hello(&path, ring));
    assert!(continues);
    assert_eq!(adopt(&mut client, victim.connection).0, Some(libc::EPERM));
    // The victim continues.
    let (mut again, continues) = hello(&path, victims);
    assert!(continues);
    let (adopted, _near) = adopt(&mut again, victim.connection);
    assert_eq!(adopted, None);
    // Its number is not to be had by one's own connection.
    let with_its_number = Connection {
        id: victim.connection.id,
        ..own.connection
    };
    assert_eq!(adopt(&mut client, with_its_number).0, Some(libc::EINVAL));
    assert_eq!(adopt(&mut client, own.connection).0, None);
}

#[test]
fn what_nobody_has_named_is_reset() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut silent = open(&bed, hostile_library(&path));
    let mut dead = open(&bed, hostile_library(&path));
    let mut server = server;
    server.signal(Signal::KILL);
    server.await_end();
    // Its tap is gone before the next server looks.
    drop((dead.library, dead._near));
    let _server = start_server(&bed.a);
    let reset = dead.peer.read(&mut [0]);
    assert!(reset.is_err(), "{reset:?}");
    let mut client = Client::connect(&path);
    assert_eq!(client.counter("server", "connections_abandoned"), 1);
    // The other has as long as any process.
    silent.peer.set_read_timeout(None).unwrap();
    let reset = silent.peer.read(&mut [0]);
    assert!(reset.is_err(), "{reset:?}");
    await_some("both are gone", || {
        client.sessions().is_empty().then_some(())
    });
    let ring = silent.library.maps.ring.as_fd();
    let (mut late, continues) = as_nobody(|| hello(&path, ring));
    assert!(!continues);
    assert_eq!(adopt(&mut late, silent.connection).0, Some(libc::EPERM));
}

/// A connection that the previous server did not know, on a port that was leased.
fn unregistered(port: u16, remote: SocketAddr) -> Connection {
    Connection {
        id: SessionId(0),
        flow: FlowKey {
            protocol: Protocol::Tcp,
            local: SocketAddr::new(Bed::A4, port),
            remote,
        },
        slot: Slot(20),
        generation: Generation::UNREGISTERED,
    }
}

#[test]
fn who_had_a_port_under_lease_continues_with_connections_on_it() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Library::start(&path);
    let mut own = hostile_library(&path);
    let (others, mine) = (lease(&mut victim, 1)[0], lease(&mut own, 1)[0]);
    let _server = replace(&bed, server);
    let ring = own.maps.ring.as_fd();
    let (mut client, continues) = as_nobody(|| hello(&path, ring));
    assert!(continues);
    let peer = SocketAddr::new(Bed::B4, 80);
    let itself = SocketAddr::new(Bed::A4, 80);
    let nobody = SocketAddr::new(Bed::B4, 0);
    for wrong in [
        unregistered(others.number, peer),
        unregistered(mine.number ^ 1, peer),
        unregistered(mine.number, itself),
        unregistered(mine.number, nobody),
    ] {
        assert_eq!(adopt(&mut client, wrong).0, Some(libc::EPERM));
    }
    let connection = unregistered(mine.number, peer);
    let (adopted, _near) = adopt(&mut client, connection);
    assert_eq!(adopted, None);
    let twice = adopt(&mut client, connection).0;
    assert_eq!(twice, Some(libc::EPERM));
    assert_eq!(client.counter("server", "connections_adopted"), 1);
}

/// Any memory may be shown, and any address said: it decides nothing about packets or ports.
#[test]
fn ends_of_sessions_within_the_host_are_adopted_by_their_memory() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut client = as_nobody(|| Library::start(&path)).client;
    let end = |id| Connection {
        id: SessionId(id),
        flow: FlowKey {
            protocol: Protocol::Tcp,
            local: "10.0.0.1:443".parse().unwrap(),
            remote: "10.0.0.1:50000".parse().unwrap(),
        },
        slot: Slot(1),
        generation: Generation(1),
    };
    let memory = Rings::create(RING_MIN).unwrap();
    let mut adopt_end = |id, side, memory: BorrowedFd<'_>| {
        adopt_by(&mut client, end(id), (Evidence::Memory(side), Some(memory)))
    };
    let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 1 << 20).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for wrong in [unsealed.as_fd(), null.as_fd()] {
        let (errno, _) = adopt_end(7, Side::Opener, wrong);
        assert_eq!(errno, Some(libc::EINVAL));
    }
    let (errno, opener) = adopt_end(7, Side::Opener, memory.as_fd());
    assert_eq!(errno, None);
    for (id, side) in [(7, Side::Accepter), (8, Side::Opener)] {
        let (errno, _) = adopt_end(id, side, memory.as_fd());
        assert_eq!(errno, Some(libc::EINVAL), "{id} {side:?}");
    }
    let (errno, _accepter) = adopt_end(8, Side::Accepter, memory.as_fd());
    assert_eq!(errno, None);
    // The peer of an end whose process has gone sees it in the memory.
    drop(opener);
    let rings = Rings::map(&memory).unwrap();
    await_some("end", || {
        let flags = rings.ends().of(Side::Opener).sent.0.flags.load(Acquire);
        (flags != 0).then_some(())
    });
    assert_eq!(client.counter("server", "connections_adopted"), 2);
    assert_eq!(client.counter("server", "adoptions_refused"), 4);
}
