//! Several threads on one socket.

use std::{
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use libc::{MSG_WAITALL, SHUT_RDWR};

use crate::{
    call::{self, Fd},
    show::{read_text, worked},
    side::Side,
};

pub(super) const MOMENT: Duration = Duration::from_millis(100);

pub fn run(side: &mut Side) {
    shut_down(side);
    listener_shut_down(side);
    closed(side);
    both_ways(side);
    readers(side);
}

/// Starts `act` on a new thread and leaves it time to block.
pub(super) fn blocked<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = channel();
    thread::spawn(move || {
        let _ = tell.send(act());
    });
    thread::sleep(MOMENT);
    told
}

/// Returns the thread's result, if it returned within three MOMENTs.
pub(super) fn outcome(thread: &Receiver<String>) -> String {
    thread
        .recv_timeout(MOMENT * 3)
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
        side.report("after a close", outcome(&thread));
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
