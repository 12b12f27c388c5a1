//! Invalid pointers.

use std::ptr;

use libc::{F_SETFL, O_NONBLOCK, SOL_SOCKET, c_int, socklen_t};

use crate::{
    call::{self, DATAGRAM, Fd, STREAM, raw, raw::Edge},
    show::{read_text, told},
    side::Side,
};

/// Null, an address in the first page, and one beyond any program's memory.
const BAD: [(&str, usize); 3] = [("null", 0), ("first page", 64), ("beyond", usize::MAX - 64)];

pub(super) fn run(side: &mut Side) {
    if !side.is_server() {
        for (name, bad) in BAD {
            addresses(side, name, bad);
            values(side, name, bad);
        }
        at_an_edge(side);
    }
    side.step();
    sending(side);
    receiving(side);
    datagrams(side);
    accepting(side);
    if !side.is_server() {
        waiting(side);
        actions(side);
    }
    side.step();
}

/// Memory that begins in a valid page and ends in an invalid one.
fn at_an_edge(side: &Side) {
    let edge = Edge::to_none();
    let socket = side.socket(STREAM);
    let option = |length| {
        let value = edge.last(2).cast_const();
        call::set_option_raw(socket, SOL_SOCKET, libc::SO_KEEPALIVE, value, length)
    };
    side.report("edge: setsockopt", told(option(4)));
    side.report("edge: setsockopt, too short", told(option(2)));
    let address = edge.last(8).cast_const().cast();
    side.report(
        "edge: connect",
        told(call::connect_raw(socket, address, 16)),
    );
    let mut length: socklen_t = 16;
    let named = call::local_address_raw(socket, edge.last(8).cast(), &mut length);
    side.report("edge: getsockname", told(named));
    let mut length = size_of::<c_int>() as socklen_t;
    let got = call::option_raw(socket, SOL_SOCKET, libc::SO_TYPE, edge.last(2), &mut length);
    side.report("edge: getsockopt", told(got));
    let control = raw::ioctl_raw(socket, libc::FIONBIO, edge.last(1));
    side.report("edge: ioctl", told(control));
}

fn sending(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        let mut buffer = [0; 64];
        let got = call::receive(socket, &mut buffer, 0);
        side.report("what was sent", read_text(got, &buffer));
        side.step();
        return;
    }
    let edge = Edge::to_none();
    side.report("send", told(raw::send_raw(socket, edge.bad(), 10, 0)));
    side.report(
        "send: edge",
        told(raw::send_raw(socket, edge.last(4), 10, 0)),
    );
    side.report(
        "writev",
        told(raw::writev_raw(socket, edge.bad().cast(), 2)),
    );
    let good = b"good".as_ptr().cast_mut().cast();
    let mut pieces = [raw::piece(good, 4), raw::piece(edge.bad(), 4)];
    let both = raw::writev_raw(socket, pieces.as_ptr(), 2);
    side.report("writev: one is bad", told(both));
    side.report(
        "sendmsg",
        told(raw::sendmsg_raw(socket, edge.bad().cast(), 0)),
    );
    let message = edge.put(raw::message(&mut pieces[..1], ptr::null_mut(), 0));
    side.report(
        "sendmsg: the last in its page",
        told(raw::sendmsg_raw(socket, message, 0)),
    );
    let message = raw::message(&mut pieces[..1], edge.bad(), 32);
    let sent = raw::sendmsg_raw(socket, &message, 0);
    side.report("sendmsg: control", told(sent));
    let many = raw::sendmmsg_raw(socket, edge.bad().cast(), 2, 0);
    side.report("sendmmsg", told(many));
    side.step();
}

fn receiving(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        call::send(socket, b"0123456789", 0).expect("send");
        side.step();
        side.step();
        return;
    }
    side.step();
    let wait = |flags| call::receive(socket, &mut [0; 10], flags | libc::MSG_PEEK);
    wait(libc::MSG_WAITALL).expect("they come");
    let (none, read) = (Edge::to_none(), Edge::to_read_only());
    side.report("recv", told(raw::recv_raw(socket, none.bad(), 10, 0)));
    side.report(
        "recv: edge",
        told(raw::recv_raw(socket, none.last(4), 10, 0)),
    );
    side.report(
        "recv: read-only",
        told(raw::recv_raw(socket, read.bad(), 10, 0)),
    );
    let peek = raw::recv_raw(socket, read.bad(), 10, libc::MSG_PEEK);
    side.report("recv: peek", told(peek));
    side.report("readv", told(raw::readv_raw(socket, none.bad().cast(), 2)));
    let pieces = [raw::piece(none.last(4), 4), raw::piece(none.bad(), 4)];
    let both = raw::readv_raw(socket, pieces.as_ptr(), 2);
    side.report("readv: one is bad", told(both));
    side.report(
        "recvmsg",
        told(raw::recvmsg_raw(socket, none.bad().cast(), 0)),
    );
    let many = raw::ioctl_raw(socket, libc::FIONREAD, read.bad());
    side.report("FIONREAD", told(many));
    // The buffer is partly invalid, but the data fits into the valid part.
    let rest = raw::recv_raw(socket, none.last(16), 64, 0);
    side.report("recv: enough", told(rest));
    side.step();
}

fn datagrams(side: &mut Side) {
    let port = side.port();
    let socket = side.socket(DATAGRAM);
    if side.is_server() {
        call::bind(socket, side.here(port)).expect("bind");
        side.step();
        let mut buffer = [0; 64];
        let got = call::receive(socket, &mut buffer, 0);
        side.report("datagram", read_text(got, &buffer));
        side.step();
        return;
    }
    side.step();
    let edge = Edge::to_none();
    let to = side.there(port);
    side.report("sendto", told(raw::sendto_raw(socket, edge.bad(), 10, to)));
    side.report(
        "sendto: edge",
        told(raw::sendto_raw(socket, edge.last(4), 10, to)),
    );
    side.report(
        "sendto: too long",
        told(raw::sendto_raw(socket, edge.bad(), 1 << 20, to)),
    );
    let good = raw::sendto_raw(socket, edge.put(*b"good").cast_const().cast(), 4, to);
    side.report("sendto: good", told(good));
    side.step();
}

/// A connection whose address cannot be written has been accepted, and is lost.
fn accepting(side: &mut Side) {
    let port = side.port();
    if side.is_server() {
        let listener = side.listener(port);
        side.step();
        let edge = Edge::to_none();
        let mut length: socklen_t = 16;
        let accepted = raw::accept_raw(listener, edge.bad().cast(), &mut length);
        side.report("accept", told(accepted));
        side.step();
    } else {
        let socket = side.socket(STREAM);
        side.step();
        call::connect(socket, side.there(port)).expect("connect");
        side.report("not accepted", told(call::receive(socket, &mut [0; 4], 0)));
        side.step();
    }
}

fn waiting(side: &Side) {
    let none = Edge::to_none();
    let socket = side.socket(DATAGRAM);
    call::fcntl(socket, F_SETFL, O_NONBLOCK).expect("F_SETFL");
    let polled = raw::poll_raw(none.bad().cast(), 2, 0);
    side.report("poll", told(polled));
    let polled = raw::ppoll_raw(socket, none.bad().cast());
    side.report("ppoll: mask", told(polled));
    side.report(
        "select",
        told(raw::select_raw(socket + 1, none.bad().cast())),
    );
    events(side, socket, &none);
}

fn events(side: &Side, socket: Fd, edge: &Edge) {
    let set = call::epoll_create(0).expect("epoll_create");
    let added = call::epoll_control(set, libc::EPOLL_CTL_ADD, socket, libc::EPOLLOUT, 7);
    side.report("epoll_ctl", told(added));
    let got = raw::epoll_pwait_raw(set, edge.bad().cast(), 4, 100, ptr::null());
    side.report("epoll_pwait", told(got));
    let got = raw::epoll_pwait_raw(set, edge.last(12).cast(), 4, 100, edge.bad().cast());
    side.report("epoll_pwait: mask", told(got));
    let got = raw::epoll_pwait_raw(set, edge.last(24).cast(), 512, 100, ptr::null());
    side.report("epoll_pwait: room for two", told(got));
}

/// Faults of the program itself have their usual effect.
fn actions(side: &Side) {
    let edge = Edge::to_none();
    let bad = edge.bad().cast_const();
    let by_default = || {
        raw::set_fault_action(libc::SIG_DFL);
    };
    side.report("a fault", raw::child(|| raw::fault(bad)));
    side.report(
        "a fault by default",
        raw::child(|| {
            by_default();
            raw::fault(bad);
        }),
    );
    side.report(
        "a fault that is ignored",
        raw::child(|| {
            raw::set_fault_action(libc::SIG_IGN);
            raw::fault(bad);
        }),
    );
    side.report(
        "a fault that is handled",
        raw::child(|| {
            raw::handle_faults(bad, 0);
            raw::fault(bad);
        }),
    );
    side.report(
        "a fault after a call that had none",
        raw::child(|| {
            raw::handle_faults(bad, 0);
            let socket = side.socket(STREAM);
            let _ = call::connect_raw(socket, bad.cast(), 16);
            raw::fault(bad);
        }),
    );
    side.report(
        "a stack that overflows",
        raw::child(|| {
            raw::handle_faults(ptr::null(), libc::SA_ONSTACK);
            raw::overflow();
        }),
    );
    side.report(
        "a signal by default",
        raw::child(|| {
            by_default();
            raw::kill_self(libc::SIGSEGV);
        }),
    );
    side.report(
        "a signal that is ignored",
        raw::child(|| {
            raw::set_fault_action(libc::SIG_IGN);
            raw::kill_self(libc::SIGSEGV);
        }),
    );
    told_actions(side);
}

fn told_actions(side: &Side) {
    let answers = raw::child(|| {
        raw::set_fault_action(libc::SIG_DFL);
        let first = raw::fault_action() == "default";
        raw::handle_faults(ptr::null(), libc::SA_ONSTACK);
        let second = raw::fault_action() == "ours";
        raw::set_fault_action(libc::SIG_IGN);
        let third = raw::set_fault_action(libc::SIG_DFL) == libc::SIG_IGN;
        let fourth = raw::set_fault_action(libc::SIG_DFL) == libc::SIG_DFL;
        let told = [first, second, third, fourth];
        // One bit for each check.
        let bits = told.iter().fold(0, |bits, &is| bits << 1 | c_int::from(is));
        std::process::exit(bits);
    });
    side.report("actions as they were said", answers);
}

fn addresses(side: &Side, name: &str, bad: usize) {
    let socket = side.socket(STREAM);
    let connect = call::connect_raw(socket, ptr::without_provenance(bad), 16);
    side.report(&format!("{name}: connect"), told(connect));
    let mut length: socklen_t = 16;
    let named = call::local_address_raw(socket, ptr::without_provenance_mut(bad), &mut length);
    side.report(&format!("{name}: getsockname"), told(named));
    let mut place = [0_u64; 4];
    let named = call::local_address_raw(
        socket,
        place.as_mut_ptr().cast(),
        ptr::without_provenance_mut(bad),
    );
    side.report(&format!("{name}: getsockname, length"), told(named));
}

fn values(side: &Side, name: &str, bad: usize) {
    let socket = side.socket(STREAM);
    let mut length = size_of::<c_int>() as socklen_t;
    let set = call::set_option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_KEEPALIVE,
        ptr::without_provenance(bad),
        length,
    );
    side.report(&format!("{name}: setsockopt"), told(set));
    let got = call::option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_TYPE,
        ptr::without_provenance_mut(bad),
        &mut length,
    );
    side.report(&format!("{name}: getsockopt"), told(got));
    let mut value: c_int = 0;
    let room = ptr::without_provenance_mut(bad);
    let got = call::option_raw(
        socket,
        SOL_SOCKET,
        libc::SO_TYPE,
        (&raw mut value).cast(),
        room,
    );
    side.report(&format!("{name}: getsockopt, length"), told(got));
}
