//! TCP Fast Open: the first open obtains a cookie, later ones send data in the SYN.

use libc::{IPPROTO_TCP, MSG_DONTWAIT, MSG_FASTOPEN, TCP_FASTOPEN, TCP_FASTOPEN_CONNECT, TCP_INFO};

use crate::{
    call::{self, Fd, STREAM},
    show::{read_text, told},
    side::Side,
};

/// `TCPI_OPT_SYN_DATA`.
const SYN_DATA: u8 = 32;

pub(super) fn run(side: &mut Side) {
    // Kernels act as servers only if enabled; each host of the bed has its own setting.
    let _ = std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3");
    let port = side.port();
    let listener = side.is_server().then(|| {
        let listener = side.listener(port);
        let set = call::set_option(listener, IPPROTO_TCP, TCP_FASTOPEN, &5);
        side.report("TCP_FASTOPEN", told(set));
        listener
    });
    side.step();
    for (name, open) in [
        ("first", send_to as fn(&Side, u16) -> Fd),
        ("second", send_to),
        ("not waiting", send_to_at_once),
        ("connect", connect_first),
    ] {
        match listener {
            Some(listener) => serve(side, listener, name),
            None => {
                let socket = open(side, port);
                ask(side, socket, name);
            }
        }
    }
    refused(side, port);
}

fn send_to(side: &Side, port: u16) -> Fd {
    let socket = side.socket(STREAM);
    let sent = call::send_to(socket, b"hello", MSG_FASTOPEN, side.there(port));
    side.report("sendto", told(sent));
    socket
}

fn send_to_at_once(side: &Side, port: u16) -> Fd {
    let socket = side.socket(STREAM);
    let flags = MSG_FASTOPEN | MSG_DONTWAIT;
    let sent = call::send_to(socket, b"hello", flags, side.there(port));
    side.report("sendto at once", told(sent));
    socket
}

fn connect_first(side: &Side, port: u16) -> Fd {
    let socket = side.socket(STREAM);
    let set = call::set_option(socket, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &1);
    side.report("TCP_FASTOPEN_CONNECT", told(set));
    let connected = call::connect(socket, side.there(port));
    side.report("connect", told(connected));
    side.report("send", told(call::send(socket, b"hello", 0)));
    socket
}

fn early(socket: Fd) -> bool {
    let info = call::option::<[u8; 8]>(socket, IPPROTO_TCP, TCP_INFO);
    info.is_ok_and(|(info, _)| info[5] & SYN_DATA != 0)
}

fn ask(side: &mut Side, socket: Fd, name: &str) {
    let mut buffer = [0; 16];
    let answer = call::receive(socket, &mut buffer, 0);
    side.report(&format!("{name}: answer"), read_text(answer, &buffer));
    side.report(&format!("{name}: with the SYN"), early(socket));
    call::close(socket).expect("close");
    side.step();
}

fn serve(side: &mut Side, listener: Fd, name: &str) {
    let (socket, _) = call::accept(listener, 0).expect("accept");
    let mut buffer = [0; 16];
    let request = call::receive(socket, &mut buffer, 0);
    side.report(&format!("{name}: request"), read_text(request, &buffer));
    call::send(socket, b"welcome", 0).expect("send");
    // Wait until the client has closed, so that its end enters TIME-WAIT.
    let ended = call::receive(socket, &mut buffer, 0);
    side.report(&format!("{name}: end"), read_text(ended, &buffer));
    call::close(socket).expect("close");
    side.step();
}

/// Opens that are refused with Fast Open.
fn refused(side: &mut Side, port: u16) {
    if side.is_server() {
        side.step();
        return;
    }
    let socket = side.socket(STREAM);
    side.report(
        "no address",
        told(call::send(socket, b"hello", MSG_FASTOPEN)),
    );
    let connected = call::connect(socket, side.there(port));
    side.report("connected plainly", told(connected));
    let again = call::send_to(socket, b"hello", MSG_FASTOPEN, side.there(port));
    side.report("already connected", told(again));
    let set = call::set_option(socket, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &1);
    side.report("TCP_FASTOPEN_CONNECT too late", told(set));
    let set = call::set_option(socket, IPPROTO_TCP, TCP_FASTOPEN, &1);
    side.report("TCP_FASTOPEN too late", told(set));
    side.step();
}
