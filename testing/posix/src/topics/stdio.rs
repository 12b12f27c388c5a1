//! libc's streams on sockets, and its functions that write without a stream.

use std::thread;
use std::time::Duration;

use libc::{F_GETFL, F_SETFL, O_APPEND, O_NONBLOCK};

use crate::{
    call::{self, Fd, open_stream},
    show::{read_text, told, worked},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    both_ways(side);
    modes(side);
    printed(side);
    background(side);
}

fn both_ways(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let stream = open_stream(socket, c"r+").expect("fdopen");
        side.report(
            "server: number",
            told(stream.number().map(|fd| fd == socket)),
        );
        side.report("server: line", format!("{:?}", stream.line()));
        stream.put("an answer\n").expect("fputs");
        stream.put("and another\n").expect("fputs");
        side.report("server: flush", told(stream.flush()));
        side.report("server: end", format!("{:?}", stream.line()));
        side.report("server: is at end", stream.is_at_end());
        side.report("server: close", told(stream.close()));
        side.report("server: closed", told(call::fcntl(socket, F_GETFL, 0)));
        return;
    }
    let (reader, writer) = (
        open_stream(call::dup(socket).expect("dup"), c"r").expect("fdopen"),
        open_stream(socket, c"w").expect("fdopen"),
    );
    side.report("put", told(writer.put("a question\n")));
    side.report("place of a socket", told(reader.place()));
    side.report("put to a reader", worked(reader.put("x")));
    side.report("flush", told(writer.flush()));
    side.report("line", format!("{:?}", reader.line()));
    side.report("next line", format!("{:?}", reader.line()));
    call::shutdown(socket, libc::SHUT_WR).expect("shutdown");
    side.report("end", format!("{:?}", reader.line()));
    side.report("put after a shutdown", told(writer.put("x")));
    call::ignore(libc::SIGPIPE);
    side.report("flush after a shutdown", told(writer.flush()));
    side.report("close the writer", worked(writer.close()));
    side.report("close the reader", told(reader.close()));
}

fn modes(side: &mut Side) {
    let socket = side.connection();
    if !side.is_server() {
        side.report("bad mode", worked(open_stream(socket, c"x")));
        side.report("bad number", worked(open_stream(9999, c"r")));
        let appending = call::dup(socket).expect("dup");
        let stream = open_stream(appending, c"a").expect("fdopen");
        let status = call::fcntl(appending, F_GETFL, 0);
        side.report("append", told(status.map(|flags| flags & O_APPEND != 0)));
        side.report("close", told(stream.close()));
        call::fcntl(socket, F_SETFL, O_NONBLOCK).expect("F_SETFL");
        let stream = open_stream(socket, c"r").expect("fdopen");
        side.report("non-blocking line", format!("{:?}", stream.line()));
        side.report("non-blocking: is at end", stream.is_at_end());
        side.report("close", told(stream.close()));
    }
    side.step();
}

fn printed(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let stream = open_stream(socket, c"r").expect("fdopen");
        side.report("printed", format!("{:?}", stream.line()));
    } else {
        side.report("print", told(call::print(socket)));
        side.step();
        return;
    }
    side.step();
}

fn receive(socket: Fd) -> String {
    let mut buffer = [0; 16];
    let answer = call::receive(socket, &mut buffer, 0);
    read_text(answer, &buffer)
}

fn background(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.report("aio_write arrives", receive(socket));
        thread::sleep(Duration::from_millis(50));
        call::send(socket, b"behind", 0).expect("send");
        side.report("an ordinary write arrives", receive(socket));
    } else {
        let mut text = *b"before";
        let answer = call::in_background(libc::aio_write, socket, &mut text);
        side.report("aio_write", told(answer));
        let mut buffer = [0; 16];
        let answer = call::in_background(libc::aio_read, socket, &mut buffer);
        side.report("aio_read", read_text(answer, &buffer));
        call::send(socket, b"plain", 0).expect("send");
    }
    side.step();
    if !side.is_server() {
        let mut bytes = [0; 4];
        let answer = call::in_background(libc::aio_read, 9999, &mut bytes);
        side.report("aio_read of a closed one", told(answer));
    }
}
