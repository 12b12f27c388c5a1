//! The common part of all sockets of [`crate::net`]: a descriptor, and the standard library's type
//! on the same descriptor, which performs the calls that are left to the kernel.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::time::Duration;

use portolan_sys::{descriptor, process};
use rustix::io::Errno;

use crate::posix::{self, CallError, Outcome};

/// A socket. `S` is the standard library's type.
#[derive(Debug)]
pub(super) struct Handle<S: AsRawFd + IntoRawFd>(Option<S>);

impl<S: AsFd + AsRawFd + IntoRawFd + From<OwnedFd>> Handle<S> {
    /// Opens a socket for `address`: one of Portolan's, or else the kernel's.
    pub(super) fn open(address: SocketAddr, kind: i32) -> io::Result<Handle<S>> {
        let domain = match address {
            SocketAddr::V4(_) => libc::AF_INET,
            SocketAddr::V6(_) => libc::AF_INET6,
        };
        Handle::open_in(domain, kind)
    }

    /// As [`Handle::open`], for an address family.
    pub(super) fn open_in(domain: i32, kind: i32) -> io::Result<Handle<S>> {
        join_forks();
        let kind = kind | libc::SOCK_CLOEXEC;
        let fd = {
            let _inside = posix::enter();
            posix::socket(domain, kind, 0)
        };
        match fd {
            Ok(fd) => Handle::of_number(fd),
            Err(CallError::Errno(errno)) => Err(errno.into()),
            Err(CallError::NotOurs | CallError::Moved) => {
                let fd = descriptor::kernel_socket(domain, kind, 0)?;
                Ok(Handle(Some(S::from(fd))))
            }
        }
    }

    /// Takes ownership of a descriptor that the library has opened.
    pub(super) fn of_number(fd: RawFd) -> io::Result<Handle<S>> {
        Ok(Handle(Some(S::from(descriptor::own(fd)?))))
    }

    /// Takes ownership of a kernel socket.
    pub(super) fn of_kernel(fd: OwnedFd) -> Handle<S> {
        Handle(Some(S::from(fd)))
    }

    /// The standard library's socket on the descriptor.
    pub(super) fn std(&self) -> &S {
        self.0.as_ref().expect("there until it is dropped")
    }

    pub(super) fn number(&self) -> RawFd {
        self.std().as_raw_fd()
    }

    /// Makes a call through the library. Returns `None` if the kernel has to make it.
    pub(super) fn ours<T>(&self, call: impl FnOnce(RawFd) -> Outcome<T>) -> io::Result<Option<T>> {
        let _inside = posix::enter();
        match call(self.number()) {
            Ok(value) => Ok(Some(value)),
            Err(CallError::NotOurs) => Ok(None),
            Err(error) => Err(error.errno_or(Errno::OPNOTSUPP).into()),
        }
    }

    /// Makes a call through the library, or else through the kernel.
    pub(super) fn call<T>(
        &self,
        ours: impl FnOnce(RawFd) -> Outcome<T>,
        kernels: impl FnOnce(&S) -> io::Result<T>,
    ) -> io::Result<T> {
        match self.ours(ours)? {
            Some(value) => Ok(value),
            None => kernels(self.std()),
        }
    }

    pub(super) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        self.call(
            |fd| posix::bind(fd, address),
            |std| Ok(rustix::net::bind(std, &address)?),
        )
    }

    pub(super) fn connect(&self, address: SocketAddr) -> io::Result<()> {
        self.call(
            |fd| posix::connect(fd, Some(address)),
            |std| Ok(rustix::net::connect(std, &address)?),
        )
    }

    pub(super) fn duplicate(&self) -> io::Result<Handle<S>> {
        match self.ours(|fd| posix::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0))? {
            Some(fd) => Handle::of_number(fd),
            None => Ok(Handle(Some(S::from(self.as_fd().try_clone_to_owned()?)))),
        }
    }

    pub(super) fn set_nonblocking(&self, is_on: bool) -> io::Result<()> {
        let flags = if is_on { libc::O_NONBLOCK } else { 0 } as usize;
        match self.ours(|fd| posix::fcntl(fd, libc::F_SETFL, flags))? {
            Some(_) => Ok(()),
            None => Ok(descriptor::set_nonblocking(self.as_fd(), is_on)?),
        }
    }

    pub(super) fn take_error(&self) -> io::Result<Option<io::Error>> {
        let errno = self.number_option(libc::SOL_SOCKET, libc::SO_ERROR)?;
        Ok((errno != 0).then(|| io::Error::from_raw_os_error(errno)))
    }

    /// Returns an option of type `int`.
    pub(super) fn number_option(&self, level: i32, name: i32) -> io::Result<i32> {
        let mut bytes = [0; 4];
        self.option(level, name, &mut bytes)?;
        Ok(i32::from_ne_bytes(bytes))
    }

    pub(super) fn set_number(&self, level: i32, name: i32, value: i32) -> io::Result<()> {
        self.set_option(level, name, &value.to_ne_bytes())
    }

    /// Returns an option of type `timeval`; `None` if it is not set.
    pub(super) fn time_option(&self, name: i32) -> io::Result<Option<Duration>> {
        let mut bytes = [0; 16];
        self.option(libc::SOL_SOCKET, name, &mut bytes)?;
        let [seconds, microseconds] = [0, 8].map(|at| {
            let part = bytes[at..at + 8].try_into().unwrap_or_default();
            u64::try_from(i64::from_ne_bytes(part)).unwrap_or(0)
        });
        let time = Duration::from_secs(seconds) + Duration::from_micros(microseconds);
        Ok((!time.is_zero()).then_some(time))
    }

    /// Sets a time-out option. As in `std::net`, zero is refused; less than a microsecond is rounded up to one.
    pub(super) fn set_time(&self, name: i32, time: Option<Duration>) -> io::Result<()> {
        if time.is_some_and(|time| time.is_zero()) {
            return Err(Errno::INVAL.into());
        }
        let time = time.map_or(Duration::ZERO, |time| time.max(Duration::from_micros(1)));
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let parts = [seconds, i64::from(time.subsec_micros())];
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_ne_bytes()).collect();
        self.set_option(libc::SOL_SOCKET, name, &bytes)
    }

    /// Returns `SO_LINGER`; `None` if it is off.
    pub(super) fn linger(&self) -> io::Result<Option<Duration>> {
        let mut bytes = [0; 8];
        self.option(libc::SOL_SOCKET, libc::SO_LINGER, &mut bytes)?;
        let [is_on, seconds] = [0, 4].map(|at| {
            let part = bytes[at..at + 4].try_into().unwrap_or_default();
            i32::from_ne_bytes(part)
        });
        let seconds = u64::try_from(seconds).unwrap_or(0);
        Ok((is_on != 0).then_some(Duration::from_secs(seconds)))
    }

    pub(super) fn set_linger(&self, time: Option<Duration>) -> io::Result<()> {
        let seconds = time.map_or(0, |time| i32::try_from(time.as_secs()).unwrap_or(i32::MAX));
        let parts = [i32::from(time.is_some()), seconds];
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_ne_bytes()).collect();
        self.set_option(libc::SOL_SOCKET, libc::SO_LINGER, &bytes)
    }

    /// Returns `SO_BINDTODEVICE`; `None` if the socket is not bound to a device.
    pub(super) fn device(&self) -> io::Result<Option<Vec<u8>>> {
        let mut name = [0; libc::IFNAMSIZ];
        self.option(libc::SOL_SOCKET, libc::SO_BINDTODEVICE, &mut name)?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok((!name.is_empty()).then(|| name.to_vec()))
    }

    pub(super) fn bind_device(&self, name: Option<&[u8]>) -> io::Result<()> {
        let name = name.unwrap_or_default();
        self.set_option(libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name)
    }

    /// Sets an option that is a group and an interface of it.
    pub(super) fn set_membership<const G: usize>(
        &self,
        (level, name): (i32, i32),
        group: [u8; G],
        interface: [u8; 4],
    ) -> io::Result<()> {
        self.set_option(level, name, &[&group[..], &interface].concat())
    }

    /// Turns the socket into one of another type of the standard library.
    #[cfg(feature = "tokio")]
    pub(super) fn convert<T>(mut self) -> Handle<T>
    where
        S: Into<OwnedFd>,
        T: AsRawFd + IntoRawFd + From<OwnedFd>,
    {
        Handle(self.0.take().map(|socket| T::from(socket.into())))
    }

    fn option(&self, level: i32, name: i32, value: &mut [u8]) -> io::Result<()> {
        match self.ours(|fd| posix::get_option(fd, level, name, value))? {
            Some(_) => Ok(()),
            None => Ok(descriptor::socket_option(self.as_fd(), level, name, value)?),
        }
    }

    fn set_option(&self, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
        self.call(
            |fd| posix::set_option(fd, level, name, value),
            |std| Ok(descriptor::set_socket_option(std, level, name, value)?),
        )
    }
}

impl<S: AsRawFd + IntoRawFd + AsFd> AsFd for Handle<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("there until it is dropped").as_fd()
    }
}

impl<S: AsRawFd + IntoRawFd> Drop for Handle<S> {
    fn drop(&mut self) {
        let Some(socket) = self.0.take() else {
            return;
        };
        let _inside = posix::enter();
        match posix::close(socket.as_raw_fd()) {
            // A kernel socket: dropping it closes it.
            Err(CallError::NotOurs) => drop(socket),
            Ok(()) | Err(_) => {
                let _ = socket.into_raw_fd();
            }
        }
    }
}

/// Makes a call with each address in turn until one succeeds; fails as the last one.
pub(super) fn with_first<T>(
    addresses: impl IntoIterator<Item = SocketAddr>,
    mut call: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = None;
    for address in addresses {
        match call(address) {
            Ok(made) => return Ok(made),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(no_address))
}

pub(super) fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "there is no address")
}

/// Registers the library's handlers for `fork` and `exit`, as the preload library does.
fn join_forks() {
    static JOINED: Once = Once::new();
    JOINED.call_once(|| {
        process::at_fork(process::ForkHandlers {
            before: || {
                posix::before_fork();
                posix::freeze();
            },
            in_parent: posix::after_fork_in_parent,
            in_child: posix::after_fork_in_child,
        });
        process::at_exit(posix::before_exit);
    });
}
