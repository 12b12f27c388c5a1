//! splice between a pipe and a socket.

use std::thread;

use libc::{F_SETFL, O_NONBLOCK, SPLICE_F_NONBLOCK};

use crate::{
    call::{self, DATAGRAM, Fd, STREAM},
    show::{read_text, told},
    side::Side,
};

const LOT: usize = 3 << 20;

pub(super) fn run(side: &mut Side) {
    into(side);
    out_of(side);
    refused(side);
    a_lot(side);
}

fn receive(socket: Fd) -> String {
    let mut buffer = [0; 64];
    let answer = call::receive(socket, &mut buffer, 0);
    read_text(answer, &buffer)
}

fn into(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("arrived", receive(socket));
        side.step();
        return;
    }
    let (reader, writer) = call::pipe();
    let none = call::splice(reader, socket, 64, SPLICE_F_NONBLOCK);
    side.report("from an empty pipe", told(none));
    call::write(writer, b"by the pipe").expect("write");
    side.report(
        "into: nothing asked",
        told(call::splice(reader, socket, 0, 0)),
    );
    side.report("into", told(call::splice(reader, socket, 6, 0)));
    let mut buffer = [0; 64];
    let rest = call::read(reader, &mut buffer);
    side.report("left in the pipe", read_text(rest, &buffer));
    call::close(writer).expect("close");
    side.report(
        "from an ended pipe",
        told(call::splice(reader, socket, 64, 0)),
    );
    side.step();
}

fn out_of(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::send(socket, b"by the socket", 0).expect("send");
        side.step();
        call::close(socket).expect("close");
        return;
    }
    let (reader, writer) = call::pipe();
    call::fcntl(socket, F_SETFL, O_NONBLOCK).expect("F_SETFL");
    side.report(
        "out of: nothing there",
        told(call::splice(socket, writer, 64, 0)),
    );
    call::fcntl(socket, F_SETFL, 0).expect("F_SETFL");
    side.step();
    side.report("out of", told(call::splice(socket, writer, 6, 0)));
    let mut buffer = [0; 64];
    let got = call::read(reader, &mut buffer);
    side.report("in the pipe", read_text(got, &buffer));
    side.report("left in the socket", receive(socket));
    side.step();
    side.report(
        "out of an ended one",
        told(call::splice(socket, writer, 64, 0)),
    );
    call::close(reader).expect("close");
}

fn refused(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        let (reader, writer) = call::pipe();
        let file = call::file(b"contents");
        let fresh = side.socket(STREAM);
        let datagram = side.socket(DATAGRAM);
        call::write(writer, b"x").expect("write");
        side.report("to a socket", told(call::splice(socket, socket, 1, 0)));
        side.report("from a file", told(call::splice(file, socket, 1, 0)));
        side.report("to a file", told(call::splice(socket, file, 1, 0)));
        side.report(
            "from a writing end",
            told(call::splice(writer, socket, 1, 0)),
        );
        side.report("to a reading end", told(call::splice(socket, reader, 1, 0)));
        side.report("to a closed one", told(call::splice(socket, 9999, 1, 0)));
        side.report("from a closed one", told(call::splice(9999, socket, 1, 0)));
        side.report(
            "pipe with an offset",
            told(call::splice_from(reader, 0, socket)),
        );
        side.report(
            "socket with an offset",
            told(call::splice_from(socket, 0, writer)),
        );
        side.report(
            "to a pipe's offset",
            told(call::splice_to(socket, writer, 0)),
        );
        side.report(
            "to a socket's offset",
            told(call::splice_to(reader, socket, 0)),
        );
        side.report(
            "from an unconnected one",
            told(call::splice(fresh, writer, 1, 0)),
        );
        side.report(
            "to an unconnected datagram",
            told(call::splice(reader, datagram, 1, 0)),
        );
    }
    side.step();
}

/// More than a pipe and the socket's buffers hold; one side uses a pipe, the other does not.
fn a_lot(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let bytes: Vec<u8> = (0..LOT).map(|index| (index / 5) as u8).collect();
        let copy = bytes.clone();
        let sender = thread::spawn(move || {
            let mut sent = 0;
            while sent < LOT {
                sent += call::send(socket, &copy[sent..], 0).expect("send");
            }
        });
        let mut back = vec![0; LOT];
        let got = call::receive(socket, &mut back, libc::MSG_WAITALL);
        side.report("came back", told(got));
        side.report("as it went", back == bytes);
        sender.join().expect("the sender");
        return;
    }
    let (reader, writer) = call::pipe();
    side.report("moved", relay(socket, reader, writer));
}

fn relay(socket: Fd, reader: Fd, writer: Fd) -> usize {
    let mut moved = 0;
    while moved < LOT {
        let count = call::splice(socket, writer, 1 << 20, 0).expect("splice");
        let mut left = count;
        while left > 0 {
            left -= call::splice(reader, socket, left, 0).expect("splice");
        }
        moved += count;
    }
    moved
}
