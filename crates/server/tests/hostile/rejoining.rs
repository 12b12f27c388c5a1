//! Sessions claimed to be of a previous server. A number proves that its descriptor was read; a made-up number yields a
//! session of its maker, and nothing of others.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody, Reuse, SessionRef};
use portolan_sys::unix::{PairKind, socket_pair};
use portolan_types::{Protocol, SessionId, Slot};

use crate::common::{Library, control_path, start_server};
use crate::hostile_library;
use crate::meter::Meter;

const PORT: u16 = 7001;

fn bind_again(
    library: &mut Library,
    (id, protocol, port): (u64, Protocol, u16),
) -> (ReplyBody, Vec<OwnedFd>, OwnedFd) {
    let (near, far) = socket_pair(PairKind::SeqPacket).unwrap();
    let request = RequestBody::Bind {
        session: SessionRef::Again(SessionId(id)),
        protocol,
        local: SocketAddr::new(Bed::A4, port),
        reuse: Reuse::default(),
        v6_only: false,
        slot: Slot(0),
    };
    let fds = [far.as_fd(), near.as_fd()];
    let (reply, fds) = library.client.ask_with(request, &fds);
    (reply, fds, near)
}

fn errno(reply: &ReplyBody) -> Option<i32> {
    match reply {
        ReplyBody::Error { errno } => Some(*errno),
        _ => None,
    }
}

#[test]
fn processes_that_know_the_number_share_one_descriptor() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut first = Library::start(&path);
    let mut second = Library::start(&path);
    let (reply, fds, near) = bind_again(&mut first, (77, Protocol::Tcp, PORT));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!((session, fds.len()), (SessionId(77), 0));
    let (reply, fds, _) = bind_again(&mut second, (77, Protocol::Tcp, PORT));
    assert!(matches!(reply, ReplyBody::Rejoined { .. }), "{reply:?}");
    let cookie = |fd: &OwnedFd| portolan_sys::unix::cookie(fd).unwrap();
    assert_eq!(fds.iter().map(cookie).collect::<Vec<_>>(), [cookie(&near)]);
    // It is gone with all processes that had it: the port is free.
    drop((first, near, second, fds));
    let mut third = Library::start(&path);
    let (reply, _) = third.bind(Protocol::Tcp, SocketAddr::new(Bed::A4, PORT), Slot(0));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    meter.finish_but_for_starts();
}

#[test]
fn a_number_gives_no_port_that_its_program_may_not_bind_and_no_session_of_another_kind() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Library::start(&path);
    let local = SocketAddr::new(Bed::A4, PORT);
    let (reply, _near) = victim.bind(Protocol::Tcp, local, Slot(0));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let mut hostile = hostile_library(&path);
    let mut refused = |wanted| {
        let (reply, fds, _) = bind_again(&mut hostile, wanted);
        assert!(fds.is_empty(), "{reply:?}");
        errno(&reply).unwrap_or_else(|| panic!("{reply:?}"))
    };
    assert_eq!(refused((0, Protocol::Tcp, 7002)), libc::EBADF);
    assert_eq!(refused((5, Protocol::Tcp, 443)), libc::EACCES);
    assert_eq!(refused((5, Protocol::Tcp, PORT)), libc::EADDRINUSE);
    // Even a known number is that of a session that nobody has reopened.
    assert_eq!(refused((session.0, Protocol::Tcp, PORT)), libc::EADDRINUSE);
    let (reply, _, _near) = bind_again(&mut hostile, (6, Protocol::Udp, 7003));
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let (reply, _, _) = bind_again(&mut hostile, (6, Protocol::Udp, 7003));
    assert_eq!(
        errno(&reply),
        Some(libc::EADDRINUSE),
        "one of UDP is one process's"
    );
    meter.finish_but_for_starts();
}

#[test]
fn a_port_token_is_only_for_who_knows_the_listener() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let token = |session| RequestBody::PortToken { session };
    let (reply, fds) = hostile.client.ask_with(token(SessionId(1)), &[]);
    assert_eq!((errno(&reply), fds.len()), (Some(libc::EBADF), 0));
    // A bound session has none yet.
    let (reply, _near) = hostile.bind(Protocol::Tcp, SocketAddr::new(Bed::A4, PORT), Slot(0));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    let (reply, fds) = hostile.client.ask_with(token(session), &[]);
    assert_eq!((errno(&reply), fds.len()), (Some(libc::EINVAL), 0));
    meter.finish_but_for_starts();
}
