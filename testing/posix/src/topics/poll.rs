//! poll, ppoll and select on sockets together with other descriptors.

use std::{thread, time::Duration};

use libc::{POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM, SIGUSR1};

use crate::{
    call::{self, Answer, Fd, STREAM, count_signals, kick, this_thread},
    show::{events, timed, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        side.step();
        call::send(socket, b"data", 0).expect("send");
        side.step();
        side.step();
        thread::sleep(Duration::from_millis(100));
        call::send(socket, b"later", 0).expect("send");
        side.step();
        return;
    }
    quiet(side, socket);
    side.step();
    side.step();
    call::wait_for(socket, POLLIN);
    mixed(side, socket);
    selected(side, socket);
    call::receive(socket, &mut [0; 16], 0).expect("receive");
    side.step();
    woken(side, socket);
    side.step();
}

fn list(answer: Answer<(i32, Vec<i16>)>) -> String {
    told(answer.map(|(ready, found)| {
        let found: Vec<_> = found.into_iter().map(events).collect();
        format!("{ready} [{}]", found.join(", "))
    }))
}

fn quiet(side: &Side, socket: Fd) {
    let (answer, time) = timed(Duration::from_millis(100), || {
        call::poll(&[(socket, POLLIN)], 100)
    });
    side.report("nothing there", format!("{} {time}", list(answer)));
    side.report("at once", list(call::poll(&[(socket, POLLIN)], 0)));
    side.report("writable", list(call::poll(&[(socket, POLLOUT)], -1)));
    side.report("no events wanted", list(call::poll(&[(socket, 0)], 0)));
    side.report(
        "other names",
        list(call::poll(&[(socket, POLLRDNORM | POLLWRNORM)], 0)),
    );
    let fresh = side.socket(STREAM);
    side.report(
        "unconnected",
        list(call::poll(&[(fresh, POLLIN | POLLOUT)], 0)),
    );
    call::close(fresh).expect("close");
    side.report(
        "closed, negative, good",
        list(call::poll(
            &[(fresh, POLLIN), (-1, POLLIN), (socket, POLLIN)],
            0,
        )),
    );
    count_signals(SIGUSR1, 0);
    let kicker = kick(this_thread(), SIGUSR1, Duration::from_millis(50));
    side.report(
        "interrupted",
        list(call::poll_open(&[(socket, POLLIN)], Duration::from_secs(3))),
    );
    kicker.join().expect("the kicker");
}

fn mixed(side: &Side, socket: Fd) {
    let (reader, writer) = call::pipe();
    let event = call::eventfd(1, 0).expect("an eventfd");
    let wanted = [
        (socket, POLLIN | POLLOUT),
        (reader, POLLIN),
        (writer, POLLOUT),
        (event, POLLIN),
    ];
    side.report("mixed", list(call::poll(&wanted, -1)));
    call::write(writer, b"x").expect("write");
    side.report("mixed, pipe filled", list(call::poll(&wanted, -1)));
    side.report(
        "twice the same",
        list(call::poll(&[(socket, POLLIN), (socket, POLLOUT)], -1)),
    );
}

fn selected(side: &Side, socket: Fd) {
    let (reader, writer) = call::pipe();
    let name = |fd: &Fd| match *fd {
        fd if fd == socket => "socket",
        fd if fd == reader => "reader",
        _ => "writer",
    };
    let show = |answer: Answer<(i32, [Vec<Fd>; 3])>| {
        told(answer.map(|(ready, sets)| {
            let sets = sets.map(|set| set.iter().map(name).collect::<Vec<_>>().join(" "));
            format!("{ready} [{}]", sets.join(", "))
        }))
    };
    let (short, none) = (Duration::from_millis(50), &[][..]);
    side.report(
        "select to read",
        show(call::select([&[socket, reader], none, none], short)),
    );
    side.report(
        "select all",
        show(call::select(
            [&[socket, reader], &[socket, writer], &[socket]],
            short,
        )),
    );
    let (answer, time) = timed(short, || call::select([&[reader], none, &[socket]], short));
    side.report("select nothing", format!("{} {time}", show(answer)));
    let closed = call::dup(socket).expect("dup");
    call::close(closed).expect("close");
    side.report(
        "select closed",
        show(call::select([&[closed, socket], none, none], short)),
    );
}

fn woken(side: &Side, socket: Fd) {
    let (reader, _writer) = call::pipe();
    let wait = || call::poll(&[(socket, POLLIN), (reader, POLLIN)], 3000);
    let (answer, time) = timed(Duration::from_millis(100), wait);
    side.report("woken", format!("{} {time}", list(answer)));
}
