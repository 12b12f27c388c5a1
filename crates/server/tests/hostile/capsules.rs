//! Flushes of sessions that were never cached, or not like this.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::{
    AfterFlush, Blob, ByteRange, Capsule, Reader, ReplyBody, RequestBody,
};
use portolan_stack::Session;
use portolan_sys::shm::{SetAside, write_blob};
use portolan_tcp::KeepAlive;
use portolan_types::SessionId;
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use rustix::net::RecvFlags;

use crate::common::{Library, Near, control_path, start_server};
use crate::meter::Meter;
use crate::{Victim, assert_serves_others, counter, hostile_library, open_to_b, refused};

const PROTO: i32 = 71;

fn unsealed(bytes: &[u8]) -> OwnedFd {
    let fd = memfd_create("forged", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::pwrite(&fd, bytes, 0).unwrap();
    fd
}

fn file() -> OwnedFd {
    std::fs::File::open("/dev/zero").unwrap().into()
}

/// Opens a session, and returns it with its genuine capsule. Its descriptor stays open.
fn session(bed: &Bed, hostile: &mut Library) -> (SessionId, Vec<u8>, Near) {
    let (id, near, slot, _peer) = open_to_b(bed, hostile);
    match hostile.stack.remove(slot) {
        Some(Session::Tcp(session)) => (id, session.to_capsule(), near),
        other => panic!("{other:?}"),
    }
}

fn flush(session: SessionId, capsule: impl Into<Capsule>) -> RequestBody {
    RequestBody::Flush {
        session,
        capsule: capsule.into(),
        then: AfterFlush::Relay(Reader::Sender),
        options_blob: Default::default(),
    }
}

#[test]
fn forged_capsules_are_refused_and_counted() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (_, anothers, _near) = session(&bed, &mut hostile);
    let cases: [fn(Vec<u8>) -> Vec<u8>; 6] = [
        |_| Vec::new(),
        |_| vec![0xff; 5000],
        |_| vec![1; 5000],
        |genuine| genuine[..genuine.len() - 1].to_vec(),
        |genuine| [genuine, vec![0]].concat(),
        |genuine| [vec![9], genuine[1..].to_vec()].concat(),
    ];
    for (number, forge) in cases.into_iter().enumerate() {
        let (id, genuine, _near) = session(&bed, &mut hostile);
        let errno = refused(&mut hostile, flush(id, Blob::Inline(forge(genuine))), &[]);
        assert_eq!(errno, PROTO, "case {number}");
    }
    let (id, _, _near) = session(&bed, &mut hostile);
    let errno = refused(&mut hostile, flush(id, Blob::Inline(anothers)), &[]);
    assert_eq!(errno, PROTO, "the capsule of another session");
    assert_eq!(counter(&path, "server", "capsules_refused"), 7);
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn capsules_in_unsuitable_memory_are_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    type Case = (&'static str, u32, Option<OwnedFd>);
    for number in 0..7 {
        let (id, genuine, _near) = session(&bed, &mut hostile);
        let length = genuine.len() as u32;
        let (case, length, fd): Case = match number {
            0 => ("no memfd", length, None),
            1 => ("not sealed", length, Some(unsealed(&genuine))),
            2 => ("a device", length, Some(file())),
            3 => ("too short", length + 1, Some(write_blob(&genuine).unwrap())),
            4 => ("too long", length - 1, Some(write_blob(&genuine).unwrap())),
            5 => ("huge", u32::MAX, Some(write_blob(&genuine).unwrap())),
            _ => ("empty", 0, Some(write_blob(&[]).unwrap())),
        };
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        let errno = refused(&mut hostile, flush(id, Blob::Memfd { length }), &fds);
        assert_eq!(errno, PROTO, "{case}");
    }
    let (id, genuine, _near) = session(&bed, &mut hostile);
    let blob = write_blob(&genuine).unwrap();
    let length = genuine.len() as u32;
    let body = flush(id, Blob::Memfd { length });
    let (reply, _) = hostile.client.ask_with(body, &[blob.as_fd()]);
    assert!(matches!(reply, ReplyBody::Done), "a genuine one: {reply:?}");
    victim.assert_unharmed();
}

/// Unread bytes are used without a check of each access, so the memory must be as announced.
#[test]
fn unread_bytes_in_unsuitable_memory_are_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let shrinkable = || {
        let fd = unsealed(b"0123456789");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::GROW).unwrap();
        fd
    };
    let writable = || {
        let fd = unsealed(b"0123456789");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        fd
    };
    let sealed = || write_blob(b"0123456789").unwrap();
    type Case = (&'static str, (u32, u32), Option<OwnedFd>);
    let cases: [Case; 10] = [
        ("no memfd", (0, 10), None),
        ("not sealed", (0, 10), Some(unsealed(b"0123456789"))),
        ("it may shrink", (0, 10), Some(shrinkable())),
        ("it may be written to", (0, 10), Some(writable())),
        ("a device", (0, 10), Some(file())),
        ("beyond its end", (1, 10), Some(sealed())),
        ("behind its end", (11, 1), Some(sealed())),
        ("a sum that wraps", (u32::MAX, u32::MAX), Some(sealed())),
        ("nothing of it", (5, 0), Some(sealed())),
        ("of nothing", (0, 0), Some(write_blob(&[]).unwrap())),
    ];
    for (case, (start, length), fd) in cases {
        let (id, genuine, _near) = session(&bed, &mut hostile);
        let capsule = Capsule {
            state: Blob::Inline(genuine),
            unread: Some(ByteRange { start, length }),
        };
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        let errno = refused(&mut hostile, flush(id, capsule), &fds);
        assert_eq!(errno, PROTO, "{case}");
    }
    victim.assert_unharmed();
}

#[test]
fn unread_bytes_are_relayed_from_the_memory_in_which_they_came_and_go_on_in_it() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut library = hostile_library(&path);
    let bytes: Vec<u8> = (0..600_000).map(|index| (index % 251) as u8).collect();
    let (id, genuine, near) = session(&bed, &mut library);
    let memory = SetAside::write(bytes.len(), [(0, &bytes[..])].into_iter()).unwrap();
    let capsule = Capsule {
        state: Blob::Inline(genuine),
        unread: Some(ByteRange {
            start: 7,
            length: 599_990,
        }),
    };
    let (reply, _) = library
        .client
        .ask_with(flush(id, capsule), &[memory.as_fd()]);
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    drop(memory);
    let mut got = [0; 1000];
    rustix::net::recv(&near.0, &mut got[..], RecvFlags::WAITALL).unwrap();
    assert_eq!(got[..], bytes[7..1007]);
    let request = RequestBody::Cache {
        session: id,
        slot: library.stack.reserve(),
    };
    let (reply, fds) = library.client.ask_with(request, &[near.0.as_fd()]);
    let ReplyBody::Cached { capsule, .. } = reply else {
        panic!("{reply:?}");
    };
    let unread = capsule.unread.expect("they lie where they lay");
    assert_eq!((unread.start, unread.length), (1007, 598_990));
    let memory = SetAside::open(fds.into_iter().next_back().unwrap()).unwrap();
    assert!(*memory.into_bytes() == bytes, "the same memory");
    meter.finish_but_for_starts();
}

/// Flushes a session with changed bits, different in each round.
pub(crate) fn flipped(session: SessionId, mut capsule: Vec<u8>, round: usize) -> RequestBody {
    let at = round * 7 % capsule.len();
    capsule[at] ^= 1 << (round % 8);
    if round.is_multiple_of(3) {
        let other = round * 131 % capsule.len();
        capsule[other] = 0xff;
    }
    let then = match round % 2 {
        0 => AfterFlush::Close,
        _ => AfterFlush::Relay(Reader::Sender),
    };
    RequestBody::Flush {
        session,
        capsule: Blob::Inline(capsule).into(),
        then,
        options_blob: Default::default(),
    }
}

/// The server runs whatever passes validation: it must not crash.
#[test]
fn capsules_with_flipped_bits_are_refused_or_harmless() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = hostile_library(&path);
    for round in 0..150_usize {
        let (id, capsule, _near) = session(&bed, &mut hostile);
        hostile.client.ask(flipped(id, capsule, round));
    }
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    meter.finish();
}

#[test]
fn capsules_of_connections_that_would_probe_without_a_pause_are_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&control_path(&bed.a));
    let spoil: [fn(&mut KeepAlive); 3] = [
        |keepalive| keepalive.idle = Duration::ZERO,
        |keepalive| keepalive.interval = Duration::from_millis(1),
        |keepalive| keepalive.count = 0,
    ];
    for (number, spoil) in spoil.into_iter().enumerate() {
        let (id, _near, slot, _peer) = open_to_b(&bed, &mut hostile);
        let Some(Session::Tcp(mut session)) = hostile.stack.remove(slot) else {
            panic!("no session");
        };
        session.connection.options().keepalive.enabled = true;
        spoil(&mut session.connection.options().keepalive);
        let body = flush(id, Blob::Inline(session.to_capsule()));
        assert_eq!(refused(&mut hostile, body, &[]), PROTO, "case {number}");
    }
    meter.finish_but_for_starts();
}
