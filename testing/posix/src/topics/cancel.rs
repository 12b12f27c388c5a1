//! Threads that are cancelled while they wait for sockets.

use std::{thread, time::Duration};

use crate::{
    call::{self, Fd, thread as threads},
    show::{read_text, told, worked},
    side::Side,
};

const MOMENT: Duration = Duration::from_millis(80);

pub(super) fn run(side: &mut Side) {
    for (name, body) in threads::WAITS {
        let socket = side.connection();
        let waited_on = match name {
            "accept" => side.own_listener(),
            _ => socket,
        };
        if !side.is_server() {
            let thread = threads::start(body, waited_on);
            thread::sleep(MOMENT);
            threads::cancel(thread);
            side.report(name, threads::end_of(thread));
        }
        side.step();
        goes_on(side, socket, name);
    }
    unwilling(side);
    by_number(side);
}

/// Cancellation leaves nothing locked, and the socket unchanged.
fn goes_on(side: &mut Side, socket: Fd, name: &str) {
    if side.is_server() {
        call::send(socket, b"afterwards", 0).expect("send");
        side.step();
    } else {
        side.step();
        call::wait_for(socket, libc::POLLIN);
        let mut buffer = [0; 16];
        let answer = call::receive(socket, &mut buffer, libc::MSG_DONTWAIT);
        side.report(&format!("{name}: afterwards"), read_text(answer, &buffer));
        side.report(&format!("{name}: close"), worked(call::close(socket)));
    }
    side.step();
}

/// A thread that disables cancellation continues its call.
fn unwilling(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::send(socket, b"7", 0).expect("send");
    } else {
        let thread = threads::start(threads::unwilling, socket);
        thread::sleep(MOMENT);
        threads::cancel(thread);
        side.report("disabled", threads::end_of(thread));
        side.step();
        side.report("enabled again", threads::end_of(thread));
        side.report("what came", threads::last_received());
        side.report("close", told(call::close(socket)));
    }
    side.step();
}

/// libc's `syscall` is no cancellation point.
fn by_number(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::send(socket, b"four", 0).expect("send");
    } else {
        let thread = threads::start(threads::by_number, socket);
        thread::sleep(MOMENT);
        threads::cancel(thread);
        side.report("by number", threads::end_of(thread));
        side.step();
        side.report("by number: bytes", threads::end_of(thread));
    }
    side.step();
}
