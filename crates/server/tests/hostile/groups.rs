//! Kernel sockets of UDP ports, and group memberships: requests for those of others, invalid and
//! excessive ones, and abuse of those that were granted.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;

use portolan_netns::Bed;
use portolan_proto::control::{GroupAction, GroupChange, ReplyBody, RequestBody, Reuse};
use portolan_types::{Protocol, SessionId, Slot};

use crate::common::{
    Library, Near, await_some, control_path, open_files, open_files_at_rest, start_server,
};
use crate::meter::Meter;
use crate::soak::holdings::rows_of_members;
use crate::{Victim, assert_serves_others, counter, hostile_library, refused};

const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 77, 1, 1));

/// More requests than any process may have granted.
const FLOOD: u32 = 500;

pub(crate) fn bind(library: &mut Library) -> (SessionId, Near) {
    let (reply, near) = library.bind(Protocol::Udp, SocketAddr::new(Bed::A4, 0), Slot(0));
    match reply {
        ReplyBody::Bound { session, .. } => (session, near),
        other => panic!("{other:?}"),
    }
}

fn change(action: GroupAction, group: IpAddr, source: Option<IpAddr>) -> GroupChange {
    GroupChange {
        action,
        group,
        interface: 0,
        source,
    }
}

/// Requests a change on the only managed device.
fn ask(library: &mut Library, session: SessionId, change: GroupChange) -> ReplyBody {
    let metastate = library.metastate();
    let device = metastate.interfaces.iter().find(|i| i.managed).unwrap();
    let change = GroupChange {
        interface: device.index,
        ..change
    };
    let request = RequestBody::Group { session, change };
    library.client.ask_with(request, &[]).0
}

pub(crate) fn join(library: &mut Library, session: SessionId) {
    let reply = ask(library, session, change(GroupAction::Join, GROUP, None));
    assert!(matches!(reply, ReplyBody::Joined { .. }), "{reply:?}");
}

/// Leaves what [`join`] joined, without waiting for an answer.
pub(crate) fn leave_unheard(library: &mut Library, session: SessionId) {
    let metastate = library.metastate();
    let device = metastate.interfaces.iter().find(|i| i.managed).unwrap();
    let change = GroupChange {
        interface: device.index,
        ..change(GroupAction::Leave, GROUP, None)
    };
    let request = RequestBody::Group { session, change };
    library.client.send(request, &[]);
}

pub(crate) fn kernel_socket(library: &mut Library, session: SessionId) -> OwnedFd {
    let (reply, mut fds) = library.client.ask_with(
        RequestBody::KernelSocket {
            session,
            is_v6: false,
        },
        &[],
    );
    assert!(matches!(reply, ReplyBody::KernelSocket), "{reply:?}");
    fds.remove(0)
}

/// Returns every request of this kind about `session`.
fn requests_about(session: SessionId) -> Vec<RequestBody> {
    let source = Some(Bed::B4);
    let changes = [
        change(GroupAction::Join, GROUP, None),
        change(GroupAction::Join, GROUP, source),
        change(GroupAction::Leave, GROUP, None),
        change(GroupAction::Leave, GROUP, source),
        change(GroupAction::Block, GROUP, source),
        change(GroupAction::Unblock, GROUP, source),
    ];
    let groups = changes.map(|change| RequestBody::Group { session, change });
    groups
        .into_iter()
        .chain([RequestBody::KernelSocket {
            session,
            is_v6: false,
        }])
        .collect()
}

#[test]
fn other_peoples_ports_and_memberships_are_out_of_reach() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut honest = Library::start(&path);
    let (session, _near) = bind(&mut honest);
    join(&mut honest, session);
    let mut hostile = hostile_library(&path);
    let before = counter(&path, "server", "refused_requests");
    let mut asked = 0;
    for id in [session, SessionId(0), SessionId(u64::MAX)] {
        for body in requests_about(id) {
            assert_eq!(refused(&mut hostile, body, &[]), libc::EBADF);
            asked += 1;
        }
    }
    assert_eq!(counter(&path, "server", "refused_requests") - before, asked);
    // Nobody has made it leave: it still can.
    let left = ask(
        &mut honest,
        session,
        change(GroupAction::Leave, GROUP, None),
    );
    assert!(matches!(left, ReplyBody::Joined { .. }), "{left:?}");
    meter.finish_but_for_starts();
}

#[test]
fn streams_have_neither_twins_nor_groups() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let (listener, _, _near) = hostile.listen(SocketAddr::new(Bed::A4, 0), 5);
    let (connection, _near, _, _peer) = crate::open_to_b(&bed, &mut hostile);
    for id in [listener, connection] {
        for body in requests_about(id) {
            refused(&mut hostile, body, &[]);
        }
    }
    assert_serves_others(&bed, &path);
    meter.finish_but_for_starts();
}

#[test]
fn changes_that_cannot_be_are_refused() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (session, _near) = bind(&mut hostile);
    let v6: IpAddr = "ff02::77".parse().unwrap();
    let nonsense = [
        change(GroupAction::Join, Bed::B4, None),
        change(GroupAction::Join, IpAddr::from([0; 4]), None),
        change(GroupAction::Join, GROUP, Some(v6)),
        // The port is IPv4.
        change(GroupAction::Join, v6, None),
        change(GroupAction::Block, GROUP, None),
        change(GroupAction::Unblock, GROUP, None),
        change(GroupAction::Block, GROUP, Some(Bed::B4)),
        change(GroupAction::Leave, GROUP, None),
        GroupChange {
            interface: u32::MAX,
            ..change(GroupAction::Join, GROUP, None)
        },
    ];
    for change in nonsense {
        if change.interface == 0 {
            let reply = ask(&mut hostile, session, change);
            assert!(matches!(reply, ReplyBody::Error { .. }), "{change:?}");
        }
        refused(&mut hostile, RequestBody::Group { session, change }, &[]);
    }
    // A released session belongs to nobody.
    let (reply, _) = hostile
        .client
        .ask_with(RequestBody::Release { session }, &[]);
    assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    for body in requests_about(session) {
        refused(&mut hostile, body, &[]);
    }
    victim.assert_unharmed();
}

#[test]
fn floods_of_joins_and_twins_end_and_leave_nothing_behind() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (session, _near) = bind(&mut hostile);
    let before = open_files_at_rest(&server);
    let meter = Meter::start(&bed);
    let mut granted = 0;
    for number in 0..FLOOD {
        let group = Ipv4Addr::from(0xef4e_0000 + number).into();
        let reply = ask(
            &mut hostile,
            session,
            change(GroupAction::Join, group, None),
        );
        granted += u32::from(matches!(reply, ReplyBody::Joined { .. }));
        drop(kernel_socket(&mut hostile, session));
    }
    // The kernel's own limit (`igmp_max_memberships`).
    assert!((1..=100).contains(&granted), "{granted}");
    meter.finish();
    await_some("what the meter had to go", || {
        (open_files(&server) == before).then_some(())
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// A kernel socket is shared with the server, which reads it: the server must neither block on it nor spin.
#[test]
fn whoever_has_a_kernel_socket_stops_nobody_by_it() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (session, _near) = bind(&mut hostile);
    let socket = UdpSocket::from(kernel_socket(&mut hostile, session));
    let own = socket.local_addr().unwrap();
    // Tries to make the server block in its next read, or find an error repeatedly.
    socket.set_nonblocking(false).unwrap();
    for _ in 0..200 {
        socket.send_to(b"to myself", own).unwrap();
    }
    socket.connect(SocketAddr::new(Bed::A4, 9)).unwrap();
    let _ = socket.send(b"to nobody");
    let _ = socket.send(b"and again");
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    let (other, _near) = bind(&mut hostile);
    drop(kernel_socket(&mut hostile, other));
}

/// Many sockets share a port, each a member of as many groups as the kernel allows: each list names them all.
#[test]
fn who_joins_all_groups_keeps_nobody_else_from_one() {
    const SHARERS: u32 = 40;
    const LISTS_OF_USER: u64 = 512;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let local = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7007);
    let reuse = Reuse {
        address: true,
        port: true,
    };
    let mut hostile = hostile_library(&path);
    let meter = Meter::start(&bed);
    let mut kept = Vec::new();
    let (mut granted, mut refusals) = (0, 0);
    for sharer in 0..SHARERS {
        let (reply, near) = hostile.bind_with(Protocol::Udp, local, Slot(0), reuse);
        let ReplyBody::Bound { session, .. } = reply else {
            panic!("{reply:?}");
        };
        kept.push(near);
        for number in 0..20 {
            let group = Ipv4Addr::from(0xef50_0000 + 20 * sharer + number).into();
            let join = change(GroupAction::Join, group, None);
            match ask(&mut hostile, session, join) {
                ReplyBody::Joined { .. } => granted += 1,
                ReplyBody::Error { errno } => {
                    assert_eq!(errno, libc::ENOBUFS);
                    refusals += 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((granted, refusals > 0), (LISTS_OF_USER, true));
    let mut honest = Library::start(&path);
    let (session, _near) = bind(&mut honest);
    join(&mut honest, session);
    meter.finish();
}

/// The first of several leaves: the others' rows move up, and none stays behind.
#[test]
fn whoever_leaves_a_group_leaves_no_row_behind() {
    const SHARERS: u64 = 5;
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let mut library = Library::start(&control_path(&bed.a));
    let local = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7008);
    let reuse = Reuse {
        address: true,
        port: true,
    };
    let mut sharers = Vec::new();
    for slot in 0..SHARERS as u32 {
        let (reply, near) = library.bind_with(Protocol::Udp, local, Slot(slot), reuse);
        let ReplyBody::Bound { session, .. } = reply else {
            panic!("{reply:?}");
        };
        join(&mut library, session);
        sharers.push((session, near));
    }
    // One list for the binding, and one for the group.
    assert_eq!(rows_of_members(&server), 2 * SHARERS);
    for left in (0..SHARERS).rev() {
        let (session, near) = sharers.remove(0);
        let reply = library.client.ask(RequestBody::Release { session });
        assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
        drop(near);
        let lists = if left > 1 { 2 } else { left };
        assert_eq!(rows_of_members(&server), lists * left, "{left} left");
    }
    meter.finish_but_for_starts();
}
