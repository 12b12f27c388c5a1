//! Calls with pointers that lead nowhere, and memory for them.

use std::{
    ffi::c_void,
    mem::zeroed,
    process, ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use libc::{c_int, epoll_event, fd_set, iovec, mmsghdr, msghdr, pollfd, sigset_t, sockaddr};

use super::{Answer, Fd, Raw, answered, number};

const PAGE: usize = 4096;

/// A page that can be used, and one behind it that cannot be used so.
pub struct Edge {
    start: *mut u8,
}

impl Edge {
    pub fn to_none() -> Edge {
        Edge::before(libc::PROT_NONE)
    }

    pub fn to_read_only() -> Edge {
        Edge::before(libc::PROT_READ)
    }

    fn before(protection: c_int) -> Edge {
        // SAFETY: new memory, which stays mapped until the program ends.
        let start = unsafe {
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(ptr::null_mut(), 2 * PAGE, both, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED, "mmap");
            libc::mprotect(start.byte_add(PAGE), PAGE, protection);
            start.cast::<u8>()
        };
        Edge { start }
    }

    /// The first byte of the second page.
    pub fn bad(&self) -> *mut c_void {
        self.last(0)
    }

    /// The last bytes of the first page.
    pub fn last(&self, bytes: usize) -> *mut c_void {
        self.start.wrapping_add(PAGE - bytes).cast()
    }

    /// Puts something plain at the end of the first page.
    pub fn put<T: Copy>(&self, value: T) -> *mut T {
        let place = self.last(size_of::<T>()).cast::<T>();
        // SAFETY: it lies in the first page.
        unsafe { place.write_unaligned(value) };
        place
    }
}

macro_rules! raw_calls {
    ($($name:ident = $call:ident($($argument:ident: $type:ty),*);)*) => { $(
        pub fn $name($($argument: $type),*) -> Answer<usize> {
            // SAFETY: callers give pointers that are good or must be refused.
            answered(unsafe { libc::$call($($argument),*) } as i64)
        }
    )* };
}

raw_calls! {
    recv_raw = recv(fd: Fd, buffer: *mut c_void, length: usize, flags: c_int);
    send_raw = send(fd: Fd, buffer: *const c_void, length: usize, flags: c_int);
    readv_raw = readv(fd: Fd, pieces: *const iovec, count: c_int);
    writev_raw = writev(fd: Fd, pieces: *const iovec, count: c_int);
    recvmsg_raw = recvmsg(fd: Fd, message: *mut msghdr, flags: c_int);
    sendmsg_raw = sendmsg(fd: Fd, message: *const msghdr, flags: c_int);
    sendmmsg_raw = sendmmsg(fd: Fd, messages: *mut mmsghdr, count: u32, flags: c_int);
    poll_raw = poll(entries: *mut pollfd, count: libc::nfds_t, timeout: c_int);
    epoll_pwait_raw = epoll_pwait(
        set: Fd, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t
    );
    ioctl_raw = ioctl(fd: Fd, request: libc::c_ulong, argument: *mut c_void);
    accept_raw = accept(fd: Fd, address: *mut sockaddr, length: *mut libc::socklen_t);
}

/// ppoll of one descriptor, without an end.
pub fn ppoll_raw(fd: Fd, mask: *const sigset_t) -> Answer<usize> {
    let mut entry = pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one entry; the mask is to be refused.
    answered(unsafe { libc::ppoll(&mut entry, 1, ptr::null(), mask) })
}

/// select for writing, without an end.
pub fn select_raw(count: c_int, set: *mut fd_set) -> Answer<usize> {
    let none = ptr::null_mut();
    // SAFETY: the set is to be refused.
    answered(unsafe { libc::select(count, none, set, none, none.cast()) })
}

pub fn sendto_raw(
    fd: Fd,
    buffer: *const c_void,
    length: usize,
    to: std::net::SocketAddr,
) -> Answer<usize> {
    let raw = Raw::from(to);
    // SAFETY: `raw` is an address; the buffer is good or to be refused.
    answered(unsafe { libc::sendto(fd, buffer, length, 0, raw.pointer(), raw.length) })
}

pub fn piece(base: *mut c_void, length: usize) -> iovec {
    iovec {
        iov_base: base,
        iov_len: length,
    }
}

/// A message of these pieces, with control messages somewhere.
pub fn message(pieces: &mut [iovec], control: *mut c_void, length: usize) -> msghdr {
    // SAFETY: zeros are a msghdr.
    let mut header: msghdr = unsafe { zeroed() };
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len() as _;
    header.msg_control = control;
    header.msg_controllen = length as _;
    header
}

/// How a child of this process ends that does `act`.
pub fn child(act: impl FnOnce()) -> String {
    // SAFETY: the child only does `act`, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        act();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: one's own child.
    match number(unsafe { libc::waitpid(child, &mut status, 0) }) {
        Err(errno) => errno.to_string(),
        Ok(_) if libc::WIFSIGNALED(status) => format!("signal {}", libc::WTERMSIG(status)),
        Ok(_) => format!("exit {}", libc::WEXITSTATUS(status)),
    }
}

/// Reads through a pointer that leads nowhere.
pub fn fault(bad: *const c_void) {
    // SAFETY: it is to fault.
    unsafe { bad.cast::<u8>().read_volatile() };
}

static EXPECTED: AtomicUsize = AtomicUsize::new(0);

/// Ends the process with 42 if the fault is where it was expected, with 43 if not.
extern "C" fn end(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel's; _exit may be called here.
    unsafe {
        let at = (*info).si_addr().addr();
        let is_right = at == EXPECTED.load(Ordering::Relaxed);
        libc::_exit(if is_right { 42 } else { 43 });
    }
}

/// A handler of bad memory that ends the process, and that expects `bad`.
pub fn handle_faults(bad: *const c_void, flags: c_int) {
    EXPECTED.store(bad.addr(), Ordering::Relaxed);
    // SAFETY: zeros are a sigaction; the handler takes what SA_SIGINFO gives.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        let function: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = end;
        action.sa_sigaction = function as usize;
        action.sa_flags = libc::SA_SIGINFO | flags;
        libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut());
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}

/// Whether there is a handler of bad memory, as sigaction tells.
pub fn fault_action() -> &'static str {
    // SAFETY: zeros are a sigaction, which is only written.
    let action = unsafe {
        let mut action: libc::sigaction = zeroed();
        libc::sigaction(libc::SIGSEGV, ptr::null(), &mut action);
        action
    };
    let end: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = end;
    match action.sa_sigaction {
        libc::SIG_DFL => "default",
        libc::SIG_IGN => "ignored",
        handler if handler == end as usize => "ours",
        _ => "another",
    }
}

/// What signal(2) says there was before.
pub fn set_fault_action(to: libc::sighandler_t) -> libc::sighandler_t {
    // SAFETY: SIG_DFL and SIG_IGN are no functions.
    unsafe { libc::signal(libc::SIGSEGV, to) }
}

/// A stack for handlers, and one's own used up.
pub fn overflow() {
    // SAFETY: memory that is never given back.
    unsafe {
        let stack = libc::stack_t {
            ss_sp: Box::leak(vec![0_u8; 64 << 10].into_boxed_slice())
                .as_mut_ptr()
                .cast(),
            ss_flags: 0,
            ss_size: 64 << 10,
        };
        libc::sigaltstack(&stack, ptr::null_mut());
    }
    process::exit(deeper(0) as i32);
}

fn deeper(level: u64) -> u64 {
    let place = std::hint::black_box([level; 512]);
    if place[3] == u64::MAX {
        return 0;
    }
    deeper(place[7] + 1) + place[9]
}

pub fn kill_self(signal: c_int) {
    // SAFETY: a signal to oneself.
    unsafe { libc::kill(libc::getpid(), signal) };
}
