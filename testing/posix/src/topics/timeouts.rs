//! SO_RCVTIMEO and SO_SNDTIMEO.

use std::{fmt::Display, net::SocketAddr, time::Duration};

use libc::{SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, timeval};

use crate::{
    call::{self, Answer, DATAGRAM, Fd, STREAM},
    show::{timed, told},
    side::Side,
};

const WAIT: Duration = Duration::from_millis(150);

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        receiving(side, "receive", socket);
        receiving(side, "datagram", side.socket(DATAGRAM));
        before_now(side, "receive before now", (socket, SO_RCVTIMEO), receive);
        let datagrams = side.socket(DATAGRAM);
        before_now(
            side,
            "datagram before now",
            (datagrams, SO_RCVTIMEO),
            receive,
        );
        accepting(side);
        if !side.is_within_one_host() {
            connecting(side);
        }
        sending(side, socket);
    }
    side.step();
}

fn set(socket: Fd, name: i32) {
    let time = timeval {
        tv_sec: 0,
        tv_usec: WAIT.subsec_micros().into(),
    };
    call::set_option(socket, SOL_SOCKET, name, &time).expect("a time-out");
}

fn receiving(side: &Side, check: &str, socket: Fd) {
    set(socket, SO_RCVTIMEO);
    let (answer, time) = timed(WAIT, || call::receive(socket, &mut [0; 16], 0));
    side.report(check, format!("{} {time}", told(answer)));
}

/// A negative time is over at once.
fn before_now<T: Display>(
    side: &Side,
    check: &str,
    (socket, option): (Fd, i32),
    act: impl FnOnce(Fd) -> Answer<T>,
) {
    let time = timeval {
        tv_sec: -5,
        tv_usec: 0,
    };
    call::set_option(socket, SOL_SOCKET, option, &time).expect("a time-out");
    let (answer, time) = timed(Duration::ZERO, || act(socket));
    side.report(check, format!("{} {time}", told(answer)));
}

fn receive(socket: Fd) -> Answer<usize> {
    call::receive(socket, &mut [0; 16], 0)
}

/// To who never answers.
fn connecting(side: &Side) {
    let there = SocketAddr::new(side.nobody(98), 9);
    let socket = side.socket(STREAM);
    before_now(
        side,
        "connect before now",
        (socket, SO_SNDTIMEO),
        |socket| call::connect(socket, there),
    );
    call::close(socket).expect("close");
}

fn accepting(side: &Side) {
    let listener = side.listener(side.port());
    set(listener, SO_RCVTIMEO);
    let (answer, time) = timed(WAIT, || call::accept_quietly(listener));
    side.report("accept", format!("{} {time}", told(answer)));
    before_now(
        side,
        "accept before now",
        (listener, SO_RCVTIMEO),
        call::accept_quietly,
    );
}

/// Sends until nothing has been accepted for longer than the answer to a window probe takes, after which
/// Linux may have room again.
fn fill(socket: Fd, plenty: &[u8]) {
    let mut refusals = 0;
    while refusals < 5 {
        refusals = match call::send(socket, plenty, 0) {
            Ok(_) => 0,
            Err(_) => refusals + 1,
        };
    }
}

/// Sends more than the buffers hold to a peer that does not read.
fn sending(side: &Side, socket: Fd) {
    set(socket, SO_SNDTIMEO);
    let plenty = vec![7; 64 << 20];
    let sent = call::send(socket, &plenty, 0);
    side.report(
        "send plenty",
        told(sent.map(|length| length < plenty.len())),
    );
    fill(socket, &plenty);
    let (answer, time) = timed(WAIT, || call::send(socket, &plenty, 0));
    side.report("send again", format!("{} {time}", told(answer)));
    before_now(side, "send before now", (socket, SO_SNDTIMEO), |socket| {
        call::send(socket, &plenty, 0)
    });
}
