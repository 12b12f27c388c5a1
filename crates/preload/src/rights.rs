//! Descriptors in messages on kernel sockets (`SCM_RIGHTS`): Portolan's sockets are sent in a form
//! that any receiver can use, and received ones are registered.

use std::mem::size_of;

use libc::{SCM_RIGHTS, SOL_SOCKET, c_int, cmsghdr, msghdr};
use portolan::posix;

use crate::memory::readable;

/// Called before a message with descriptors is sent.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub(crate) unsafe fn give_away(message: *const msghdr) {
    // SAFETY: the caller's promise.
    unsafe { each_descriptor(message, posix::give_away) }
}

/// Called after a message was received.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub(crate) unsafe fn take_up(message: *const msghdr) {
    // SAFETY: the caller's promise.
    unsafe { each_descriptor(message, posix::attach) }
}

unsafe fn each_descriptor(message: *const msghdr, act: impl Fn(c_int)) {
    if readable(message, 1).is_err() {
        return;
    }
    // SAFETY: the control messages of a valid msghdr lie in memory of the length given; the macros stay inside it.
    unsafe {
        let control = (*message).msg_control.cast::<u8>();
        if control.is_null() || readable(control, (*message).msg_controllen).is_err() {
            return;
        }
        let mut next = libc::CMSG_FIRSTHDR(message);
        while !next.is_null() {
            let header: cmsghdr = next.read_unaligned();
            let data = libc::CMSG_DATA(next).cast::<c_int>();
            let start = data.addr() - next.addr();
            // Stays within the buffer, whatever the header says.
            let room = (*message).msg_control.addr() + (*message).msg_controllen - next.addr();
            let length = header.cmsg_len.min(room).saturating_sub(start);
            if (header.cmsg_level, header.cmsg_type) == (SOL_SOCKET, SCM_RIGHTS) {
                for index in 0..length / size_of::<c_int>() {
                    act(data.add(index).read_unaligned());
                }
            }
            next = libc::CMSG_NXTHDR(message, next);
        }
    }
}
