//! Messages that no client should send.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use portolan_netns::Bed;
use portolan_proto::control::{
    AfterFlush, Blob, Reader, ReplyBody, Request, RequestBody, Reuse, SessionRef,
};
use portolan_proto::{MAX_MESSAGE, encode};
use portolan_sys::unix::{Connection, PairKind, socket_pair};
use portolan_types::{Protocol, SessionId, Slot};
use rustix::process::Signal;

use crate::common::{
    Client, Library, await_closes, await_some, control_path, open_files_at_rest, start_server,
};
use crate::meter::Meter;
use crate::{Victim, as_nobody, assert_serves_others, counter, hostile_library, refused};

const SLOT: Slot = Slot(0);

fn remote() -> SocketAddr {
    SocketAddr::new(Bed::B4, 80)
}

/// Returns every request that can name `session`.
pub(crate) fn requests_about(session: SessionId) -> Vec<RequestBody> {
    let known = SessionRef::Known(session);
    vec![
        RequestBody::Cache {
            session,
            slot: SLOT,
        },
        RequestBody::BeginFlush { session },
        RequestBody::Flush {
            session,
            capsule: Blob::Inline(vec![1, 2, 3]).into(),
            then: AfterFlush::Close,
            options_blob: Default::default(),
        },
        RequestBody::Flush {
            session,
            capsule: Blob::Inline(Vec::new()).into(),
            then: AfterFlush::Relay(Reader::Sender),
            options_blob: Default::default(),
        },
        RequestBody::Describe {
            session,
            options_blob: Default::default(),
        },
        RequestBody::Release { session },
        RequestBody::Direct { session },
        RequestBody::Disconnect {
            session,
            slot: SLOT,
        },
        RequestBody::Connect {
            session: known,
            protocol: Protocol::Tcp,
            remote: remote(),
            slot: SLOT,
            options: portolan_proto::control::HandshakeOptions::default(),
            early: portolan_proto::control::FastOpenMode::No,
        },
        RequestBody::Listen {
            session: known,
            backlog: 1,
            options: portolan_proto::control::HandshakeOptions::default(),
            options_blob: Default::default(),
            slot: None,
        },
        RequestBody::Bind {
            session: known,
            protocol: Protocol::Tcp,
            local: SocketAddr::new(Bed::A4, 0),
            reuse: Reuse::default(),
            v6_only: false,
            slot: SLOT,
        },
    ]
}

#[test]
fn other_peoples_sessions_and_invented_ones_cannot_be_named() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = hostile_library(&path);
    let before = counter(&path, "server", "refused_requests");
    let mut asked = 0;
    for id in [victim.id, SessionId(0), SessionId(1), SessionId(u64::MAX)] {
        for body in requests_about(id) {
            refused(&mut hostile, body, &[]);
            asked += 1;
        }
        // These are not answered.
        for body in [
            RequestBody::Accepted { session: id },
            RequestBody::AbortFlush { session: id },
        ] {
            hostile.client.send(body, &[]);
        }
    }
    let counted = counter(&path, "server", "refused_requests") - before;
    assert_eq!(counted, asked);
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn a_flood_of_requests_drowns_nobody_else() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let deaf = as_nobody(|| Connection::connect(&path).unwrap());
    let status = encode(&Request {
        id: 1,
        body: RequestBody::ReadStatus,
    });
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(1) {
        // Never reads a reply: the server hangs up, or stops reading.
        let _ = deaf.send(&status, &[]);
    }
    let asked = Instant::now();
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    assert!(
        asked.elapsed() < Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
    meter.finish();
}

#[test]
fn messages_of_any_size_and_content_end_at_worst_the_connection() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let genuine = encode(&Request {
        id: 1,
        body: RequestBody::Hello {
            version: portolan_proto::PROTOCOL,
            program: "x".repeat(10_000),
        },
    });
    let huge = vec![0xab; MAX_MESSAGE + 1000];
    let mut messages = vec![vec![0], vec![0xff; 9], huge];
    messages.extend((0..genuine.len().min(12)).map(|cut| genuine[..cut].to_vec()));
    for seed in 0..300_u32 {
        let bytes = (0..seed % 40).map(|i| (seed.wrapping_mul(2_654_435_761) >> (i % 24)) as u8);
        messages.push(bytes.collect());
    }
    as_nobody(|| {
        for message in messages {
            // The queue of the control socket is short.
            let connection = await_some("connection", || Connection::connect(&path).ok());
            // The kernel may refuse an empty or too long message.
            let _ = connection.send(&message, &[]);
        }
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    meter.finish();
}

/// Returns pairs of descriptors for a new session, at least one of which is unsuitable.
pub(crate) fn wrong_pairs(control: BorrowedFd<'_>) -> Vec<(&'static str, Vec<OwnedFd>)> {
    let file = || OwnedFd::from(File::open("/dev/null").unwrap());
    let own = || control.try_clone_to_owned().unwrap();
    let pair = || socket_pair(PairKind::Stream).unwrap();
    let inet = || OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    let eventfd = || rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    vec![
        ("none", vec![]),
        ("one", vec![pair().0]),
        ("three", vec![pair().0, pair().1, pair().0]),
        ("files", vec![file(), file()]),
        ("a file for the near end", vec![pair().0, file()]),
        ("an internet socket", vec![inet(), inet()]),
        ("eventfds", vec![eventfd(), eventfd()]),
        ("the control connection, twice", vec![own(), own()]),
        (
            "the control connection as the far end",
            vec![own(), pair().0],
        ),
        (
            "the control connection as the near end",
            vec![pair().0, own()],
        ),
    ]
}

#[test]
fn wrong_descriptors_are_refused_and_not_kept() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let before = open_files_at_rest(&server);
    let control = hostile.client.as_fd().try_clone_to_owned().unwrap();
    for (case, fds) in wrong_pairs(control.as_fd()) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let body = RequestBody::Connect {
            session: SessionRef::New,
            protocol: Protocol::Tcp,
            remote: remote(),
            slot: SLOT,
            options: portolan_proto::control::HandshakeOptions::default(),
            early: portolan_proto::control::FastOpenMode::No,
        };
        let errno = refused(&mut hostile, body, &fds);
        assert_eq!(errno, 22, "{case}");
        refused(
            &mut hostile,
            RequestBody::Listen {
                session: SessionRef::New,
                backlog: 1,
                options: portolan_proto::control::HandshakeOptions::default(),
                options_blob: Default::default(),
                slot: None,
            },
            &fds,
        );
    }
    // A thread closes them.
    await_closes(&server, before);
    let file = File::open("/dev/null").unwrap();
    assert_eq!(
        refused(&mut hostile, RequestBody::Probe, &[file.as_fd()]),
        22
    );
    assert_eq!(refused(&mut hostile, RequestBody::Probe, &[]), 22);
    victim.assert_unharmed();
}

/// Two sessions that would keep each other: the server has the near end of one as the far end of the other.
#[test]
fn a_sessions_own_end_is_no_end_of_another() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let before = open_files_at_rest(&server);
    let pair = || socket_pair(PairKind::SeqPacket).unwrap();
    let listen = |far: &OwnedFd, near: &OwnedFd, library: &mut Library| {
        let body = RequestBody::Listen {
            session: SessionRef::New,
            backlog: 1,
            options: Default::default(),
            options_blob: Default::default(),
            slot: None,
        };
        library
            .client
            .ask_with(body, &[far.as_fd(), near.as_fd()])
            .0
    };
    let (first_far, first_near) = pair();
    let (second_far, second_near) = pair();
    // The peer of each end would be the server's.
    for (far, near) in [(&first_far, &second_near), (&first_near, &second_far)] {
        let reply = listen(far, near, &mut hostile);
        let is_refused = matches!(
            reply,
            ReplyBody::Error {
                errno: libc::EINVAL
            }
        );
        assert!(is_refused, "{reply:?}");
    }
    let reply = listen(&first_far, &first_near, &mut hostile);
    assert!(matches!(reply, ReplyBody::Listening { .. }), "{reply:?}");
    for (far, near) in [
        (&first_near, &second_near),
        (&second_far, &first_far),
        (&second_far, &first_near),
        (&first_near, &first_far),
        (&first_far, &first_near),
    ] {
        let reply = listen(far, near, &mut hostile);
        let is_refused = matches!(
            reply,
            ReplyBody::Error {
                errno: libc::EINVAL
            }
        );
        assert!(is_refused, "{reply:?}");
    }
    drop((first_far, first_near, second_far, second_near));
    drop(hostile);
    await_closes(&server, before - 1);
    victim.assert_unharmed();
}

/// The server would keep the connection's other end, and thereby the connection.
#[test]
fn a_connection_that_is_shown_as_a_right_ends_all_the_same() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let before = open_files_at_rest(&server);
    for _ in 0..10 {
        let mut client = as_nobody(|| Client::connect(&path));
        let own = client.as_fd().try_clone_to_owned().unwrap();
        client.ask_with(RequestBody::ShowRight, &[own.as_fd()]);
    }
    await_closes(&server, before);
    victim.assert_unharmed();
}

#[test]
fn a_probe_tells_nothing_of_what_is_not_shown() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = Client::connect(&path);
    let (one, other) = socket_pair(PairKind::Stream).unwrap();
    let own = hostile.as_fd().try_clone_to_owned().unwrap();
    for end in [one, other, own] {
        let (reply, _) = hostile.ask_with(RequestBody::Probe, &[end.as_fd()]);
        assert!(matches!(reply, ReplyBody::Probed(None)), "{reply:?}");
    }
    victim.assert_unharmed();
}

#[test]
fn one_user_cannot_take_all_channels() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let hello = || RequestBody::Hello {
        version: portolan_proto::PROTOCOL,
        program: "greedy".into(),
    };
    let mut clients = Vec::new();
    let limit = loop {
        let mut client = as_nobody(|| Client::connect(&path));
        match client.ask(hello()) {
            ReplyBody::Welcome { .. } => clients.push(client),
            _ => break clients.len(),
        }
    };
    assert!(limit < 256, "{limit}");
    assert_serves_others(&bed, &path);
    meter.finish();
}

/// Each request leads to a listener's hang-up, before which the next request is read.
#[test]
fn requests_that_wait_for_others_use_up_no_stack() {
    const LISTENERS: usize = 250;
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut programs: Vec<_> = (0..8).map(|_| hostile_library(&path)).collect();
    let listening: Vec<Vec<_>> = programs
        .iter_mut()
        .map(|program| {
            let local = SocketAddr::new(Bed::A4, 0);
            let listen = |_| program.listen(local, 1);
            (0..LISTENERS).map(listen).collect()
        })
        .collect();
    server.signal(Signal::STOP);
    for (program, listening) in programs.iter_mut().zip(listening) {
        for (session, _, near) in listening {
            drop(near);
            let release = encode(&Request {
                id: 0,
                body: RequestBody::Release { session },
            });
            program.client.send_raw(&release);
        }
    }
    server.signal(Signal::CONT);
    assert_serves_others(&bed, &path);
    victim.assert_unharmed();
}
