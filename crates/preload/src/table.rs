//! The symbols that this library defines in libc's place, and their next definitions. `docs/reference/symbols.md` lists
//! them, and those that are passed on, with the reason; `tests/exports.rs` checks it against the built library.
//!
//! A row of the list without a definition is a compiler warning; a definition without a row does not compile.

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
        pub(crate) enum Symbol { $($name),* }

        impl Symbol {
            pub(crate) const NAMES: &[&CStr] = &[$(
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
    getsockname getpeername getsockopt setsockopt sockatmark bindresvport
    read __read_chk readv preadv2 preadv64v2
    recv __recv_chk recvfrom __recvfrom_chk recvmsg recvmmsg
    write writev pwritev2 pwritev64v2
    send sendto sendmsg sendmmsg
    sendfile sendfile64 splice
    select pselect poll __poll_chk ppoll __ppoll_chk
    epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    fdopen _IO_fdopen vdprintf __vdprintf_chk
    aio_read aio_read64 aio_write aio_write64 lio_listio lio_listio64
    close close_range closefrom dup dup2 dup3 fcntl fcntl64 ioctl pidfd_getfd
    execve execv execvp execvpe fexecve execveat
    posix_spawn posix_spawnp system popen
    daemon _exit _Exit
    chroot prctl
    unshare setns clone capset
    sigaction __sigaction signal bsd_signal ssignal sysv_signal __sysv_signal sigset
    syscall _Fork pthread_cancel
    __close __connect __dup2 __fcntl __poll __read __select __send __write _IO_popen
}

static NEXT: [AtomicPtr<c_void>; Symbol::NAMES.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; Symbol::NAMES.len()];

/// Returns the next definition of `symbol`, null if there is none. Looked up once.
pub(crate) fn next(symbol: Symbol) -> *mut c_void {
    let known = NEXT[symbol as usize].load(Ordering::Relaxed);
    if known.is_null() {
        look_up(symbol as usize)
    } else {
        known
    }
}

/// Looks up all symbols, so that no signal handler or child of fork has to.
pub(crate) fn look_all_up() {
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
    fn libc_has_every_translated_symbol() {
        for (index, name) in Symbol::NAMES.iter().enumerate() {
            assert!(!look_up(index).is_null(), "{name:?}");
        }
    }
}
