//! Signals about sockets: F_SETOWN, F_SETSIG, O_ASYNC.

use std::{thread, time::Duration};

use libc::{F_GETFL, F_GETOWN, F_SETFL, F_SETOWN, FIOASYNC, O_ASYNC, O_NONBLOCK, SIGIO, SIGUSR1};

use crate::{
    call::{self, Fd, STREAM, count_signals, this_process},
    show::{told, worked},
    side::Side,
};

const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const MOMENT: Duration = Duration::from_millis(100);

pub(super) fn run(side: &mut Side) {
    told_of_bytes(side);
    told_of_a_connection(side);
    carried(side);
}

/// Returns whether any signal arrived within MOMENT.
fn came(signals: &call::Counted) -> bool {
    thread::sleep(MOMENT);
    signals.so_far() > 0
}

fn told_of_bytes(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        for _ in 0..4 {
            side.step();
            call::send(socket, b"x", 0).expect("send");
            side.step();
        }
        side.step();
        call::close(socket).expect("close");
        side.step();
        return;
    }
    let signals = count_signals(SIGIO, 0);
    side.step();
    side.step();
    side.report("without O_ASYNC", came(&signals));
    call::fcntl(socket, F_SETOWN, this_process()).expect("F_SETOWN");
    let owner = call::fcntl(socket, F_GETOWN, 0).map(|owner| owner == this_process());
    side.report("owner", told(owner));
    call::fcntl(socket, F_SETFL, O_ASYNC | O_NONBLOCK).expect("F_SETFL");
    let flags = call::fcntl(socket, F_GETFL, 0).map(|flags| flags & O_ASYNC != 0);
    side.report("O_ASYNC", told(flags));
    side.step();
    side.step();
    side.report("with O_ASYNC", came(&signals));
    let signals = count_signals(SIGUSR1, 0);
    side.report("F_SETSIG", told(call::fcntl(socket, F_SETSIG, SIGUSR1)));
    let number = call::fcntl(socket, F_GETSIG, 0).map(|signal| signal == SIGUSR1);
    side.report("F_GETSIG", told(number));
    side.step();
    side.step();
    side.report("with F_SETSIG", came(&signals));
    let signals = count_signals(SIGUSR1, 0);
    side.report("FIOASYNC off", worked(call::ioctl(socket, FIOASYNC, 0)));
    side.step();
    side.step();
    side.report("after FIOASYNC", came(&signals));
    call::ioctl(socket, FIOASYNC, 1).expect("FIOASYNC");
    side.step();
    side.step();
    side.report("the peer has closed", came(&signals));
}

/// A listener's owner is notified of a connection.
fn told_of_a_connection(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let signals = count_signals(SIGIO, 0);
        let listener = side.socket(STREAM);
        tell_this_process(listener);
        call::bind(listener, side.here(port)).expect("bind");
        call::listen(listener, 4).expect("listen");
        let status = call::fcntl(listener, F_GETFL, 0).map(|flags| flags & O_ASYNC != 0);
        side.report("listener: O_ASYNC", told(status));
        side.step();
        side.step();
        side.report("listener", came(&signals));
    } else {
        side.step();
        let socket = side.socket(STREAM);
        call::connect(socket, side.there(port)).expect("connect");
        side.step();
    }
}

fn tell_this_process(fd: Fd) {
    call::fcntl(fd, F_SETOWN, this_process()).expect("F_SETOWN");
    call::fcntl(fd, F_SETFL, O_ASYNC).expect("F_SETFL");
}

/// Settings made before a connect apply afterwards.
fn carried(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        let (accepted, _) = call::accept(listener, 0).expect("accept");
        side.step();
        call::send(accepted, b"x", 0).expect("send");
        side.step();
        return;
    }
    side.step();
    let socket = side.socket(STREAM);
    tell_this_process(socket);
    count_signals(SIGIO, libc::SA_RESTART);
    call::connect(socket, side.there(port)).expect("connect");
    thread::sleep(MOMENT);
    let signals = count_signals(SIGIO, 0);
    side.step();
    side.step();
    side.report("set before connect", came(&signals));
}
