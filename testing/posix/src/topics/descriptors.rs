//! fcntl, ioctl and fstat.

use libc::{
    F_GETFD, F_GETFL, F_GETOWN, F_SETFD, F_SETFL, FD_CLOEXEC, FIONBIO, FIONREAD, O_APPEND,
    O_NONBLOCK, S_IFSOCK, SEEK_CUR, SOCK_CLOEXEC, SOCK_NONBLOCK, TIOCOUTQ, c_int,
};

use crate::{
    call::{self, DATAGRAM, Fd, STREAM},
    show::{told, worked},
    side::Side,
};

const SIOCATMARK: u64 = 0x8905;

pub(super) fn run(side: &mut Side) {
    let connected = side.connection();
    for (kind, name) in [(STREAM, "stream"), (DATAGRAM, "datagram")] {
        flags(side, name, kind);
        let socket = side.socket(kind);
        requests(side, name, socket);
    }
    requests(side, "connected", connected);
    interfaces(side, connected);
    side.step();
}

fn flags(side: &Side, kind_name: &str, kind: c_int) {
    for (extra, name) in [
        (0, "plain"),
        (SOCK_NONBLOCK, "non-blocking"),
        (SOCK_CLOEXEC, "close-on-exec"),
    ] {
        let socket = side.socket(kind | extra);
        let check = format!("{kind_name} {name}: status, descriptor");
        side.report(
            &check,
            format!(
                "{}, {}",
                status(socket),
                told(call::fcntl(socket, F_GETFD, 0))
            ),
        );
    }
    let socket = side.socket(kind);
    let check = |what: &str| format!("{kind_name}: {what}");
    side.report(
        &check("set non-blocking"),
        told(call::fcntl(socket, F_SETFL, O_NONBLOCK)),
    );
    side.report(&check("status"), status(socket));
    side.report(
        &check("set append"),
        told(call::fcntl(socket, F_SETFL, O_APPEND)),
    );
    side.report(&check("status"), status(socket));
    side.report(
        &check("set close-on-exec"),
        told(call::fcntl(socket, F_SETFD, FD_CLOEXEC)),
    );
    side.report(&check("descriptor"), told(call::fcntl(socket, F_GETFD, 0)));
    side.report(&check("owner"), told(call::fcntl(socket, F_GETOWN, 0)));
    side.report(
        &check("unknown command"),
        told(call::fcntl(socket, 9999, 0)),
    );
    side.report(&check("FIONBIO on"), told(call::ioctl(socket, FIONBIO, 1)));
    side.report(&check("status"), status(socket));
    side.report(&check("FIONBIO off"), told(call::ioctl(socket, FIONBIO, 0)));
    side.report(&check("status"), status(socket));
    side.report(
        &check("is a socket"),
        told(call::file_type(socket).map(|kind| kind == S_IFSOCK)),
    );
    side.report(&check("seek"), call::seek(socket, 0, SEEK_CUR));
}

/// Ioctls about interfaces work on any socket.
fn interfaces(side: &Side, connected: Fd) {
    let requests = [
        (libc::SIOCGIFFLAGS, "SIOCGIFFLAGS"),
        (libc::SIOCGIFADDR, "SIOCGIFADDR"),
        (libc::SIOCGIFNETMASK, "SIOCGIFNETMASK"),
        (libc::SIOCGIFBRDADDR, "SIOCGIFBRDADDR"),
        (libc::SIOCGIFMTU, "SIOCGIFMTU"),
        (libc::SIOCGARP, "SIOCGARP"),
    ];
    let listener = side.own_listener();
    let kinds = [
        (connected, "connected"),
        (listener, "listener"),
        (side.socket(DATAGRAM), "datagram"),
    ];
    for (socket, kind) in kinds {
        for (request, what) in requests {
            let answer = call::of_interface(socket, request, "eth0");
            side.report(
                &format!("{kind}: {what}"),
                told(answer.map(|bytes| format!("{bytes:x?}"))),
            );
        }
        let unknown = call::of_interface(socket, libc::SIOCGIFADDR, "none0");
        side.report(&format!("{kind}: no interface"), worked(unknown));
    }
}

fn status(socket: Fd) -> String {
    told(call::fcntl(socket, F_GETFL, 0).map(|flags| format!("{flags:#o}")))
}

fn requests(side: &Side, name: &str, socket: Fd) {
    for (request, what) in [
        (FIONREAD, "FIONREAD"),
        (TIOCOUTQ, "SIOCOUTQ"),
        (SIOCATMARK, "SIOCATMARK"),
    ] {
        side.report(
            &format!("{name}: {what}"),
            told(call::ioctl(socket, request, -1)),
        );
    }
    side.report(
        &format!("{name}: unknown request"),
        told(call::ioctl(socket, 0x7fff_0001, -1)),
    );
}
