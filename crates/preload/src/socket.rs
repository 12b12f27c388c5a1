//! The symbols that create, name and configure sockets.

use std::net::{Ipv4Addr, SocketAddr};

use libc::{c_int, c_void, sockaddr, sockaddr_in, socklen_t};
use portolan::posix;
use rustix::io::Errno;

use crate::{
    address,
    interpose::{CallError, Outcome, done, ours},
    memory,
};

/// No option of TCP, UDP, IP or the socket level is longer than this.
const LONGEST_OPTION: usize = 1024;

/// `asm-generic/sockios.h`
const SIOCATMARK: libc::c_ulong = 0x8905;

interpose! {
    /// `int socket(int, int, int)`
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        posix::socket(domain, kind, protocol)
    }

    /// `int bind(int, const struct sockaddr *, socklen_t)`
    fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
        ours(fd)?;
        done(posix::bind(fd, address::to_bind(address, length)?))
    }

    /// `int connect(int, const struct sockaddr *, socklen_t)`
    fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
        ours(fd)?;
        done(posix::connect(fd, address::to_connect(address, length)?))
    }

    /// `int listen(int, int)`
    fn listen(fd: c_int, backlog: c_int) -> c_int {
        ours(fd)?;
        done(posix::listen(fd, backlog))
    }

    /// `int bindresvport(int, struct sockaddr_in *)`
    ///
    /// libc's own makes an internal call.
    fn bindresvport(fd: c_int, address: *mut sockaddr_in) -> c_int {
        ours(fd)?;
        bind_reserved(fd, address.as_mut())
    }

    /// `int sockatmark(int)`
    ///
    /// libc's own makes an internal call.
    fn sockatmark(fd: c_int) -> c_int {
        ours(fd)?;
        let mut is_at_mark: c_int = 0;
        match crate::descriptors::ioctl(fd, SIOCATMARK, (&raw mut is_at_mark).cast()) {
            0 => Ok(is_at_mark),
            _ => Err(memory::last_error().into()),
        }
    }

    /// `int accept(int, struct sockaddr *, socklen_t *)`
    fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
        accept_one(fd, address, length, 0)
    }

    /// `int accept4(int, struct sockaddr *, socklen_t *, int)`
    fn accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int {
        accept_one(fd, address, length, flags)
    }

    /// `int shutdown(int, int)`
    fn shutdown(fd: c_int, how: c_int) -> c_int {
        ours(fd)?;
        done(posix::shutdown(fd, how))
    }

    /// `int getsockname(int, struct sockaddr *, socklen_t *)`
    fn getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
        ours(fd)?;
        address::store(posix::local_address(fd)?, address, length)?;
        Ok(0)
    }

    /// `int getpeername(int, struct sockaddr *, socklen_t *)`
    fn getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
        ours(fd)?;
        address::store(posix::peer_address(fd)?, address, length)?;
        Ok(0)
    }

    /// `int getsockopt(int, int, int, void *, socklen_t *)`
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int {
        ours(fd)?;
        let room = option_length(memory::read(length)?)?;
        let mut bytes = [0; LONGEST_OPTION];
        let written = posix::get_option(fd, level, name, &mut bytes[..room])?;
        memory::write(value.cast(), &bytes[..written])?;
        memory::write(length, &[written as socklen_t])?;
        Ok(0)
    }

    /// `int setsockopt(int, int, int, const void *, socklen_t)`
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int {
        ours(fd)?;
        let mut bytes = [0; LONGEST_OPTION];
        let bytes = &mut bytes[..option_length(length)?];
        memory::read_into(value.cast(), bytes)?;
        done(posix::set_option(fd, level, name, bytes))
    }
}

fn accept_one(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> Outcome<c_int> {
    ours(fd)?;
    address::check_room(address, length)?;
    let (accepted, peer) = posix::accept(fd, flags)?;
    match address::store_if_wanted(Some(peer), address, length) {
        Ok(()) => Ok(accepted),
        Err(errno) => {
            // The call fails in any case.
            let _ = posix::close(accepted);
            Err(errno.into())
        }
    }
}

/// Privileged ports, except those of well-known services.
const RESERVED: std::ops::Range<u16> = 600..1024;

/// Binds to a privileged port: the first free one, starting at an offset derived from the process ID.
fn bind_reserved(fd: c_int, address: Option<&mut sockaddr_in>) -> Outcome<c_int> {
    let ip = match &address {
        Some(address) if c_int::from(address.sin_family) != libc::AF_INET => {
            return Err(Errno::PFNOSUPPORT.into());
        }
        Some(address) => Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()),
        None => Ipv4Addr::UNSPECIFIED,
    };
    let count = RESERVED.len() as u16;
    let start = std::process::id() as u16 % count;
    for index in 0..count {
        let port = RESERVED.start + (start + index) % count;
        match posix::bind(fd, SocketAddr::new(ip.into(), port)) {
            Err(CallError::Errno(Errno::ADDRINUSE)) => {}
            refused @ Err(_) => return refused.map(|()| 0),
            Ok(()) => {
                if let Some(address) = address {
                    address.sin_port = port.to_be();
                }
                return Ok(0);
            }
        }
    }
    Err(Errno::ADDRINUSE.into())
}

/// Limits the length of an option; a negative length is invalid.
fn option_length(length: socklen_t) -> Result<usize, Errno> {
    match i32::try_from(length) {
        Ok(length) => Ok((length as usize).min(LONGEST_OPTION)),
        Err(_) => Err(Errno::INVAL),
    }
}
