//! epoll: level-triggered, edge-triggered and one-shot, together with pipes, event and timer descriptors.

use std::{thread, time::Duration};

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT,
    EPOLLRDHUP, MSG_DONTWAIT,
};

use crate::{
    call::{self, Answer, Fd, STREAM},
    show::{events, timed, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        feed(side, socket);
        return;
    }
    let set = call::epoll_create(0).expect("an epoll");
    control(side, set, socket);
    level(side, set, socket);
    edge(side, set, socket);
    one_shot(side, set, socket);
    mixed(side, set, socket);
    nested(side, set, socket);
    woken(side, set, socket);
    hung_up(side, set, socket);
    closed(side, set);
}

/// Sends what the client requests, until it is "end".
fn feed(side: &mut Side, socket: Fd) {
    loop {
        match side.hear().as_str() {
            "end" => break,
            "later" => {
                thread::sleep(Duration::from_millis(100));
                call::send(socket, b"later", 0).expect("send");
            }
            text => drop(call::send(socket, text.as_bytes(), 0).expect("send")),
        }
        side.tell("sent");
    }
    call::close(socket).expect("close");
}

pub(super) fn ask(side: &mut Side, text: &str) {
    side.tell(text);
    side.hear();
}

pub(super) fn drain(socket: Fd) {
    while call::receive(socket, &mut [0; 64], MSG_DONTWAIT).is_ok_and(|length| length > 0) {}
}

fn show(answer: Answer<Vec<(u64, u32)>>) -> String {
    told(answer.map(|found| {
        let found: Vec<_> = found
            .iter()
            .map(|(data, bits)| format!("{data:#x} {}", events(*bits as i16)))
            .collect();
        format!("[{}]", found.join(", "))
    }))
}

/// Returns what is ready within 50 ms.
fn ready(set: Fd) -> String {
    show(call::epoll_wait(set, 8, 50))
}

fn control(side: &Side, set: Fd, socket: Fd) {
    side.report(
        "change before adding",
        told(call::epoll_control(set, EPOLL_CTL_MOD, socket, EPOLLIN, 1)),
    );
    side.report(
        "remove before adding",
        told(call::epoll_control(set, EPOLL_CTL_DEL, socket, 0, 0)),
    );
    side.report(
        "add",
        told(call::epoll_control(set, EPOLL_CTL_ADD, socket, EPOLLIN, 1)),
    );
    side.report(
        "add again",
        told(call::epoll_control(set, EPOLL_CTL_ADD, socket, EPOLLIN, 1)),
    );
    side.report(
        "add itself",
        told(call::epoll_control(set, EPOLL_CTL_ADD, set, EPOLLIN, 1)),
    );
    side.report(
        "add a closed one",
        told(call::epoll_control(set, EPOLL_CTL_ADD, 9999, EPOLLIN, 1)),
    );
    side.report(
        "unknown operation",
        told(call::epoll_control(set, 9, socket, EPOLLIN, 1)),
    );
    side.report(
        "not a set",
        told(call::epoll_control(socket, EPOLL_CTL_ADD, set, EPOLLIN, 1)),
    );
    let file = call::file(b"");
    side.report(
        "add a file",
        told(call::epoll_control(set, EPOLL_CTL_ADD, file, EPOLLIN, 1)),
    );
    side.report("room for none", show(call::epoll_wait(set, 0, 0)));
    let (answer, time) = timed(Duration::from_millis(100), || call::epoll_wait(set, 4, 100));
    side.report("nothing there", format!("{} {time}", show(answer)));
}

fn change(set: Fd, socket: Fd, wanted: i32, data: u64) {
    call::epoll_control(set, EPOLL_CTL_MOD, socket, wanted, data).expect("EPOLL_CTL_MOD");
}

fn level(side: &mut Side, set: Fd, socket: Fd) {
    change(set, socket, EPOLLIN | EPOLLOUT, 0x1234_5678_9abc_def0);
    side.report("level: writable", ready(set));
    ask(side, "level");
    call::wait_for(socket, libc::POLLIN);
    side.report("level: readable", ready(set));
    side.report("level: still", ready(set));
    change(set, socket, EPOLLIN, 2);
    side.report("level: only in", ready(set));
    drain(socket);
    side.report("level: drained", ready(set));
}

fn edge(side: &mut Side, set: Fd, socket: Fd) {
    change(set, socket, EPOLLIN | EPOLLOUT | EPOLLET, 3);
    side.report("edge: writable", ready(set));
    side.report("edge: nothing new", ready(set));
    ask(side, "edge one");
    side.report("edge: readable", ready(set));
    side.report("edge: nothing new", ready(set));
    ask(side, "edge two");
    side.report("edge: more came", ready(set));
    call::receive(socket, &mut [0; 3], 0).expect("receive");
    side.report("edge: partly read", ready(set));
    change(set, socket, EPOLLIN | EPOLLET, 4);
    side.report("edge: changed", ready(set));
    drain(socket);
    ask(side, "edge three");
    side.report("edge: came after drained", ready(set));
    drain(socket);
}

fn one_shot(side: &mut Side, set: Fd, socket: Fd) {
    change(set, socket, EPOLLIN | EPOLLONESHOT, 5);
    ask(side, "shot");
    side.report("one shot: readable", ready(set));
    side.report("one shot: spent", ready(set));
    ask(side, "shot");
    side.report("one shot: spent though more came", ready(set));
    change(set, socket, EPOLLIN | EPOLLONESHOT, 6);
    side.report("one shot: armed again", ready(set));
    drain(socket);
}

fn mixed(side: &mut Side, set: Fd, socket: Fd) {
    change(set, socket, EPOLLIN, 7);
    let (reader, writer) = call::pipe();
    let event = call::eventfd(0, 0).expect("an eventfd");
    let timer = call::timer(Duration::from_millis(20));
    for (fd, data) in [(reader, 8), (event, 9), (timer, 10)] {
        call::epoll_control(set, EPOLL_CTL_ADD, fd, EPOLLIN, data).expect("EPOLL_CTL_ADD");
    }
    thread::sleep(Duration::from_millis(30));
    side.report("mixed: timer", ready(set));
    call::write(writer, b"x").expect("write");
    call::write(event, &1_u64.to_ne_bytes()).expect("write");
    ask(side, "mixed");
    call::wait_for(socket, libc::POLLIN);
    side.report("mixed: all", ready(set));
    let mut seen: Vec<u64> = (0..4)
        .flat_map(|_| call::epoll_wait(set, 1, 50).unwrap_or_default())
        .map(|(data, _)| data)
        .collect();
    seen.sort_unstable();
    side.report("mixed: one at a time", format!("{seen:?}"));
    for fd in [reader, event, timer] {
        call::epoll_control(set, EPOLL_CTL_DEL, fd, 0, 0).expect("EPOLL_CTL_DEL");
    }
    side.report("mixed: removed", ready(set));
    drain(socket);
}

fn nested(side: &mut Side, set: Fd, socket: Fd) {
    let outer = call::epoll_create(0).expect("an epoll");
    side.report(
        "nested: add",
        told(call::epoll_control(outer, EPOLL_CTL_ADD, set, EPOLLIN, 11)),
    );
    side.report("nested: nothing", ready(outer));
    side.report(
        "nested: cycle",
        told(call::epoll_control(set, EPOLL_CTL_ADD, outer, EPOLLIN, 12)),
    );
    ask(side, "nested");
    side.report("nested: readable", ready(outer));
    side.report(
        "polled: readable",
        told(call::poll(&[(set, libc::POLLIN)], 50).map(|(_, found)| events(found[0]))),
    );
    drain(socket);
    side.report("nested: drained", ready(outer));
    call::close(outer).expect("close");
}

fn woken(side: &mut Side, set: Fd, socket: Fd) {
    side.tell("later");
    let (answer, time) = timed(Duration::from_millis(100), || {
        call::epoll_wait(set, 4, 3000)
    });
    side.report("woken", format!("{} {time}", show(answer)));
    side.hear();
    drain(socket);
}

fn hung_up(side: &mut Side, set: Fd, socket: Fd) {
    change(set, socket, EPOLLIN | EPOLLRDHUP, 13);
    side.tell("end");
    let _ = call::epoll_wait(set, 4, 3000);
    side.report("peer closed", ready(set));
    call::shutdown(socket, libc::SHUT_WR).expect("shutdown");
    call::wait_for(socket, 0);
    side.report("both closed", ready(set));
    call::close(socket).expect("close");
    side.report("closed descriptor is gone", ready(set));
}

fn closed(side: &Side, set: Fd) {
    let fresh = side.socket(STREAM);
    side.report(
        "unconnected: add",
        told(call::epoll_control(
            set,
            EPOLL_CTL_ADD,
            fresh,
            EPOLLIN | EPOLLOUT,
            14,
        )),
    );
    side.report("unconnected", ready(set));
    let copy = call::dup(fresh).expect("dup");
    call::close(fresh).expect("close");
    side.report("a copy keeps it in the set", ready(set));
    call::close(copy).expect("close");
    side.report("the last copy is closed", ready(set));
    side.report("close the set", told(call::close(set)));
    side.report("closed set", show(call::epoll_wait(set, 1, 0)));
}
