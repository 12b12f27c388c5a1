//! Several threads on one socket.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Barrier,
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use libc::{
    EPOLL_CTL_ADD, EPOLLIN, EPOLLOUT, MSG_WAITALL, POLLIN, POLLOUT, SHUT_RDWR, SOCK_NONBLOCK,
};

use crate::{
    call::{self, Fd, STREAM},
    show::{events, read_text, told, worked},
    side::Side,
};

pub(super) const MOMENT: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(side: &mut Side) {
    shut_down(side);
    connecting_shut_down(side);
    listener_shut_down(side);
    closed(side);
    both_ways(side);
    readers(side);
}

/// Starts `act` on a new thread, and leaves it time to block once it runs.
pub(super) fn blocked<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = channel();
    let begun = Arc::new(Barrier::new(2));
    let begins = Arc::clone(&begun);
    thread::spawn(move || {
        begins.wait();
        let _ = tell.send(act());
    });
    begun.wait();
    thread::sleep(MOMENT);
    told
}

/// Returns the thread's result, which is to come, however busy the machine is.
pub(super) fn outcome(thread: &Receiver<String>) -> String {
    outcome_within(PATIENCE, thread)
}

fn outcome_within(time: Duration, thread: &Receiver<String>) -> String {
    thread
        .recv_timeout(time)
        .unwrap_or_else(|_| "still blocked".to_owned())
}

fn receive(socket: Fd) -> String {
    let mut buffer = [0; 16];
    let answer = call::receive(socket, &mut buffer, 0);
    read_text(answer, &buffer)
}

fn shut_down(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        let thread = blocked(move || receive(socket));
        call::shutdown(socket, SHUT_RDWR).expect("shutdown");
        side.report("shutdown wakes a receiver", outcome(&thread));
    }
    side.step();
}

/// Nobody answers.
fn connecting_shut_down(side: &mut Side) {
    if side.is_server() || side.is_within_one_host() {
        return;
    }
    let there = SocketAddr::new(side.nobody(97), 9);
    let socket = side.socket(STREAM);
    let thread = blocked(move || worked(call::connect(socket, there)));
    let answer = call::shutdown(socket, SHUT_RDWR);
    side.report("shutdown while another connects", worked(answer));
    side.report("shutdown wakes who connects", outcome(&thread));
    call::close(socket).expect("close");
    for way in ["poll", "epoll"] {
        let socket = side.socket(STREAM | SOCK_NONBLOCK);
        let answer = call::connect(socket, there);
        side.report(&format!("{way}: connect"), worked(answer));
        let wait = match way {
            "poll" => polled,
            _ => watched,
        };
        let thread = blocked(move || wait(socket));
        let answer = call::shutdown(socket, SHUT_RDWR);
        side.report(&format!("{way}: shutdown"), worked(answer));
        side.report(
            &format!("{way}: shutdown wakes a watcher"),
            outcome(&thread),
        );
        call::close(socket).expect("close");
    }
}

fn polled(socket: Fd) -> String {
    let found = call::poll(&[(socket, POLLIN | POLLOUT)], 2000);
    told(found.map(|(_, found)| events(found[0])))
}

fn watched(socket: Fd) -> String {
    let set = call::epoll_create(0).expect("an epoll");
    call::epoll_control(set, EPOLL_CTL_ADD, socket, EPOLLIN | EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    let found = call::epoll_wait(set, 1, 2000).expect("epoll_wait");
    let found = found.first().map(|(_, bits)| events(*bits as i16));
    call::close(set).expect("close");
    found.unwrap_or_default()
}

fn listener_shut_down(side: &mut Side) {
    let port = side.port();
    if !side.is_server() {
        return;
    }
    let listener = side.listener(port);
    let thread = blocked(move || worked(call::accept_quietly(listener)));
    call::shutdown(listener, SHUT_RDWR).expect("shutdown");
    side.report("shutdown wakes an accepter", outcome(&thread));
}

/// A close does not wake a receiver, whose call keeps the socket open until it returns.
fn closed(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::send(socket, b"late", 0).expect("send");
    } else {
        let thread = blocked(move || receive(socket));
        call::close(socket).expect("close");
        side.report("after a close", outcome_within(3 * MOMENT, &thread));
        side.step();
        side.report("after a close and data", outcome(&thread));
    }
    side.step();
}

/// One thread sends while another receives, on both sides.
fn both_ways(side: &mut Side) {
    const COUNT: usize = 4 << 20;
    let socket = side.connection();
    let sender = thread::spawn(move || {
        let bytes: Vec<u8> = (0..COUNT).map(|index| ((index * 7) >> 5) as u8).collect();
        let mut sent = 0;
        while sent < COUNT {
            sent += call::send(socket, &bytes[sent..], 0).expect("send");
        }
    });
    let mut bytes = vec![0; COUNT];
    let got = call::receive(socket, &mut bytes, MSG_WAITALL).expect("receive");
    let intact = bytes
        .iter()
        .enumerate()
        .all(|(index, byte)| *byte == ((index * 7) >> 5) as u8);
    sender.join().expect("the sender");
    side.report("both ways at once", format!("{got} {intact}"));
    side.step();
}

/// Two receivers share the stream.
fn readers(side: &mut Side) {
    const COUNT: usize = 1 << 20;
    let socket = side.connection();
    if side.is_server() {
        let bytes = vec![1; COUNT];
        let mut sent = 0;
        while sent < COUNT {
            sent += call::send(socket, &bytes[sent..], 0).expect("send");
        }
        call::close(socket).expect("close");
    } else {
        let readers: Vec<_> = (0..2)
            .map(|_| thread::spawn(move || read_to_end(socket)))
            .collect();
        let total: usize = readers
            .into_iter()
            .map(|reader| reader.join().expect("a reader"))
            .sum();
        side.report("two receivers", total);
    }
    side.step();
}

fn read_to_end(socket: Fd) -> usize {
    let mut total = 0;
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = call::receive(socket, &mut buffer, 0) {
        total += length;
    }
    total
}
