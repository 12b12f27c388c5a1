//! The sending calls and their flags on a stream.

use std::{thread, time::Duration};

use libc::{MSG_DONTWAIT, MSG_MORE, MSG_NOSIGNAL, SIGPIPE, SO_SNDBUF, SOL_SOCKET, TIOCOUTQ, c_int};

use crate::{
    call::{self, Errno, Fd, count_signals},
    show::{events, read_text, text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    pieces(side);
    file(side);
    full(side);
    broken(side);
}

fn receive_all(socket: Fd, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let got = call::receive(socket, &mut bytes, libc::MSG_WAITALL).expect("receive");
    bytes.truncate(got);
    bytes
}

fn pieces(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("pieces", text(&receive_all(socket, 39)));
    } else {
        side.report("send", told(call::send(socket, b"one ", 0)));
        side.report("write", told(call::write(socket, b"two ")));
        side.report("send nothing", told(call::send(socket, b"", 0)));
        side.report(
            "gathered",
            told(call::write_gathered(socket, &[b"th", b"", b"ree "])),
        );
        side.report(
            "message",
            told(call::send_message(socket, &[b"fo", b"ur "], None, 0)),
        );
        side.report(
            "many messages",
            told(call::send_messages(socket, &[b"five ", b"six "], 0)),
        );
        side.report(
            "more to come",
            told(call::send(socket, b"seven ", MSG_MORE)),
        );
        side.report("no more", told(call::send(socket, b"eight", 0)));
        let there = side.there(1);
        side.report(
            "to another address",
            told(call::send_to(socket, b"", MSG_NOSIGNAL, there)),
        );
        side.report(
            "out of band flag and nothing",
            told(call::send(socket, b"", libc::MSG_OOB)),
        );
    }
    side.step();
}

fn file(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("file", text(&receive_all(socket, 12)));
        let large = receive_all(socket, 300_000);
        let intact = large
            .iter()
            .enumerate()
            .all(|(index, byte)| *byte == index as u8);
        side.report("large file", format!("{} {intact}", large.len()));
    } else {
        let small = call::file(b"0123456789");
        side.report(
            "file at its position",
            show_sent(call::send_file(socket, small, None, 4)),
        );
        side.report("file position", call::seek(small, 0, libc::SEEK_CUR));
        side.report(
            "file at an offset",
            show_sent(call::send_file(socket, small, Some(2), 4)),
        );
        side.report("file position", call::seek(small, 0, libc::SEEK_CUR));
        side.report(
            "file beyond its end",
            show_sent(call::send_file(socket, small, None, 2)),
        );
        side.report(
            "file to its end",
            show_sent(call::send_file(socket, small, Some(8), 100)),
        );
        side.report(
            "file at its end",
            show_sent(call::send_file(socket, small, Some(10), 100)),
        );
        side.report(
            "file at a negative offset",
            show_sent(call::send_file(socket, small, Some(-1), 1)),
        );
        side.report(
            "file that is none",
            show_sent(call::send_file(socket, 999, None, 1)),
        );
        let large = call::file(
            &(0..300_000_u32)
                .map(|index| index as u8)
                .collect::<Vec<_>>(),
        );
        side.report(
            "large file",
            show_sent(call::send_file(socket, large, Some(0), 300_000)),
        );
    }
    side.step();
}

fn show_sent(answer: call::Answer<(usize, i64)>) -> String {
    told(answer.map(|(sent, at)| format!("{sent} {at}")))
}

/// A non-blocking sender with a receiver that does not read, and later does.
fn full(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        let expected: usize = side.hear().parse().expect("a count");
        let bytes = receive_all(socket, expected);
        let intact = bytes
            .iter()
            .enumerate()
            .all(|(index, byte)| *byte == index as u8);
        side.report(
            "full: all arrived",
            format!("{} {intact}", bytes.len() == expected),
        );
        side.step();
    } else {
        // A fixed size, since the kernel's buffer would grow with each answer to a window probe.
        let size: c_int = 65_536;
        call::set_option(socket, SOL_SOCKET, SO_SNDBUF, &size).expect("SO_SNDBUF");
        let sent = fill(socket);
        side.report("full: sent something", sent > 10_000);
        side.report("full: send", told(call::send(socket, b"x", MSG_DONTWAIT)));
        side.report("full: events", told(call::events_now(socket).map(events)));
        side.report(
            "full: queued",
            told(call::ioctl(socket, TIOCOUTQ, -1).map(|queued| queued > 0)),
        );
        side.step();
        side.tell(sent);
        let writable =
            call::poll(&[(socket, libc::POLLOUT)], 5000).map(|(_, found)| events(found[0]));
        side.report("emptied: events", told(writable));
        side.step();
        for _ in 0..500 {
            if call::ioctl(socket, TIOCOUTQ, -1) == Ok(0) {
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
        side.report("emptied: queued", told(call::ioctl(socket, TIOCOUTQ, -1)));
    }
}

/// Sends until nothing has been accepted for longer than a sender waits before it fills the rest of a small
/// window (RFC 9293 §3.8.6.2.1).
fn fill(socket: Fd) -> usize {
    let mut sent = 0;
    let mut refusals = 0;
    while refusals < 80 {
        let piece: Vec<u8> = (sent..sent + 4096).map(|index| index as u8).collect();
        match call::send(socket, &piece, MSG_DONTWAIT) {
            Ok(length) => (sent, refusals) = (sent + length, 0),
            Err(Errno(libc::EAGAIN)) => {
                refusals += 1;
                thread::sleep(Duration::from_millis(10));
            }
            Err(errno) => panic!("send: {errno}"),
        }
    }
    sent
}

/// The peer closes: one send triggers its reset, the next one fails.
fn broken(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::close(socket).expect("close");
        side.step();
        side.step();
        return;
    }
    side.step();
    let signals = count_signals(SIGPIPE, 0);
    call::wait_for(socket, libc::POLLRDHUP);
    side.report(
        "peer closed: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "peer closed: send",
        told(call::send(socket, b"x", MSG_NOSIGNAL)),
    );
    call::wait_for(socket, 0);
    side.report(
        "peer reset: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "peer reset: send",
        told(call::send(socket, b"x", MSG_NOSIGNAL)),
    );
    side.report("peer reset: signals", signals.so_far());
    side.report("peer reset: send again", told(call::send(socket, b"x", 0)));
    side.report("peer reset: signals", signals.so_far());
    side.report("peer reset: write", told(call::write(socket, b"x")));
    side.report("peer reset: signals", signals.so_far());
    let mut buffer = [0; 4];
    side.report(
        "peer reset: receive",
        read_text(call::receive(socket, &mut buffer, 0), &buffer),
    );
    side.report("peer reset: peer", worked(call::peer_address(socket)));
    side.step();
}
