//! Threads that are cancelled.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use libc::pthread_t;

use super::Fd;

unsafe extern "C" {
    fn pthread_cancel(thread: pthread_t) -> c_int;
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

// A cancelled thread is unwound: what it runs holds nothing to drop.
unsafe extern "C-unwind" {
    fn recv(fd: Fd, buffer: *mut c_void, length: usize, flags: c_int) -> isize;
    fn send(fd: Fd, buffer: *const c_void, length: usize, flags: c_int) -> isize;
    fn accept(fd: Fd, address: *mut c_void, length: *mut c_void) -> Fd;
    fn poll(entries: *mut libc::pollfd, count: u64, milliseconds: c_int) -> c_int;
    fn epoll_wait(set: Fd, events: *mut libc::epoll_event, room: c_int, wait: c_int) -> c_int;
    fn select(
        count: c_int,
        read: *mut libc::fd_set,
        write: *mut libc::fd_set,
        except: *mut libc::fd_set,
        time: *mut libc::timeval,
    ) -> c_int;
    fn syscall(number: libc::c_long, ...) -> libc::c_long;
    fn pthread_testcancel();
}

type Body = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// What a cancelled thread is found in.
pub const WAITS: [(&str, Body); 6] = [
    ("recv", in_recv),
    ("send", in_send),
    ("accept", in_accept),
    ("poll", in_poll),
    ("select", in_select),
    ("epoll_wait", in_epoll),
];

fn fd_of(argument: *mut c_void) -> Fd {
    argument.addr() as Fd
}

unsafe extern "C-unwind" fn in_recv(argument: *mut c_void) -> *mut c_void {
    let mut room = [0_u8; 4];
    // SAFETY: the room is live.
    unsafe { recv(fd_of(argument), room.as_mut_ptr().cast(), 4, 0) };
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_send(argument: *mut c_void) -> *mut c_void {
    static BYTES: [u8; 1 << 16] = [0; 1 << 16];
    // SAFETY: the bytes are static.
    unsafe { while send(fd_of(argument), BYTES.as_ptr().cast(), BYTES.len(), 0) > 0 {} }
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_accept(argument: *mut c_void) -> *mut c_void {
    // SAFETY: no address is wanted.
    unsafe { accept(fd_of(argument), ptr::null_mut(), ptr::null_mut()) };
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_poll(argument: *mut c_void) -> *mut c_void {
    let mut entry = libc::pollfd {
        fd: fd_of(argument),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the entry is live.
    unsafe { poll(&mut entry, 1, -1) };
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_select(argument: *mut c_void) -> *mut c_void {
    let fd = fd_of(argument);
    let mut read = [0_u64; 16];
    read[fd as usize / 64] = 1 << (fd % 64);
    let none = ptr::null_mut();
    // SAFETY: the set has as many bits as an `fd_set`.
    unsafe {
        select(
            fd + 1,
            read.as_mut_ptr().cast(),
            none,
            none,
            ptr::null_mut(),
        )
    };
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_epoll(argument: *mut c_void) -> *mut c_void {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: integers and a live event.
    unsafe {
        let set = libc::epoll_create1(0);
        event.events = libc::EPOLLIN as u32;
        libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd_of(argument), &mut event);
        epoll_wait(set, &mut event, 1, -1);
    }
    ptr::null_mut()
}

/// In a call that ends no threads.
///
/// # Safety
/// For [`start`].
pub unsafe extern "C-unwind" fn by_number(argument: *mut c_void) -> *mut c_void {
    let mut room = [0_u8; 4];
    // SAFETY: the room is live.
    unsafe { syscall(libc::SYS_read, fd_of(argument), room.as_mut_ptr(), 4_usize) };
    ptr::null_mut()
}

/// Receives although it is cancelled, then lets itself be. What came is for [`last_received`].
///
/// # Safety
/// For [`start`].
pub unsafe extern "C-unwind" fn unwilling(argument: *mut c_void) -> *mut c_void {
    const DISABLE: c_int = 1;
    const ENABLE: c_int = 0;
    let mut room = [0_u8; 1];
    let mut before = 0;
    // SAFETY: all is live.
    unsafe {
        pthread_setcancelstate(DISABLE, &mut before);
        recv(fd_of(argument), room.as_mut_ptr().cast(), 1, 0);
        LAST.store(room[0].into(), Ordering::Relaxed);
        pthread_setcancelstate(ENABLE, &mut before);
        pthread_testcancel();
    }
    ptr::null_mut()
}

static LAST: AtomicI32 = AtomicI32::new(-1);

/// What [`unwilling`] has received.
pub fn last_received() -> i32 {
    LAST.load(Ordering::Relaxed)
}

/// A thread that runs `body` on a descriptor.
pub fn start(body: Body, fd: Fd) -> pthread_t {
    let mut id = 0;
    // SAFETY: the body's calling convention is C's, but that it may be unwound, as libc expects.
    unsafe {
        let body: extern "C" fn(*mut c_void) -> *mut c_void = transmute(body);
        libc::pthread_create(
            &mut id,
            ptr::null(),
            body,
            ptr::without_provenance_mut(fd as usize),
        );
    }
    id
}

pub fn cancel(thread: pthread_t) {
    // SAFETY: a thread that was not joined.
    unsafe { pthread_cancel(thread) };
}

/// How the thread ended, if it does within a moment.
pub fn end_of(id: pthread_t) -> &'static str {
    for _ in 0..30 {
        let mut result = ptr::null_mut();
        // SAFETY: a thread that was not joined.
        match unsafe { libc::pthread_tryjoin_np(id, &mut result) } {
            0 if result.addr() == usize::MAX => return "cancelled",
            0 => return "returned",
            _ => thread::sleep(Duration::from_millis(10)),
        }
    }
    "goes on"
}
