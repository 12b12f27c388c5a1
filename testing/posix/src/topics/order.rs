//! The order in which epoll reports several sockets: that in which they became ready.

use std::{thread, time::Duration};

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP, F_SETFL,
    IPPROTO_TCP, MSG_DONTWAIT, O_NONBLOCK, POLLIN, SHUT_WR, SO_RCVBUF, SO_SNDBUF, SOL_SOCKET,
    TCP_NODELAY,
};

use super::epoll::{ask, drain};
use crate::{
    call::{self, Fd},
    side::Side,
};

const COUNT: usize = 5;

/// Time between two events, and after the last one.
const STEP: Duration = Duration::from_millis(5);
const MOMENT: Duration = Duration::from_millis(100);

pub(super) fn run(side: &mut Side) {
    let sockets: Vec<Fd> = (0..COUNT).map(|_| side.connection()).collect();
    for socket in &sockets {
        call::set_option(*socket, IPPROTO_TCP, TCP_NODELAY, &1).expect("TCP_NODELAY");
    }
    if side.is_server() {
        feed(side, &sockets);
        return;
    }
    for (name, flags) in [("level", 0), ("edge", EPOLLET)] {
        let set = set_of(&sockets, EPOLLIN | EPOLLRDHUP | flags);
        for (state, prepare) in STATES {
            prepare(&sockets, set);
            happens(side, &sockets, (set, &format!("{name}, {state}")));
        }
        call::close(set).expect("close");
    }
    added_while_ready(side, &sockets);
    changed(side, &sockets);
    few_at_a_time(side, &sockets);
    woken(side, &sockets);
    polled(side, &sockets);
    // Over a wire it follows from when windows open, too.
    if side.is_within_one_host() {
        room(side, &sockets);
    }
    ended(side, &sockets);
    side.tell("end");
}

/// Prepares the sockets before an event: an implementation may treat sockets that it has used recently differently from
/// those that it has slept on.
type Prepare = fn(&[Fd], Fd);

const STATES: [(&str, Prepare); 4] = [
    ("never waited for", |_, _| {}),
    ("just used", |_, set| drop(call::epoll_wait(set, COUNT, 0))),
    ("slept on", |_, set| {
        drop(call::epoll_wait(set, COUNT, 20).expect("epoll_wait"));
    }),
    ("two used since", |sockets, set| {
        drop(call::epoll_wait(set, COUNT, 20).expect("epoll_wait"));
        for socket in [sockets[3], sockets[1]] {
            call::send(socket, b"x", 0).expect("send");
        }
    }),
];

/// Carries out the client's requests on one connection after the other: `send 4 1 3`, `take 1 2`, `shut 3 1`.
fn feed(side: &mut Side, sockets: &[Fd]) {
    for socket in sockets {
        // A fixed size, which the kernel does not change.
        call::set_option(*socket, SOL_SOCKET, SO_RCVBUF, &65_536).expect("SO_RCVBUF");
    }
    loop {
        let line = side.hear();
        let mut words = line.split(' ');
        let act: fn(Fd) = match words.next() {
            Some("send") => |socket| assert_eq!(call::send(socket, b"x", 0), Ok(1)),
            Some("take") => take_all,
            Some("shut") => |socket| assert_eq!(call::shutdown(socket, SHUT_WR), Ok(0)),
            _ => return,
        };
        for word in words {
            let number: usize = word.parse().expect("a number");
            act(sockets[number - 1]);
            thread::sleep(STEP);
        }
        side.tell("done");
    }
}

/// Reads until no more data arrives.
fn take_all(socket: Fd) {
    let mut buffer = vec![0; 1 << 16];
    while call::events_within(socket, 20).expect("poll") & POLLIN != 0 {
        while call::receive(socket, &mut buffer, MSG_DONTWAIT).is_ok_and(|length| length > 0) {}
    }
}

fn set_of(sockets: &[Fd], wanted: i32) -> Fd {
    let set = call::epoll_create(0).expect("an epoll");
    for (socket, number) in sockets.iter().zip(1..) {
        call::epoll_control(set, EPOLL_CTL_ADD, *socket, wanted, number).expect("EPOLL_CTL_ADD");
    }
    set
}

/// Returns the numbers in the order in which they are reported.
fn order(set: Fd, most: usize) -> String {
    match call::epoll_wait_in_order(set, most, 200) {
        Ok(found) => {
            let numbers = found.iter().map(|(number, _)| number.to_string());
            numbers.collect::<Vec<_>>().join(" ")
        }
        Err(errno) => errno.to_string(),
    }
}

fn report(side: &mut Side, check: &str, set: Fd) {
    let told = order(set, COUNT);
    side.report(check, told);
}

/// Requests an event and lets it happen while no thread waits.
fn while_away(side: &mut Side, what: &str) {
    ask(side, what);
    thread::sleep(MOMENT);
}

fn happens(side: &mut Side, sockets: &[Fd], (set, name): (Fd, &str)) {
    while_away(side, "send 4 1 3 5 2");
    report(side, name, set);
    // Two get more data, and so does one whose data is unread.
    sockets[..4].iter().copied().for_each(drain);
    while_away(side, "send 2 1 2 5");
    report(side, &format!("{name}: again"), set);
    sockets.iter().copied().for_each(drain);
    ask(side, "take 2 4");
}

fn added_while_ready(side: &mut Side, sockets: &[Fd]) {
    while_away(side, "send 3 2 1");
    let set = set_of(&sockets[..3], EPOLLIN);
    report(side, "added while ready", set);
    sockets.iter().copied().for_each(drain);
    call::close(set).expect("close");
    let set = set_of(&sockets[1..], EPOLLIN);
    while_away(side, "send 3 1");
    call::epoll_control(set, EPOLL_CTL_ADD, sockets[0], EPOLLIN, 9).expect("EPOLL_CTL_ADD");
    while_away(side, "send 2");
    report(side, "added while another is ready", set);
    sockets.iter().copied().for_each(drain);
    call::close(set).expect("close");
}

fn changed(side: &mut Side, sockets: &[Fd]) {
    let set = set_of(sockets, EPOLLIN | EPOLLONESHOT);
    let change = |numbers: &[usize]| {
        for number in numbers {
            let (socket, wanted) = (sockets[number - 1], EPOLLIN | EPOLLONESHOT);
            call::epoll_control(set, EPOLL_CTL_MOD, socket, wanted, *number as u64)
                .expect("EPOLL_CTL_MOD");
        }
    };
    while_away(side, "send 5 4 3");
    report(side, "one shot", set);
    change(&[3, 5, 4, 1, 2]);
    report(side, "one shot: armed again", set);
    sockets.iter().copied().for_each(drain);
    change(&[1, 2, 3, 4, 5]);
    while_away(side, "send 2 5 1");
    report(side, "one shot: armed without bytes", set);
    sockets.iter().copied().for_each(drain);
    call::close(set).expect("close");
}

/// Sockets that are still ready move to the end.
fn few_at_a_time(side: &mut Side, sockets: &[Fd]) {
    let set = set_of(sockets, EPOLLIN);
    while_away(side, "send 5 2 4 1 3");
    let told: Vec<String> = (0..4).map(|_| order(set, 2)).collect();
    side.report("two at a time", told.join(", "));
    drain(sockets[1]);
    while_away(side, "send 2");
    let told: Vec<String> = (0..3).map(|_| order(set, 2)).collect();
    side.report("two at a time: one drained", told.join(", "));
    sockets.iter().copied().for_each(drain);
    call::close(set).expect("close");
}

/// Each event wakes a sleeping thread.
fn woken(side: &mut Side, sockets: &[Fd]) {
    let set = set_of(sockets, EPOLLIN | EPOLLET);
    side.tell("send 3 5 1 4 2");
    let mut told = Vec::new();
    while told.len() < COUNT {
        match call::epoll_wait_in_order(set, COUNT, 1000) {
            Ok(found) if !found.is_empty() => told.extend(found.iter().map(|(number, _)| *number)),
            other => {
                side.report("woken", format!("{other:?}"));
                break;
            }
        }
    }
    side.hear();
    side.report("woken", format!("{told:?}"));
    sockets.iter().copied().for_each(drain);
    call::close(set).expect("close");
}

/// poll reports its entries in the caller's order.
fn polled(side: &mut Side, sockets: &[Fd]) {
    while_away(side, "send 4 2");
    let entries: Vec<_> = sockets.iter().map(|socket| (*socket, POLLIN)).collect();
    let found = call::poll(&entries, 200);
    side.report("poll", format!("{found:?}"));
    sockets.iter().copied().for_each(drain);
}

/// Sockets become writable after a send found no room.
fn room(side: &mut Side, sockets: &[Fd]) {
    let sockets = &sockets[..3];
    for socket in sockets {
        call::fcntl(*socket, F_SETFL, O_NONBLOCK).expect("F_SETFL");
        call::set_option(*socket, SOL_SOCKET, SO_SNDBUF, &16_384).expect("SO_SNDBUF");
    }
    let set = set_of(sockets, EPOLLOUT | EPOLLET);
    for (state, prepare) in STATES[..3].iter().rev() {
        fill(sockets, set);
        prepare(sockets, set);
        while_away(side, "take 3 1 2");
        report(side, &format!("room, {state}"), set);
    }
    call::close(set).expect("close");
}

/// Writes until there is no room and `set` reports nothing. A peer on the kernel's stack may continue to accept data
/// that it was sent, which makes room.
fn fill(sockets: &[Fd], set: Fd) {
    let bytes = vec![0; 1 << 16];
    loop {
        for socket in sockets {
            while call::send(*socket, &bytes, 0).is_ok() {}
        }
        let told = call::epoll_wait(set, COUNT, 50).expect("epoll_wait");
        if told.is_empty() {
            break;
        }
    }
}

fn ended(side: &mut Side, sockets: &[Fd]) {
    let set = set_of(sockets, EPOLLIN | EPOLLRDHUP | EPOLLET);
    while_away(side, "shut 4 2 5 1 3");
    report(side, "ended", set);
    call::close(set).expect("close");
}
