//! Urgent data: MSG_OOB both ways, the mark, SO_OOBINLINE, events of poll, epoll and select, SIGURG.

use libc::{MSG_DONTWAIT, MSG_OOB, MSG_PEEK, SO_OOBINLINE, SOL_SOCKET};

use crate::{
    call::{self, Fd},
    show::{events, message_flags, read_text, told},
    side::Side,
};

const SIOCATMARK: libc::c_ulong = 0x8905;

pub(super) fn run(side: &mut Side) {
    aside(side);
    taken_first(side);
    never_taken(side);
    inline(side);
    twice(side);
    nothing(side);
    signal(side);
}

/// Returns this end of a connection on which the server has sent `pieces` with these flags; None for the server.
fn after(side: &mut Side, pieces: &[(&[u8], i32)]) -> Option<Fd> {
    let socket = side.connection();
    side.step();
    if side.is_server() {
        for (bytes, flags) in pieces {
            let sent = call::send(socket, bytes, *flags).expect("send");
            assert_eq!(sent, bytes.len());
        }
        side.step();
        side.step();
        return None;
    }
    side.step();
    let all: usize = pieces.iter().map(|(bytes, _)| bytes.len()).sum();
    if all > 0 {
        call::wait_for(socket, libc::POLLIN | libc::POLLPRI);
        // The rest may arrive a little later.
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    Some(socket)
}

fn read(side: &Side, socket: Fd, name: &str, flags: i32) {
    let mut buffer = [0; 64];
    let got = call::receive(socket, &mut buffer, flags | MSG_DONTWAIT);
    side.report(name, read_text(got, &buffer));
}

fn look(side: &Side, socket: Fd, name: &str) {
    let ready = told(call::events_now(socket).map(events));
    let mark = told(call::ioctl_int(socket, SIOCATMARK));
    let queued = told(call::ioctl_int(socket, libc::FIONREAD));
    side.report(name, format!("{ready}; at mark {mark}; {queued} bytes"));
}

/// Sends "before", then "urgent" whose last byte is urgent, then "after".
fn aside(side: &mut Side) {
    let pieces: [(&[u8], i32); 3] = [(b"before", 0), (b"urgent", MSG_OOB), (b"after", 0)];
    if let Some(socket) = after(side, &pieces) {
        look(side, socket, "aside: events");
        read(side, socket, "aside: peek", MSG_PEEK);
        read(side, socket, "aside: read", 0);
        look(side, socket, "aside: events at the mark");
        read(side, socket, "aside: peek out of band", MSG_OOB | MSG_PEEK);
        read(side, socket, "aside: out of band", MSG_OOB);
        read(side, socket, "aside: out of band again", MSG_OOB);
        look(side, socket, "aside: events then");
        read(side, socket, "aside: peek behind", MSG_PEEK);
        read(side, socket, "aside: read behind", 0);
        look(side, socket, "aside: events behind");
        read(side, socket, "aside: nothing left", 0);
        side.step();
    }
}

fn taken_first(side: &mut Side) {
    let pieces: [(&[u8], i32); 2] = [(b"text", 0), (b"!", MSG_OOB)];
    if let Some(socket) = after(side, &pieces) {
        let mut buffer = [0; 8];
        let message = call::receive_message(socket, &mut [&mut buffer], MSG_OOB);
        let shown =
            message.map(|m| format!("{} {} {}", m.length, buffer[0], message_flags(m.flags)));
        side.report("taken first: message", told(shown));
        look(side, socket, "taken first: events");
        let mut whole = [0; 16];
        let got = call::receive(socket, &mut whole, libc::MSG_WAITALL | MSG_DONTWAIT);
        side.report("taken first: read", read_text(got, &whole));
        look(side, socket, "taken first: events at the mark");
        read(side, socket, "taken first: nothing left", 0);
        look(side, socket, "taken first: events behind");
        side.step();
    }
}

fn never_taken(side: &mut Side) {
    let pieces: [(&[u8], i32); 3] = [(b"text", 0), (b"!", MSG_OOB), (b"more", 0)];
    if let Some(socket) = after(side, &pieces) {
        read(side, socket, "never taken: read", 0);
        read(side, socket, "never taken: read behind", 0);
        read(side, socket, "never taken: out of band", MSG_OOB);
        look(side, socket, "never taken: events");
        side.step();
    }
}

fn inline(side: &mut Side) {
    let pieces: [(&[u8], i32); 3] = [(b"text", 0), (b"!", MSG_OOB), (b"more", 0)];
    if let Some(socket) = after(side, &pieces) {
        call::set_option(socket, SOL_SOCKET, SO_OOBINLINE, &1).expect("SO_OOBINLINE");
        look(side, socket, "inline: events");
        read(side, socket, "inline: out of band", MSG_OOB);
        read(side, socket, "inline: read", 0);
        look(side, socket, "inline: events at the mark");
        read(side, socket, "inline: read behind", 0);
        look(side, socket, "inline: events behind");
        side.step();
    }
}

/// A second mark replaces the first.
fn twice(side: &mut Side) {
    let pieces: [(&[u8], i32); 4] = [(b"a", 0), (b"1", MSG_OOB), (b"b", 0), (b"2", MSG_OOB)];
    if let Some(socket) = after(side, &pieces) {
        read(side, socket, "twice: out of band", MSG_OOB);
        read(side, socket, "twice: read", 0);
        look(side, socket, "twice: events");
        side.step();
    }
}

fn nothing(side: &mut Side) {
    if let Some(socket) = after(side, &[(b"text", 0)]) {
        read(side, socket, "nothing: out of band", MSG_OOB);
        look(side, socket, "nothing: events");
        side.report(
            "nothing: an empty urgent send",
            told(call::send(socket, b"", MSG_OOB)),
        );
        side.step();
    }
}

/// SIGURG is sent to the owner of the descriptor, and wakes a poll for exceptions.
fn signal(side: &mut Side) {
    let socket = side.connection();
    let seen = call::count_signals(libc::SIGURG, libc::SA_RESTART);
    if !side.is_server() {
        let owned = call::fcntl(socket, libc::F_SETOWN, call::this_process());
        side.report("signal: F_SETOWN", told(owned));
    }
    side.step();
    if side.is_server() {
        call::send(socket, b"x", MSG_OOB).expect("send");
        side.step();
        return;
    }
    call::wait_for(socket, libc::POLLPRI);
    side.report("signal: events", told(call::events_now(socket).map(events)));
    let started = std::time::Instant::now();
    while seen.so_far() == 0 && started.elapsed() < std::time::Duration::from_secs(5) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    side.report("signal: SIGURG", seen.so_far());
    side.step();
}
