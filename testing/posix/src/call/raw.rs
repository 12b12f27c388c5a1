//! Calls with invalid pointers, and memory for them.

use std::{
    ffi::c_void,
    mem::zeroed,
    process, ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use libc::{c_int, epoll_event, fd_set, iovec, mmsghdr, msghdr, pollfd, sigset_t, sockaddr};

use super::{Answer, Fd, Raw, answered, number};

const PAGE: usize = 4096;

/// A page that can be accessed, followed by one that cannot be accessed in a given way.
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
        // SAFETY: this is new memory, which stays mapped until the program ends.
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

    /// Returns the first byte of the second page.
    pub fn bad(&self) -> *mut c_void {
        self.last(0)
    }

    /// Returns a pointer to the last bytes of the first page.
    pub fn last(&self, bytes: usize) -> *mut c_void {
        self.start.wrapping_add(PAGE - bytes).cast()
    }

    /// Writes a value at the end of the first page.
    pub fn put<T: Copy>(&self, value: T) -> *mut T {
        let place = self.last(size_of::<T>()).cast::<T>();
        // SAFETY: the value is inside the first page.
        unsafe { place.write_unaligned(value) };
        place
    }
}

macro_rules! raw_calls {
    ($($name:ident = $call:ident($($argument:ident: $type:ty),*);)*) => { $(
        pub fn $name($($argument: $type),*) -> Answer<usize> {
            // SAFETY: callers pass pointers that are valid, or that the kernel must refuse.
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

/// Calls ppoll for one descriptor, without a time-out.
pub fn ppoll_raw(fd: Fd, mask: *const sigset_t) -> Answer<usize> {
    let mut entry = pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: there is one entry; the kernel must refuse the mask.
    answered(unsafe { libc::ppoll(&mut entry, 1, ptr::null(), mask) })
}

/// Calls select for writing, without a time-out.
pub fn select_raw(count: c_int, set: *mut fd_set) -> Answer<usize> {
    let none = ptr::null_mut();
    // SAFETY: the kernel must refuse the set.
    answered(unsafe { libc::select(count, none, set, none, none.cast()) })
}

pub fn sendto_raw(
    fd: Fd,
    buffer: *const c_void,
    length: usize,
    to: std::net::SocketAddr,
) -> Answer<usize> {
    let raw = Raw::from(to);
    // SAFETY: `raw` is an address; the buffer is valid, or the kernel must refuse it.
    answered(unsafe { libc::sendto(fd, buffer, length, 0, raw.pointer(), raw.length) })
}

pub fn piece(base: *mut c_void, length: usize) -> iovec {
    iovec {
        iov_base: base,
        iov_len: length,
    }
}

/// Returns a message of these pieces, with control messages at a given address.
pub fn message(pieces: &mut [iovec], control: *mut c_void, length: usize) -> msghdr {
    // SAFETY: a msghdr of zeros is valid.
    let mut header: msghdr = unsafe { zeroed() };
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len() as _;
    header.msg_control = control;
    header.msg_controllen = length as _;
    header
}

/// Runs `act` in a child of this process, and returns how the child ends.
pub fn child(act: impl FnOnce()) -> String {
    // SAFETY: the child only runs `act` and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        act();
        // SAFETY: exits at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the process is our own child.
    match number(unsafe { libc::waitpid(child, &mut status, 0) }) {
        Err(errno) => errno.to_string(),
        Ok(_) if libc::WIFSIGNALED(status) => format!("signal {}", libc::WTERMSIG(status)),
        Ok(_) => format!("exit {}", libc::WEXITSTATUS(status)),
    }
}

/// Reads through an invalid pointer.
pub fn fault(bad: *const c_void) {
    // SAFETY: the read must fault.
    unsafe { bad.cast::<u8>().read_volatile() };
}

static EXPECTED: AtomicUsize = AtomicUsize::new(0);

/// Exits with 42 if the fault is at the expected address, else with 43.
extern "C" fn end(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: `info` is the kernel's; _exit is async-signal-safe.
    unsafe {
        let at = (*info).si_addr().addr();
        let is_right = at == EXPECTED.load(Ordering::Relaxed);
        libc::_exit(if is_right { 42 } else { 43 });
    }
}

/// Installs a SIGSEGV handler that exits, and expects the fault at `bad`.
pub fn handle_faults(bad: *const c_void, flags: c_int) {
    EXPECTED.store(bad.addr(), Ordering::Relaxed);
    // SAFETY: a sigaction of zeros is valid; the handler has the signature for SA_SIGINFO.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        let function: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = end;
        action.sa_sigaction = function as usize;
        action.sa_flags = libc::SA_SIGINFO | flags;
        libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut());
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}

/// Returns the action of SIGSEGV as sigaction reports it.
pub fn fault_action() -> &'static str {
    // SAFETY: a sigaction of zeros is valid, and is only written.
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

/// Calls signal(2) and returns the previous action.
pub fn set_fault_action(to: libc::sighandler_t) -> libc::sighandler_t {
    // SAFETY: SIG_DFL and SIG_IGN are not functions.
    unsafe { libc::signal(libc::SIGSEGV, to) }
}

/// Sets an alternate signal stack, and overflows the thread's own stack.
pub fn overflow() {
    // SAFETY: the memory is never freed.
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
    // SAFETY: sends a signal to this process.
    unsafe { libc::kill(libc::getpid(), signal) };
}
