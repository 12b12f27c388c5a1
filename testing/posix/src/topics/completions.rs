//! `MSG_ZEROCOPY`: which calls are reported as completed, in which ranges, and how (networking/msg_zerocopy.rst). Between
//! two hosts that are connected by veth, and within one, Linux copies, too, and says so.

use std::time::{Duration, Instant};

use libc::{MSG_DONTWAIT, MSG_ERRQUEUE, MSG_ZEROCOPY, SO_ZEROCOPY, SOL_SOCKET};

use super::datagram_options::echo;
use super::tcp_options::{report_of_sent, until_acknowledged};
use crate::call::{self, DATAGRAM, Fd, STREAM};
use crate::show::{events, told};
use crate::side::Side;

pub(super) fn run(side: &mut Side) {
    stream(side);
    inherited(side);
    datagrams(side);
}

fn reports(socket: Fd) -> String {
    let ready = told(call::events_now(socket).map(events));
    let reports: Vec<String> = (0..8).map_while(|_| report_of_sent(socket)).collect();
    format!("{ready}; {reports:?}")
}

/// Returns how the error queue reports the call of that number. Linux completes a datagram when its memory is free, which
/// may be after the echo; whether it was copied depends on the receiver's stack.
fn completion(socket: Fd, number: u8) -> String {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let mut room = [0; 256];
        let Ok(message) = call::receive_message(socket, &mut [&mut room], MSG_ERRQUEUE) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let report = message.contents.first().filter(|it| it[12] == number);
        if let Some(report) = report {
            return format!("{:?} {:?}", message.control, &report[..6]);
        }
    }
    "none".to_owned()
}

fn stream(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let mut room = [0; 100_200];
        call::receive(socket, &mut room, libc::MSG_WAITALL).expect("receive");
        side.step();
        return;
    }
    for value in [-1, 2] {
        let set = call::set_option(socket, SOL_SOCKET, SO_ZEROCOPY, &value);
        side.report(&format!("stream: {value}"), told(set));
    }
    call::send(socket, &[1; 100], MSG_ZEROCOPY).expect("send");
    until_acknowledged(socket);
    side.report("stream: not asked for", reports(socket));
    call::set_option(socket, SOL_SOCKET, SO_ZEROCOPY, &1).expect("on");
    call::send(socket, &[2; 50], 0).expect("send");
    until_acknowledged(socket);
    side.report("stream: without the flag", reports(socket));
    call::send(socket, &[3; 50], MSG_ZEROCOPY).expect("send");
    until_acknowledged(socket);
    side.report("stream: one", reports(socket));
    for _ in 0..4 {
        call::send(socket, &[4; 25_000], MSG_ZEROCOPY).expect("send");
    }
    until_acknowledged(socket);
    side.report("stream: several", reports(socket));
    let nothing = call::send(socket, &[], MSG_ZEROCOPY | MSG_DONTWAIT);
    side.report("stream: nothing", told(nothing));
    side.report("stream: nothing, reported", reports(socket));
    let error = call::socket_error(socket);
    side.report(
        "stream: no error",
        told(error.map(|error| format!("{error:?}"))),
    );
    side.step();
}

/// An accepted connection has the option from its listener.
fn inherited(side: &mut Side) {
    if side.is_server() {
        let port = side.port();
        let listener = side.listener(port);
        call::set_option(listener, SOL_SOCKET, SO_ZEROCOPY, &1).expect("on");
        side.tell(port);
        let accepted = call::accept_quietly(listener).expect("accept");
        let shown = call::flag(accepted, SOL_SOCKET, SO_ZEROCOPY);
        side.report("inherited", told(shown));
        call::send(accepted, &[1; 100], MSG_ZEROCOPY).expect("send");
        until_acknowledged(accepted);
        // How it is completed depends on the stack of the receiver.
        let reports = (0..8).map_while(|_| report_of_sent(accepted)).count();
        side.report("inherited: reports", reports);
        side.step();
        return;
    }
    let port = side.hear().parse().expect("a port");
    let socket = side.socket(STREAM);
    call::connect(socket, side.there(port)).expect("connect");
    let mut room = [0; 100];
    call::receive(socket, &mut room, libc::MSG_WAITALL).expect("receive");
    side.step();
}

fn datagrams(side: &mut Side) {
    let socket = side.socket(DATAGRAM);
    if side.is_server() {
        let port = side.port();
        call::bind(socket, side.here(port)).expect("bind");
        side.tell(port);
        echo(socket);
        return;
    }
    let port = side.hear().parse().expect("a port");
    let there = side.there(port);
    let mut room = [0; 4000];
    let send = |length: usize, room: &mut [u8]| {
        call::send_to(socket, &vec![1; length], MSG_ZEROCOPY, there).expect("send");
        call::receive(socket, room, 0).expect("the echo");
    };
    send(100, &mut room);
    side.report("datagram: not asked for", reports(socket));
    call::set_option(socket, SOL_SOCKET, SO_ZEROCOPY, &1).expect("on");
    send(100, &mut room);
    side.report("datagram: one", completion(socket, 0));
    send(1, &mut room);
    send(1400, &mut room);
    send(4000, &mut room);
    side.report("datagram: several", completion(socket, 3));
    send(0, &mut room);
    side.report("datagram: empty", completion(socket, 4));
    call::send_to(socket, b"end", 0, there).expect("send");
}
