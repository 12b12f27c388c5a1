//! Closes that reset: SO_LINGER of zero, unread data; and closes that wait.

use std::time::Duration;

use libc::{MSG_NOSIGNAL, SO_LINGER, SOL_SOCKET, linger};

use crate::{
    call::{self, Fd},
    show::{events, read_text, timed, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    reset(side, "linger zero", |socket| {
        let none = linger {
            l_onoff: 1,
            l_linger: 0,
        };
        call::set_option(socket, SOL_SOCKET, SO_LINGER, &none).expect("SO_LINGER");
    });
    reset(side, "unread data", |socket| {
        call::wait_for(socket, libc::POLLIN);
    });
    delivered(side);
    waiting(side);
}

/// A close that lingers returns at once when all is acknowledged, else at the time-out.
fn waiting(side: &mut Side) {
    for (name, much, expected) in [("idle", false, 0), ("blocked", true, 1)] {
        let socket = side.connection();
        if side.is_server() {
            // Reads nothing until the other side has closed.
            side.step();
            side.step();
            call::close(socket).expect("close");
            continue;
        }
        side.step();
        let chunk = vec![7; 1 << 16];
        let mut stalls = 0;
        while much && stalls < 20 {
            match call::send(socket, &chunk, libc::MSG_DONTWAIT) {
                Ok(_) => stalls = 0,
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(10));
                    stalls += 1;
                }
            }
        }
        let value = linger {
            l_onoff: 1,
            l_linger: 1,
        };
        call::set_option(socket, SOL_SOCKET, SO_LINGER, &value).expect("SO_LINGER");
        let (closed, verdict) = timed(Duration::from_secs(expected), || call::close(socket));
        side.report(
            &format!("lingering, {name}"),
            format!("{}; {verdict}", told(closed)),
        );
        side.step();
    }
}

/// The server closes in a way that resets the client.
fn reset(side: &mut Side, name: &str, prepare: fn(Fd)) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        prepare(socket);
        call::close(socket).expect("close");
        side.step();
        return;
    }
    call::send(socket, b"unread", 0).expect("send");
    side.step();
    side.step();
    call::wait_for(socket, 0);
    side.report(
        &format!("{name}: events"),
        told(call::events_now(socket).map(events)),
    );
    let mut buffer = [0; 16];
    side.report(
        &format!("{name}: receive"),
        read_text(call::receive(socket, &mut buffer, 0), &buffer),
    );
    side.report(
        &format!("{name}: receive again"),
        read_text(call::receive(socket, &mut buffer, 0), &buffer),
    );
    side.report(
        &format!("{name}: send"),
        told(call::send(socket, b"x", MSG_NOSIGNAL)),
    );
    side.report(
        &format!("{name}: error"),
        told(call::socket_error(socket).map(|error| error.0)),
    );
}

/// Data sent before a plain close arrives, however much it is.
fn delivered(side: &mut Side) {
    let socket = side.connection();
    const COUNT: usize = 1 << 20;
    if side.is_server() {
        let bytes: Vec<u8> = (0..COUNT).map(|index| (index >> 3) as u8).collect();
        let mut sent = 0;
        while sent < COUNT {
            sent += call::send(socket, &bytes[sent..], 0).expect("send");
        }
        side.report("closing after much", told(call::close(socket)));
    } else {
        let mut bytes = vec![0; COUNT + 1];
        let got = call::receive(socket, &mut bytes, libc::MSG_WAITALL).expect("receive");
        let intact = bytes[..got]
            .iter()
            .enumerate()
            .all(|(index, byte)| *byte == (index >> 3) as u8);
        side.report("all arrived", format!("{got} {intact}"));
    }
    side.step();
}
