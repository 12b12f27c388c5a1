//! The receiving calls and their flags on a stream.

use libc::{
    FIONREAD, MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, MSG_WAITFORONE, SOL_SOCKET,
};

use crate::{
    call::{self, Fd},
    show::{events, message_flags, read_text, text, told},
    side::Side,
};

pub(super) fn run(side: &mut Side) {
    let socket = side.connection();
    if side.is_server() {
        feed(side, socket);
    } else {
        empty(side, socket);
        plain(side, socket);
        whole(side, socket);
        scattered(side, socket);
        low_water(side, socket);
        end(side, socket);
    }
}

/// Sends what the client requests.
fn feed(side: &mut Side, socket: Fd) {
    loop {
        match side.hear().as_str() {
            "end" => break,
            text => call::send(socket, text.as_bytes(), 0).expect("send"),
        };
    }
    call::close(socket).expect("close");
}

/// Requests `text` and waits until all of it has arrived.
fn ask(side: &mut Side, socket: Fd, text: &str) {
    let before = call::ioctl(socket, FIONREAD, -1).expect("FIONREAD");
    side.tell(text);
    while call::ioctl(socket, FIONREAD, -1).expect("FIONREAD") < before + text.len() as i32 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn receive(socket: Fd, room: usize, flags: i32) -> String {
    let mut buffer = vec![0; room];
    let answer = call::receive(socket, &mut buffer, flags);
    read_text(answer, &buffer)
}

fn empty(side: &Side, socket: Fd) {
    side.report(
        "nothing there: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "nothing there: do not wait",
        receive(socket, 8, MSG_DONTWAIT),
    );
    side.report(
        "nothing there: peek",
        receive(socket, 8, MSG_DONTWAIT | MSG_PEEK),
    );
    side.report("nothing there: out of band", receive(socket, 8, MSG_OOB));
    side.report("nothing there: no room", receive(socket, 0, MSG_DONTWAIT));
    side.report(
        "nothing there: count",
        told(call::ioctl(socket, FIONREAD, -1)),
    );
}

fn plain(side: &mut Side, socket: Fd) {
    ask(side, socket, "abcdefghij");
    side.report(
        "ten there: events",
        told(call::events_now(socket).map(events)),
    );
    side.report("ten there: count", told(call::ioctl(socket, FIONREAD, -1)));
    side.report("peek 4", receive(socket, 4, MSG_PEEK));
    side.report("peek 4 again", receive(socket, 4, MSG_PEEK));
    side.report("peek all", receive(socket, 64, MSG_PEEK));
    side.report("no room", receive(socket, 0, 0));
    side.report("receive 2", receive(socket, 2, 0));
    let mut buffer = [0; 3];
    side.report(
        "read 3",
        read_text(call::read(socket, &mut buffer), &buffer),
    );
    let mut untouched = *b"..";
    let dropped = call::receive(socket, &mut untouched, MSG_TRUNC);
    side.report("drop 2", format!("{} {}", told(dropped), text(&untouched)));
    side.report("what is left", receive(socket, 64, 0));
    ask(side, socket, "from");
    let mut buffer = [0; 8];
    let answer = call::receive_from(socket, &mut buffer, 0);
    side.report(
        "receive with address",
        told(answer.map(|(length, from)| format!("{length} {from:?}"))),
    );
}

fn whole(side: &mut Side, socket: Fd) {
    ask(side, socket, "12345");
    side.report(
        "wait for all, not waiting",
        receive(socket, 8, MSG_WAITALL | MSG_DONTWAIT),
    );
    ask(side, socket, "67");
    side.tell("890");
    side.report("wait for all", receive(socket, 5, MSG_WAITALL));
    ask(side, socket, "ab");
    side.tell("cd");
    side.report(
        "wait for all, peeking",
        receive(socket, 4, MSG_WAITALL | MSG_PEEK),
    );
    side.report("wait for all, peeked", receive(socket, 4, MSG_WAITALL));
}

fn scattered(side: &mut Side, socket: Fd) {
    ask(side, socket, "scattered");
    let (mut first, mut second, mut third) = ([0; 2], [0; 0], [0; 16]);
    let answer = call::read_scattered(socket, &mut [&mut first, &mut second, &mut third]);
    side.report(
        "scattered",
        format!("{} {} {}", told(answer), text(&first), text(&third[..7])),
    );

    ask(side, socket, "message");
    let (mut first, mut second) = ([0; 3], [0; 16]);
    let message = call::receive_message(socket, &mut [&mut first, &mut second], 0);
    side.report(
        "message",
        told(message.map(|message| {
            let (from, flags) = (message.from, message_flags(message.flags));
            format!("{} {from:?} {flags} {:?}", message.length, message.control)
        })),
    );

    ask(side, socket, "many messages");
    let got = call::receive_messages(socket, 3, MSG_WAITFORONE, None);
    let texts = got.map(|texts| {
        texts
            .iter()
            .map(|bytes| text(bytes))
            .collect::<Vec<_>>()
            .join(" ")
    });
    side.report("many messages", told(texts));
    let none = call::receive_messages(socket, 3, MSG_DONTWAIT, None);
    side.report(
        "many messages, none there",
        told(none.map(|texts| texts.len())),
    );
}

fn low_water(side: &mut Side, socket: Fd) {
    call::set_option(socket, SOL_SOCKET, libc::SO_RCVLOWAT, &4).expect("SO_RCVLOWAT");
    ask(side, socket, "low");
    side.report(
        "below low water: events",
        told(call::events_now(socket).map(events)),
    );
    side.report(
        "below low water: do not wait",
        receive(socket, 8, MSG_DONTWAIT),
    );
    ask(side, socket, "lower");
    side.report(
        "above low water: events",
        told(call::events_now(socket).map(events)),
    );
    side.report("above low water", receive(socket, 8, 0));
    call::set_option(socket, SOL_SOCKET, libc::SO_RCVLOWAT, &1).expect("SO_RCVLOWAT");
}

fn end(side: &mut Side, socket: Fd) {
    ask(side, socket, "last");
    side.tell("end");
    call::wait_for(socket, libc::POLLRDHUP);
    side.report("ended: events", told(call::events_now(socket).map(events)));
    side.report("ended: wait for all", receive(socket, 64, MSG_WAITALL));
    side.report("ended: receive", receive(socket, 64, 0));
    side.report("ended: receive again", receive(socket, 64, 0));
    side.report("ended: peek", receive(socket, 64, MSG_PEEK));
    side.report("ended: count", told(call::ioctl(socket, FIONREAD, -1)));
    side.report(
        "ended: error",
        told(call::socket_error(socket).map(|error| error.0)),
    );
}
