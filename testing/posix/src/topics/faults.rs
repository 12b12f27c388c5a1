//! Pointers that lead nowhere.

use std::ptr;

use libc::{SOL_SOCKET, c_int, socklen_t};

use crate::{
    call::{self, STREAM},
    show::told,
    side::Side,
};

/// Null, an address in the first page, and one that no program has.
const BAD: [(&str, usize); 3] = [("null", 0), ("first page", 64), ("beyond", usize::MAX - 64)];

pub fn run(side: &mut Side) {
    if !side.is_server() {
        for (name, bad) in BAD {
            addresses(side, name, bad);
            values(side, name, bad);
        }
    }
    side.step();
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
