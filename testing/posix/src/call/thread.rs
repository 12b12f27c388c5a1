//! Cancellation of threads.

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

// A cancelled thread is unwound: its functions hold nothing to drop.
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

/// The calls in which a thread is cancelled.
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
    // SAFETY: the buffer is valid for the call.
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
    // SAFETY: no address is requested.
    unsafe { accept(fd_of(argument), ptr::null_mut(), ptr::null_mut()) };
    ptr::null_mut()
}

unsafe extern "C-unwind" fn in_poll(argument: *mut c_void) -> *mut c_void {
    let mut entry = libc::pollfd {
        fd: fd_of(argument),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the entry is valid for the call.
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
    // SAFETY: the arguments are integers and a valid event.
    unsafe {
        let set = libc::epoll_create1(0);
        event.events = libc::EPOLLIN as u32;
        libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd_of(argument), &mut event);
        epoll_wait(set, &mut event, 1, -1);
    }
    ptr::null_mut()
}

/// Blocks in a call that is no cancellation point.
///
/// # Safety
/// For [`start`].
pub unsafe extern "C-unwind" fn by_number(argument: *mut c_void) -> *mut c_void {
    let mut room = [0_u8; 4];
    // SAFETY: the buffer is valid for the call.
    unsafe { syscall(libc::SYS_read, fd_of(argument), room.as_mut_ptr(), 4_usize) };
    ptr::null_mut()
}

/// Receives with cancellation disabled, then enables it. [`last_received`] returns what was received.
///
/// # Safety
/// For [`start`].
pub unsafe extern "C-unwind" fn unwilling(argument: *mut c_void) -> *mut c_void {
    const DISABLE: c_int = 1;
    const ENABLE: c_int = 0;
    let mut room = [0_u8; 1];
    let mut before = 0;
    // SAFETY: all pointers are valid for the calls.
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

/// Returns the byte that [`unwilling`] has received.
pub fn last_received() -> i32 {
    LAST.load(Ordering::Relaxed)
}

/// Starts a thread that runs `body` on a descriptor.
pub fn start(body: Body, fd: Fd) -> pthread_t {
    let mut id = 0;
    // SAFETY: the body has C's calling convention, except that it may be unwound, as libc expects.
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
    // SAFETY: the thread has not been joined.
    unsafe { pthread_cancel(thread) };
}

/// Returns how the thread ended, if it ends within 0.3 seconds.
pub fn end_of(id: pthread_t) -> &'static str {
    for _ in 0..30 {
        let mut result = ptr::null_mut();
        // SAFETY: the thread has not been joined.
        match unsafe { libc::pthread_tryjoin_np(id, &mut result) } {
            0 if result.addr() == usize::MAX => return "cancelled",
            0 => return "returned",
            _ => thread::sleep(Duration::from_millis(10)),
        }
    }
    "goes on"
}
