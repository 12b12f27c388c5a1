//! Special cases of event loops: nested sets, copies, other threads, masks, many descriptors.

use std::thread;

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT,
    EPOLLOUT, EPOLLPRI, EPOLLRDHUP, F_SETFL, O_NONBLOCK, POLLIN, SIGUSR1,
};

use super::{
    epoll::{ask, drain},
    threads::{MOMENT, blocked, outcome},
};
use crate::{
    call::{self, Answer, Fd, STREAM, count_signals},
    show::{events, read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        feed(side, socket);
        return;
    }
    deep(side, socket);
    nested_edges(side, socket);
    copied_set(side, socket);
    copied_member(side, socket);
    exclusive(side, socket);
    other_threads(side, socket);
    masks(side, socket);
    many(side, socket);
    urgent(side, socket);
    replaced(side, socket);
    connecting(side);
    side.tell("end");
}

/// Sends what the client requests, until it is "end".
fn feed(side: &mut Side, socket: Fd) {
    loop {
        match side.hear().as_str() {
            "end" => break,
            "urgent" => drop(call::send(socket, b"!", libc::MSG_OOB).expect("send")),
            text => drop(call::send(socket, text.as_bytes(), 0).expect("send")),
        }
        side.tell("sent");
    }
}

fn show(answer: Answer<Vec<(u64, u32)>>) -> String {
    told(answer.map(|found| {
        let found: Vec<_> = found
            .iter()
            .map(|(data, bits)| format!("{data} {}", events(*bits as i16)))
            .collect();
        format!("[{}]", found.join(", "))
    }))
}

/// Returns what is ready within 50 ms.
fn ready(set: Fd) -> String {
    show(call::epoll_wait(set, 8, 50))
}

fn set_of(members: &[(Fd, i32, u64)]) -> Fd {
    let set = call::epoll_create(0).expect("an epoll");
    for (fd, wanted, data) in members {
        call::epoll_control(set, EPOLL_CTL_ADD, *fd, *wanted, *data).expect("EPOLL_CTL_ADD");
    }
    set
}

/// Three nested sets, with a pipe in one of them.
fn deep(side: &mut Side, socket: Fd) {
    let (reader, writer) = call::pipe();
    let inner = set_of(&[(socket, EPOLLIN, 1)]);
    let middle = set_of(&[(inner, EPOLLIN, 2), (reader, EPOLLIN, 3)]);
    let outer = set_of(&[(middle, EPOLLIN, 4)]);
    side.report("deep: nothing", ready(outer));
    ask(side, "deep");
    call::wait_for(socket, POLLIN);
    side.report("deep: outer", ready(outer));
    side.report("deep: middle", ready(middle));
    side.report("deep: inner", ready(inner));
    call::write(writer, b"x").expect("write");
    side.report("deep: middle with a pipe", ready(middle));
    let selected = call::select([&[outer], &[], &[]], MOMENT);
    side.report("deep: selected", told(selected.map(|(count, _)| count)));
    drain(socket);
    call::read(reader, &mut [0; 4]).expect("read");
    side.report("deep: drained", ready(outer));
    side.report("deep: polled", told(call::events_now(outer).map(events)));
    call::epoll_control(inner, EPOLL_CTL_DEL, socket, 0, 0).expect("EPOLL_CTL_DEL");
    ask(side, "unseen");
    call::wait_for(socket, POLLIN);
    side.report("deep: removed", ready(outer));
    call::epoll_control(inner, EPOLL_CTL_ADD, socket, EPOLLIN, 5).expect("EPOLL_CTL_ADD");
    side.report("deep: added", ready(outer));
    drain(socket);
    for fd in [reader, writer, inner, middle, outer] {
        call::close(fd).expect("close");
    }
}

fn nested_edges(side: &mut Side, socket: Fd) {
    let inner = set_of(&[(socket, EPOLLIN, 1)]);
    let outer = set_of(&[(inner, EPOLLIN | EPOLLET, 2)]);
    ask(side, "one");
    call::wait_for(socket, POLLIN);
    side.report("edges: one", ready(outer));
    side.report("edges: nothing new", ready(outer));
    ask(side, "two");
    thread::sleep(MOMENT);
    side.report("edges: two", ready(outer));
    drain(socket);
    side.report("edges: drained", ready(outer));
    call::epoll_control(inner, EPOLL_CTL_MOD, socket, EPOLLIN | EPOLLONESHOT, 3)
        .expect("EPOLL_CTL_MOD");
    ask(side, "three");
    call::wait_for(socket, POLLIN);
    side.report("edges: one shot", ready(outer));
    side.report("edges: taken", ready(inner));
    let level = set_of(&[(inner, EPOLLIN, 4)]);
    side.report("edges: spent", ready(level));
    drain(socket);
    call::close(level).expect("close");
    call::close(inner).expect("close");
    side.report("edges: inner closed", ready(outer));
    call::close(outer).expect("close");
}

fn copied_set(side: &mut Side, socket: Fd) {
    let set = set_of(&[(socket, EPOLLIN, 1)]);
    let copy = call::dup(set).expect("dup");
    ask(side, "copied");
    call::wait_for(socket, POLLIN);
    side.report("copied set", ready(copy));
    call::close(set).expect("close");
    side.report("copied set: first closed", ready(copy));
    let (reader, writer) = call::pipe();
    call::epoll_control(copy, EPOLL_CTL_ADD, reader, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    call::write(writer, b"x").expect("write");
    side.report("copied set: and a pipe", ready(copy));
    drain(socket);
    for fd in [reader, writer, copy] {
        call::close(fd).expect("close");
    }
}

fn copied_member(side: &mut Side, socket: Fd) {
    let copy = call::dup(socket).expect("dup");
    let set = set_of(&[(socket, EPOLLIN, 1), (copy, EPOLLIN | EPOLLOUT, 2)]);
    ask(side, "member");
    call::wait_for(socket, POLLIN);
    side.report("copied member", ready(set));
    call::epoll_control(set, EPOLL_CTL_MOD, copy, EPOLLOUT, 3).expect("EPOLL_CTL_MOD");
    side.report("copied member: changed", ready(set));
    call::close(copy).expect("close");
    side.report("copied member: closed", ready(set));
    side.report(
        "copied member: removed after close",
        told(call::epoll_control(set, EPOLL_CTL_DEL, copy, 0, 0)),
    );
    call::epoll_control(set, EPOLL_CTL_DEL, socket, 0, 0).expect("EPOLL_CTL_DEL");
    drain(socket);
    call::close(set).expect("close");
}

fn exclusive(side: &mut Side, socket: Fd) {
    let set = call::epoll_create(0).expect("an epoll");
    let add = |wanted| told(call::epoll_control(set, EPOLL_CTL_ADD, socket, wanted, 1));
    let change = |wanted| told(call::epoll_control(set, EPOLL_CTL_MOD, socket, wanted, 1));
    side.report(
        "exclusive: one shot",
        add(EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT),
    );
    side.report(
        "exclusive: RDHUP",
        add(EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP),
    );
    side.report("exclusive: add", add(EPOLLIN | EPOLLEXCLUSIVE));
    side.report("exclusive: change", change(EPOLLIN));
    ask(side, "exclusive");
    side.report("exclusive: readable", ready(set));
    drain(socket);
    call::epoll_control(set, EPOLL_CTL_DEL, socket, 0, 0).expect("EPOLL_CTL_DEL");
    side.report("exclusive: add plain", add(EPOLLIN));
    side.report(
        "exclusive: make exclusive",
        change(EPOLLIN | EPOLLEXCLUSIVE),
    );
    let inner = set_of(&[(socket, EPOLLIN, 1)]);
    side.report(
        "exclusive: a set",
        told(call::epoll_control(
            set,
            EPOLL_CTL_ADD,
            inner,
            EPOLLIN | EPOLLEXCLUSIVE,
            1,
        )),
    );
    call::close(inner).expect("close");
    call::close(set).expect("close");
}

fn other_threads(side: &mut Side, socket: Fd) {
    let set = call::epoll_create(0).expect("an epoll");
    let wait = move || show(call::epoll_wait(set, 8, 2000));
    let thread = blocked(wait);
    call::epoll_control(set, EPOLL_CTL_ADD, socket, EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    side.report("another adds", outcome(&thread));
    call::epoll_control(set, EPOLL_CTL_MOD, socket, EPOLLIN, 2).expect("EPOLL_CTL_MOD");
    let thread = blocked(wait);
    call::epoll_control(set, EPOLL_CTL_MOD, socket, EPOLLOUT, 3).expect("EPOLL_CTL_MOD");
    side.report("another changes", outcome(&thread));
    call::epoll_control(set, EPOLL_CTL_MOD, socket, EPOLLIN, 4).expect("EPOLL_CTL_MOD");
    let event = call::eventfd(0, 0).expect("an eventfd");
    let thread = blocked(wait);
    call::epoll_control(set, EPOLL_CTL_ADD, event, EPOLLIN, 5).expect("EPOLL_CTL_ADD");
    call::write(event, &1_u64.to_ne_bytes()).expect("write");
    side.report("another adds an event", outcome(&thread));
    call::epoll_control(set, EPOLL_CTL_DEL, event, 0, 0).expect("EPOLL_CTL_DEL");
    let thread = blocked(move || show(call::epoll_wait(set, 8, 250)));
    call::epoll_control(set, EPOLL_CTL_DEL, socket, 0, 0).expect("EPOLL_CTL_DEL");
    ask(side, "removed");
    side.report("another removes", outcome(&thread));
    drain(socket);
    let inner = set_of(&[(socket, EPOLLIN, 6)]);
    call::epoll_control(set, EPOLL_CTL_ADD, inner, EPOLLIN, 7).expect("EPOLL_CTL_ADD");
    let thread = blocked(wait);
    ask(side, "inside");
    side.report("bytes for a set inside", outcome(&thread));
    drain(socket);
    let thread = blocked(move || {
        told(call::poll(&[(set, POLLIN)], 2000).map(|(_, found)| events(found[0])))
    });
    ask(side, "polled");
    side.report("bytes for a set that is polled", outcome(&thread));
    drain(socket);
    for fd in [inner, set, event] {
        call::close(fd).expect("close");
    }
}

/// The mask of the call admits a pending signal, which interrupts the call.
fn masks(side: &mut Side, socket: Fd) {
    let set = set_of(&[(socket, EPOLLIN, 1)]);
    type Wait = fn(Fd, Fd) -> Answer<i32>;
    let waits: [(&str, Wait); 4] = [
        ("ppoll", |socket, _| {
            call::poll_open(&[(socket, POLLIN)], MOMENT).map(|(ready, _)| ready)
        }),
        ("pselect", |socket, _| call::select_open(socket, MOMENT)),
        ("epoll_pwait", |_, set| call::epoll_wait_open(set, MOMENT)),
        ("epoll_pwait2", |_, set| call::epoll_wait2_open(set, MOMENT)),
    ];
    for (name, wait) in waits {
        let signals = count_signals(SIGUSR1, libc::SA_RESTART);
        call::block(SIGUSR1);
        call::raise(SIGUSR1);
        side.report(&format!("{name}: before"), signals.so_far());
        side.report(name, told(wait(socket, set)));
        side.report(&format!("{name}: after"), signals.so_far());
        side.report(&format!("{name}: again"), told(wait(socket, set)));
        call::unblock(SIGUSR1);
    }
    call::close(set).expect("close");
}

fn many(side: &mut Side, socket: Fd) {
    const COUNT: usize = 2000;
    call::allow_descriptors(COUNT as u64 + 2200);
    let copies: Vec<Fd> = (0..COUNT)
        .map(|_| call::dup(socket).expect("dup"))
        .collect();
    let (reader, writer) = call::pipe();
    let entries: Vec<(Fd, i16)> = copies
        .iter()
        .chain([&reader])
        .map(|fd| (*fd, POLLIN))
        .collect();
    let count = |answer: Answer<(i32, Vec<i16>)>| told(answer.map(|(count, _)| count));
    side.report("many polled: nothing", count(call::poll(&entries, 10)));
    ask(side, "many");
    call::write(writer, b"x").expect("write");
    call::wait_for(socket, POLLIN);
    side.report("many polled", count(call::poll(&entries, 1000)));
    let set = call::epoll_create(0).expect("an epoll");
    for (fd, data) in copies.iter().zip(0..) {
        call::epoll_control(set, EPOLL_CTL_ADD, *fd, EPOLLIN, data).expect("EPOLL_CTL_ADD");
    }
    let found = call::epoll_wait(set, COUNT + 10, 1000).map(|found| found.len());
    side.report("many in a set", told(found));
    let high = call::dup2(socket, 3000).expect("dup2");
    side.report(
        "select beyond FD_SETSIZE",
        told(call::select_far(&[high, 2, reader], 10)),
    );
    drain(socket);
    side.report(
        "select beyond it: drained",
        told(call::select_far(&[high], 10)),
    );
    for fd in copies.iter().chain([&reader, &writer, &set, &high]) {
        call::close(*fd).expect("close");
    }
}

fn urgent(side: &mut Side, socket: Fd) {
    let set = set_of(&[(socket, EPOLLPRI, 1)]);
    ask(side, "plain");
    side.report("priority: plain bytes", ready(set));
    ask(side, "urgent");
    side.report("priority: urgent", ready(set));
    let mut buffer = [0; 4];
    let answer = call::receive(socket, &mut buffer, libc::MSG_OOB);
    side.report("priority: taken", read_text(answer, &buffer));
    side.report("priority: afterwards", ready(set));
    side.report("at the mark", told(call::is_at_mark(socket)));
    drain(socket);
    side.report("at the mark: drained", told(call::is_at_mark(socket)));
    call::close(set).expect("close");
}

/// A descriptor number is replaced while a thread waits for the old socket.
fn replaced(side: &mut Side, socket: Fd) {
    let number = call::dup(socket).expect("dup");
    let thread = blocked(move || {
        let mut buffer = [0; 16];
        let answer = call::receive(number, &mut buffer, 0);
        read_text(answer, &buffer)
    });
    let (reader, _writer) = call::pipe();
    call::dup2(reader, number).expect("dup2");
    ask(side, "replaced");
    side.report("replaced under a receiver", outcome(&thread));
    let set = set_of(&[(number, EPOLLIN, 1)]);
    side.report("the number is a pipe's", ready(set));
    side.report("and no socket's", worked(call::peer_address(number)));
    for fd in [set, number, reader] {
        call::close(fd).expect("close");
    }
}

/// A socket that is in a set before connect.
fn connecting(side: &mut Side) {
    let closed = side.there(side.port());
    let socket = side.socket(STREAM);
    call::fcntl(socket, F_SETFL, O_NONBLOCK).expect("F_SETFL");
    let set = set_of(&[(socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 1)]);
    side.report("fresh: edges", ready(set));
    side.report("fresh: nothing new", ready(set));
    side.report("refused: begun", told(call::connect(socket, closed)));
    side.report("refused", show(call::epoll_wait(set, 8, 2000)));
    side.report("refused: nothing new", ready(set));
    side.report("refused: error", told(call::socket_error(socket)));
    call::close(socket).expect("close");
    side.report("refused: closed", ready(set));
}
