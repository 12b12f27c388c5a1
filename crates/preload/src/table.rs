//! Every symbol that touches a socket: translated here, or passed on and why. Nothing else knows the whole list.
//!
//! A row of the first list without a definition is a compiler warning, a definition without a row does not compile.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

macro_rules! translated {
    ($($name:ident)*) => {
        /// A symbol that this library defines in libc's place.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub enum Symbol { $($name),* }

        impl Symbol {
            pub const NAMES: &[&CStr] = &[$(
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a symbol's name has no NUL inside"),
                }
            ),*];
        }
    };
}

translated! {
    socket bind connect listen accept accept4 shutdown
    getsockname getpeername getsockopt setsockopt
    read __read_chk readv preadv2 preadv64v2
    recv __recv_chk recvfrom __recvfrom_chk recvmsg recvmmsg
    write writev pwritev2 pwritev64v2
    send sendto sendmsg sendmmsg
    sendfile sendfile64 splice
    select pselect poll __poll_chk ppoll __ppoll_chk
    epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    close close_range closefrom dup dup2 dup3 fcntl fcntl64 ioctl pidfd_getfd
    execve execv execvp execvpe fexecve execveat
    posix_spawn posix_spawnp system popen daemon _exit _Exit
    syscall
}

/// Symbols that meet sockets and are left to libc, each with its reason.
#[cfg(test)]
pub const PASSED_ON: &[(&str, &str)] = &[
    ("socketpair", "AF_UNIX only; TCP and UDP have no pairs"),
    (
        "fork",
        "pthread_atfork handlers do what is needed; forkpty() runs them too",
    ),
    (
        "vfork",
        "the child shares this memory and may only exec; a wrapper's frame would be overwritten",
    ),
    (
        "fstat",
        "a descriptor is an AF_UNIX socket: S_IFSOCK already",
    ),
    ("isatty", "ENOTTY for any socket"),
    ("lseek", "ESPIPE for any socket"),
    ("pread", "ESPIPE for any socket"),
    ("pwrite", "ESPIPE for any socket"),
    ("preadv", "ESPIPE for any socket"),
    ("pwritev", "ESPIPE for any socket"),
    ("mmap", "ENODEV for any socket"),
    ("tee", "pipes only"),
    ("vmsplice", "pipes only"),
    ("copy_file_range", "EINVAL for any socket"),
    (
        "fdopen",
        "libc reads and writes its streams by internal calls that no symbol reaches",
    ),
    (
        "getaddrinfo",
        "libc's resolver uses internal calls: its sockets are the kernel's",
    ),
    (
        "sigaction",
        "handlers run as they do around any call; EINTR is answered by the library's own waits",
    ),
    ("setrlimit", "descriptor numbers are the kernel's own"),
    (
        "pthread_cancel",
        "libc's own symbol serves every descriptor that is not ours",
    ),
    ("signalfd", "a kernel descriptor like any other"),
    ("timerfd_create", "a kernel descriptor like any other"),
    ("eventfd", "a kernel descriptor like any other"),
];

static NEXT: [AtomicPtr<c_void>; Symbol::NAMES.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; Symbol::NAMES.len()];

/// The definition of `symbol` that follows ours, null if there is none. Looked up once.
pub fn next(symbol: Symbol) -> *mut c_void {
    let known = NEXT[symbol as usize].load(Ordering::Relaxed);
    if known.is_null() {
        look_up(symbol as usize)
    } else {
        known
    }
}

/// Looks every symbol up, so that no signal handler or child of fork has to.
pub fn look_all_up() {
    for index in 0..Symbol::NAMES.len() {
        look_up(index);
    }
}

#[cold]
fn look_up(index: usize) -> *mut c_void {
    // SAFETY: the name is a C string; dlsym has no other precondition.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, Symbol::NAMES[index].as_ptr()) };
    NEXT[index].store(found, Ordering::Relaxed);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_either_translated_or_passed_on_with_a_reason() {
        for (name, reason) in PASSED_ON {
            assert!(!reason.is_empty(), "{name}");
            assert!(
                Symbol::NAMES
                    .iter()
                    .all(|translated| translated.to_str() != Ok(name)),
                "{name}"
            );
        }
    }

    #[test]
    fn libc_has_every_translated_symbol() {
        for (index, name) in Symbol::NAMES.iter().enumerate() {
            assert!(!look_up(index).is_null(), "{name:?}");
        }
    }
}
