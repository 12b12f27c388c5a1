//! `struct msghdr`: names, pieces and control messages, single and in arrays.

use std::{
    io::{IoSlice, IoSliceMut},
    time::{Duration, Instant},
};

use libc::{MSG_DONTWAIT, MSG_WAITFORONE, c_int, mmsghdr, msghdr, sockaddr, socklen_t};
use portolan::posix::{self, Received};
use rustix::io::Errno;

use crate::{
    address,
    buffers::{self, MAXIMUM_PIECES},
    control,
    interpose::Outcome,
    memory::{readable, writable},
};

/// Linux processes no more messages than this in one call.
pub(crate) const MAXIMUM_MESSAGES: usize = 1024;

/// Receives one message into `message`.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub(crate) unsafe fn receive(fd: c_int, message: *mut msghdr, flags: c_int) -> Outcome<isize> {
    writable(message, 1)?;
    // SAFETY: the caller's promise.
    let message = unsafe { &mut *message };
    check(message)?;
    let take = |slices: &mut [IoSliceMut]| posix::receive(fd, slices, flags);
    // SAFETY: a valid msghdr describes valid buffers.
    let received = unsafe { buffers::with_scattered(message.msg_iov, message.msg_iovlen, take)? };
    let truncated = control::store(message, &received.control)?;
    store_name(message, &received)?;
    message.msg_flags = received.flags | truncated;
    Ok(received.length as isize)
}

/// Receives until there are `count` messages, no more are pending (MSG_WAITFORONE) or the time is
/// over, which is checked after each message, as by Linux.
///
/// # Safety
/// `messages` is null or an array of `count` valid entries.
pub(crate) unsafe fn receive_many(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    mut flags: c_int,
    timeout: Option<Duration>,
) -> Outcome<c_int> {
    let started = Instant::now();
    let count = (count as usize).min(MAXIMUM_MESSAGES);
    for done in 0..count {
        let receive = |entry: &mut mmsghdr| {
            // SAFETY: the caller's promise.
            unsafe { receive(fd, &mut entry.msg_hdr, flags & !MSG_WAITFORONE) }
        };
        // SAFETY: the caller's promise.
        match unsafe { at_entry(messages.wrapping_add(done), receive) } {
            Ok(()) => {}
            Err(refusal) if done == 0 => return Err(refusal),
            Err(_) => return Ok(done as c_int),
        }
        if flags & MSG_WAITFORONE != 0 {
            flags |= MSG_DONTWAIT;
        }
        if timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
            return Ok(done as c_int + 1);
        }
    }
    Ok(count as c_int)
}

/// Sends one message.
///
/// # Safety
/// `message` is null or a valid `msghdr`.
pub(crate) unsafe fn send(fd: c_int, message: *const msghdr, flags: c_int) -> Outcome<isize> {
    readable(message, 1)?;
    // SAFETY: the caller's promise.
    let message = unsafe { &*message };
    check(message)?;
    let control = control::load(message)?;
    let to = address::to_send(message.msg_name.cast_const().cast(), message.msg_namelen)?;
    let give = |slices: &[IoSlice]| posix::send_message(fd, slices, to, flags, &control);
    // SAFETY: a valid msghdr describes valid buffers.
    let sent = unsafe { buffers::with_gathered(message.msg_iov, message.msg_iovlen, give)? };
    Ok(sent as isize)
}

/// Sends messages until one fails. The error is returned only if it is the first.
///
/// # Safety
/// `messages` is null or an array of `count` valid entries.
pub(crate) unsafe fn send_many(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
) -> Outcome<c_int> {
    let count = (count as usize).min(MAXIMUM_MESSAGES);
    for done in 0..count {
        // SAFETY: the caller's promise.
        let send = |entry: &mut mmsghdr| unsafe { send(fd, &entry.msg_hdr, flags) };
        // SAFETY: the caller's promise.
        match unsafe { at_entry(messages.wrapping_add(done), send) } {
            Ok(()) => {}
            Err(refusal) if done == 0 => return Err(refusal),
            Err(_) => return Ok(done as c_int),
        }
    }
    Ok(count as c_int)
}

/// Transfers the message of one entry, and stores its length.
///
/// # Safety
/// `entry` is valid if it can be written.
unsafe fn at_entry(
    entry: *mut mmsghdr,
    act: impl FnOnce(&mut mmsghdr) -> Outcome<isize>,
) -> Outcome<()> {
    writable(entry, 1)?;
    // SAFETY: the caller's promise.
    let entry = unsafe { &mut *entry };
    entry.msg_len = act(entry)? as u32;
    Ok(())
}

fn check(message: &msghdr) -> Result<(), Errno> {
    if message.msg_iovlen > MAXIMUM_PIECES {
        return Err(Errno::MSGSIZE);
    }
    if !message.msg_name.is_null() && message.msg_namelen > i32::MAX as socklen_t {
        return Err(Errno::INVAL);
    }
    Ok(())
}

fn store_name(message: &mut msghdr, received: &Received) -> Result<(), Errno> {
    let name: *mut sockaddr = message.msg_name.cast();
    address::store_if_wanted(received.from, name, &mut message.msg_namelen)
}
