//! Signals during blocked calls, with and without SA_RESTART.

use std::{thread, time::Duration};

use libc::{POLLIN, SA_RESTART, SIGUSR1, SOL_SOCKET, timeval};

use crate::{
    call::{self, Counted, Fd, STREAM, count_signals, kick, this_thread},
    show::{events, read_text, told, worked},
    side::Side,
};

const SOON: Duration = Duration::from_millis(60);
const LATER: Duration = Duration::from_millis(250);
const MOMENT: Duration = Duration::from_millis(5);
/// Much later than the signal, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(side: &mut Side) {
    for (flags, name) in [(0, "no restart"), (SA_RESTART, "restart")] {
        receiving(side, flags, name);
        waiting(side, flags, name);
        accepting(side, flags, name);
        timed_receive(side, flags, name);
        sending(side, flags, name);
        connecting(side, flags, name);
    }
}

/// Interrupts `act` on this thread after SOON.
fn interrupted<T>(side: &Side, flags: i32, check: &str, act: impl FnOnce() -> T) -> T {
    interrupted_and_then(side, flags, check, |_| {}, act)
}

/// Interrupts `act` on this thread after SOON, and tells the other role when the handler has run.
fn interrupted_and_told<T>(side: &Side, flags: i32, check: &str, act: impl FnOnce() -> T) -> T {
    let mut teller = side.teller();
    let tell = move |signals: Counted| {
        while signals.so_far() == 0 {
            thread::sleep(MOMENT);
        }
        teller.tell("interrupted");
    };
    interrupted_and_then(side, flags, check, tell, act)
}

fn interrupted_and_then<T>(
    side: &Side,
    flags: i32,
    check: &str,
    then: impl FnOnce(Counted) + Send + 'static,
    act: impl FnOnce() -> T,
) -> T {
    let signals = count_signals(SIGUSR1, flags);
    let kicker = kick(this_thread(), SIGUSR1, SOON);
    let after = thread::spawn(move || {
        kicker.join().expect("the kicker");
        then(signals);
    });
    let result = act();
    after.join().expect("the kicker");
    side.report(&format!("{check}: signals"), signals.so_far());
    result
}

fn receive(socket: Fd, flags: i32) -> String {
    let mut buffer = [0; 16];
    let answer = call::receive(socket, &mut buffer, flags);
    read_text(answer, &buffer)
}

fn receiving(side: &mut Side, flags: i32, name: &str) {
    let socket = side.connection();
    if side.is_server() {
        side.hear();
        call::send(socket, b"late", 0).expect("send");
        side.step();
        call::send(socket, b"half", 0).expect("send");
        side.hear();
        call::send(socket, b"rest", 0).expect("send");
        side.step();
        return;
    }
    let check = format!("{name}: receive");
    let got = interrupted_and_told(side, flags, &check, || receive(socket, 0));
    side.report(&check, got);
    wait_quietly(socket);
    side.step();
    call::wait_for(socket, POLLIN);
    let check = format!("{name}: receive all");
    let got = interrupted_and_told(side, flags, &check, || receive(socket, libc::MSG_WAITALL));
    side.report(&check, got);
    side.step();
}

/// Waits until the data in flight has arrived, and discards it.
fn wait_quietly(socket: Fd) {
    thread::sleep(LATER);
    while call::receive(socket, &mut [0; 16], libc::MSG_DONTWAIT).is_ok_and(|length| length > 0) {}
}

fn waiting(side: &mut Side, flags: i32, name: &str) {
    let socket = side.connection();
    if !side.is_server() {
        let set = call::epoll_create(0).expect("an epoll");
        call::epoll_control(set, libc::EPOLL_CTL_ADD, socket, libc::EPOLLIN, 0)
            .expect("EPOLL_CTL_ADD");
        let limit = LIMIT.as_millis() as i32;
        let check = format!("{name}: poll");
        let got = interrupted(side, flags, &check, || {
            call::poll(&[(socket, POLLIN)], limit)
        });
        side.report(&check, told(got.map(|(ready, _)| ready)));
        let check = format!("{name}: epoll");
        let got = interrupted(side, flags, &check, || call::epoll_wait(set, 1, limit));
        side.report(&check, told(got.map(|found| found.len())));
        let check = format!("{name}: select");
        let got = interrupted(side, flags, &check, || {
            call::select([&[socket], &[], &[]], LIMIT)
        });
        side.report(&check, told(got.map(|(ready, _)| ready)));
    }
    side.step();
}

fn accepting(side: &mut Side, flags: i32, name: &str) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        let check = format!("{name}: accept");
        let got = interrupted_and_told(side, flags, &check, || {
            worked(call::accept_quietly(listener))
        });
        side.report(&check, got);
        side.step();
    } else {
        side.hear();
        let socket = side.socket(STREAM);
        let _ = call::connect(socket, side.there(port));
        side.step();
    }
}

/// With a time-out on the socket, no call is restarted.
fn timed_receive(side: &mut Side, flags: i32, name: &str) {
    let socket = side.connection();
    if !side.is_server() {
        let time = timeval {
            tv_sec: LIMIT.as_secs() as libc::time_t,
            tv_usec: 0,
        };
        call::set_option(socket, SOL_SOCKET, libc::SO_RCVTIMEO, &time).expect("SO_RCVTIMEO");
        let check = format!("{name}: receive with a time-out");
        let got = interrupted(side, flags, &check, || receive(socket, 0));
        side.report(&check, got);
        side.report(
            &format!("{name}: events"),
            told(call::events_now(socket).map(events)),
        );
    }
    side.step();
}

/// Interrupts a send into a full buffer.
fn sending(side: &mut Side, flags: i32, name: &str) {
    let socket = side.connection();
    if side.is_server() {
        side.hear();
        call::shutdown(socket, libc::SHUT_WR).expect("shutdown");
        let mut room = vec![0; 1 << 16];
        while call::receive(socket, &mut room, 0).is_ok_and(|length| length > 0) {}
        return;
    }
    let bytes = vec![0; 1 << 16];
    loop {
        match call::send(socket, &bytes, libc::MSG_DONTWAIT) {
            Ok(_) => {}
            // Data in flight may still make room.
            Err(_) if call::poll(&[(socket, libc::POLLOUT)], 300).is_ok_and(|(n, _)| n == 0) => {
                break;
            }
            Err(_) => {}
        }
    }
    // So may the rest of a window that is smaller than a segment, which is sent late.
    while call::send(socket, b"x", libc::MSG_DONTWAIT).is_ok() {
        while call::send(socket, b"x", libc::MSG_DONTWAIT).is_ok() {}
        thread::sleep(2 * LATER);
    }
    let check = format!("{name}: send");
    let got = interrupted_and_told(side, flags, &check, || call::send(socket, b"x", 0));
    side.report(&check, told(got));
    call::close(socket).expect("close");
}

/// Interrupts a connect to an address that no host has: neighbour discovery takes seconds.
fn connecting(side: &mut Side, flags: i32, name: &str) {
    if side.is_server() || flags & SA_RESTART != 0 {
        return;
    }
    let nowhere = side.nowhere(9);
    let socket = side.socket(STREAM);
    let check = format!("{name}: connect");
    let got = interrupted(side, flags, &check, || call::connect(socket, nowhere));
    side.report(&check, told(got));
    call::fcntl(socket, libc::F_SETFL, libc::O_NONBLOCK).expect("F_SETFL");
    side.report(
        &format!("{check} again"),
        told(call::connect(socket, nowhere)),
    );
    call::close(socket).expect("close");
}
