//! Alternative names that libc still exports for old binaries.

use std::ffi::{c_char, c_void};

use libc::{FILE, c_int, fd_set, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t, timeval};

use crate::{descriptors, io, multiplex, process, socket};

interpose! {
    /// `int __close(int)`
    fn __close(fd: c_int) -> c_int {
        Ok(descriptors::close(fd))
    }

    /// `int __connect(int, const struct sockaddr *, socklen_t)`
    fn __connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
        Ok(socket::connect(fd, address, length))
    }

    /// `int __dup2(int, int)`
    fn __dup2(fd: c_int, onto: c_int) -> c_int {
        Ok(descriptors::dup2(fd, onto))
    }

    /// `int __fcntl(int, int, ...)`
    fn __fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
        Ok(descriptors::fcntl(fd, command, argument))
    }

    /// `int __poll(struct pollfd *, nfds_t, int)`
    fn __poll(entries: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
        Ok(multiplex::poll(entries, count, timeout))
    }

    /// `ssize_t __read(int, void *, size_t)`
    fn __read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
        Ok(io::read(fd, buffer, length))
    }

    /// `int __select(int, fd_set *, fd_set *, fd_set *, struct timeval *)`
    fn __select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval,
    ) -> c_int {
        Ok(multiplex::select(count, read, write, except, timeout))
    }

    /// `ssize_t __send(int, const void *, size_t, int)`
    fn __send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
        Ok(io::send(fd, buffer, length, flags))
    }

    /// `ssize_t __write(int, const void *, size_t)`
    fn __write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
        Ok(io::write(fd, buffer, length))
    }

    /// `FILE *_IO_popen(const char *, const char *)`
    fn _IO_popen(command: *const c_char, kind: *const c_char) -> *mut FILE {
        Ok(process::popen(command, kind))
    }
}
