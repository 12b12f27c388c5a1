//! libc's calls as safe functions, with slices for buffers and `Result` for -1 and `errno`. The only unsafe code of the
//! checker.

mod address;
pub mod raw;
mod signal;
mod stdio;
pub mod thread;

use std::{
    ffi::c_void,
    mem::{size_of, size_of_val, zeroed},
    net::SocketAddr,
    ptr,
    time::Duration,
};

use libc::{c_int, epoll_event, iovec, msghdr, pollfd, sockaddr, socklen_t};

use address::{Raw, decoded};
pub use signal::{Counted, block, count_signals, ignore, kick, raise, this_thread, unblock};
pub use stdio::{
    Stream, in_background, is_at_mark, of_interface, open_stream, print, run_shell, splice,
    splice_from, splice_to,
};

pub const STREAM: i32 = libc::SOCK_STREAM;
pub const DATAGRAM: i32 = libc::SOCK_DGRAM;

pub type Fd = c_int;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

pub type Answer<T> = Result<T, Errno>;

/// Converts -1 to `errno`.
fn answered<T: TryInto<i64> + Copy>(result: T) -> Answer<usize> {
    match result
        .try_into()
        .ok()
        .and_then(|result| usize::try_from(result).ok())
    {
        Some(value) => Ok(value),
        None => Err(last_error()),
    }
}

fn number(result: c_int) -> Answer<c_int> {
    if result < 0 {
        Err(last_error())
    } else {
        Ok(result)
    }
}

fn last_error() -> Errno {
    // SAFETY: the pointer is to the calling thread's errno.
    Errno(unsafe { *libc::__errno_location() })
}

macro_rules! plain_calls {
    ($($(#[$note:meta])* $name:ident = $call:ident($($argument:ident: $type:ty),*);)*) => { $(
        $(#[$note])*
        pub fn $name($($argument: $type),*) -> Answer<c_int> {
            // SAFETY: the arguments are integers.
            number(unsafe { libc::$call($($argument),*) })
        }
    )* };
}

plain_calls! {
    socket = socket(domain: c_int, kind: c_int, protocol: c_int);
    listen = listen(fd: Fd, backlog: c_int);
    shutdown = shutdown(fd: Fd, how: c_int);
    close = close(fd: Fd);
    dup = dup(fd: Fd);
    dup2 = dup2(fd: Fd, onto: Fd);
    dup3 = dup3(fd: Fd, onto: Fd, flags: c_int);
    epoll_create = epoll_create1(flags: c_int);
    eventfd = eventfd(value: u32, flags: c_int);
    fcntl = fcntl(fd: Fd, command: c_int, argument: c_int);
}

pub fn bind(fd: Fd, address: SocketAddr) -> Answer<c_int> {
    let raw = Raw::from(address);
    // SAFETY: `raw` is an address of that length.
    number(unsafe { libc::bind(fd, raw.pointer(), raw.length) })
}

pub fn connect(fd: Fd, address: SocketAddr) -> Answer<c_int> {
    let raw = Raw::from(address);
    connect_raw(fd, raw.pointer(), raw.length)
}

/// Calls connect with AF_UNSPEC.
pub fn disconnect(fd: Fd) -> Answer<c_int> {
    // SAFETY: zeros are an address of the family AF_UNSPEC.
    let nowhere: sockaddr = unsafe { zeroed() };
    connect_raw(fd, &nowhere, size_of::<sockaddr>() as socklen_t)
}

/// Calls connect with any pointer and length, for calls that must be refused.
pub fn connect_raw(fd: Fd, address: *const sockaddr, length: socklen_t) -> Answer<c_int> {
    // SAFETY: callers pass valid addresses, or ones that the kernel must refuse.
    number(unsafe { libc::connect(fd, address, length) })
}

/// Calls connect with the first `length` bytes of an address.
pub fn connect_short(fd: Fd, address: SocketAddr, length: socklen_t) -> Answer<c_int> {
    let raw = Raw::from(address);
    connect_raw(fd, raw.pointer(), length.min(raw.length))
}

/// Calls connect with another family in the address.
pub fn connect_family(fd: Fd, address: SocketAddr, family: u16) -> Answer<c_int> {
    let mut raw = Raw::from(address);
    raw.set_family(family);
    connect_raw(fd, raw.pointer(), raw.length)
}

pub fn accept(fd: Fd, flags: c_int) -> Answer<(Fd, SocketAddr)> {
    let mut raw = Raw::empty();
    // SAFETY: `raw` has room for any address.
    let accepted = unsafe {
        match flags {
            0 => libc::accept(fd, raw.pointer_mut(), &mut raw.length),
            _ => libc::accept4(fd, raw.pointer_mut(), &mut raw.length, flags),
        }
    };
    Ok((number(accepted)?, decoded(&raw)))
}

/// Calls accept without requesting the address.
pub fn accept_quietly(fd: Fd) -> Answer<Fd> {
    // SAFETY: null means that no address is requested.
    number(unsafe { libc::accept(fd, ptr::null_mut(), ptr::null_mut()) })
}

pub fn local_address(fd: Fd) -> Answer<SocketAddr> {
    let mut raw = Raw::empty();
    // SAFETY: `raw` has room for any address.
    number(unsafe { libc::getsockname(fd, raw.pointer_mut(), &mut raw.length) })?;
    Ok(decoded(&raw))
}

pub fn peer_address(fd: Fd) -> Answer<SocketAddr> {
    let mut raw = Raw::empty();
    // SAFETY: `raw` has room for any address.
    number(unsafe { libc::getpeername(fd, raw.pointer_mut(), &mut raw.length) })?;
    Ok(decoded(&raw))
}

/// Calls getsockname with less room than the address needs. Returns the bytes written and the length reported.
pub fn local_address_cut(fd: Fd, room: usize) -> Answer<(usize, socklen_t)> {
    let mut place = [0xee_u8; 64];
    let mut length = room as socklen_t;
    // SAFETY: `place` is larger than the reported room.
    number(unsafe { libc::getsockname(fd, place.as_mut_ptr().cast(), &mut length) })?;
    Ok((
        place
            .iter()
            .rposition(|byte| *byte != 0xee)
            .map_or(0, |last| last + 1),
        length,
    ))
}

/// Calls getsockname with any pointers.
pub fn local_address_raw(fd: Fd, address: *mut sockaddr, length: *mut socklen_t) -> Answer<c_int> {
    // SAFETY: callers pass pointers that the kernel must refuse.
    number(unsafe { libc::getsockname(fd, address, length) })
}

/// Types of socket options.
pub trait Value: Copy {}
impl Value for c_int {}
impl Value for u8 {}
impl Value for libc::linger {}
impl Value for libc::timeval {}
impl Value for libc::tcp_info {}
impl<const N: usize> Value for [u8; N] {}

/// Returns an option's value and the length reported.
pub fn option<T: Value>(fd: Fd, level: c_int, name: c_int) -> Answer<(T, usize)> {
    // SAFETY: every option type is plain data, for which zeros are valid.
    let mut value: T = unsafe { zeroed() };
    let mut length = size_of::<T>() as socklen_t;
    // SAFETY: `value` has the length passed.
    number(unsafe {
        libc::getsockopt(
            fd,
            level,
            name,
            ptr::from_mut(&mut value).cast(),
            &mut length,
        )
    })?;
    Ok((value, length as usize))
}

pub fn flag(fd: Fd, level: c_int, name: c_int) -> Answer<c_int> {
    option(fd, level, name).map(|(value, _)| value)
}

pub fn socket_error(fd: Fd) -> Answer<Errno> {
    flag(fd, libc::SOL_SOCKET, libc::SO_ERROR).map(Errno)
}

pub fn set_option<T: Value>(fd: Fd, level: c_int, name: c_int, value: &T) -> Answer<c_int> {
    let length = size_of_val(value) as socklen_t;
    // SAFETY: `value` has the length passed.
    number(unsafe { libc::setsockopt(fd, level, name, ptr::from_ref(value).cast(), length) })
}

/// Calls setsockopt with any pointer and length.
pub fn set_option_raw(
    fd: Fd,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> Answer<c_int> {
    // SAFETY: callers pass pointers that the kernel must refuse.
    number(unsafe { libc::setsockopt(fd, level, name, value, length) })
}

/// Calls getsockopt with any pointers.
pub fn option_raw(
    fd: Fd,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> Answer<c_int> {
    // SAFETY: callers pass pointers that the kernel must refuse.
    number(unsafe { libc::getsockopt(fd, level, name, value, length) })
}

pub fn read(fd: Fd, buffer: &mut [u8]) -> Answer<usize> {
    // SAFETY: the length is that of the slice.
    answered(unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) })
}

pub fn receive(fd: Fd, buffer: &mut [u8], flags: c_int) -> Answer<usize> {
    // SAFETY: the length is that of the slice.
    answered(unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), flags) })
}

/// The returned length of the address is 0 if there is none.
pub fn receive_from(
    fd: Fd,
    buffer: &mut [u8],
    flags: c_int,
) -> Answer<(usize, Option<SocketAddr>)> {
    let mut raw = Raw::empty();
    // SAFETY: the length is that of the slice; `raw` has room for any address.
    let received = unsafe {
        libc::recvfrom(
            fd,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            flags,
            raw.pointer_mut(),
            &mut raw.length,
        )
    };
    Ok((answered(received)?, (raw.length > 0).then(|| decoded(&raw))))
}

fn pieces_mut(buffers: &mut [&mut [u8]]) -> Vec<iovec> {
    let piece = |buffer: &mut &mut [u8]| iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    buffers.iter_mut().map(piece).collect()
}

fn pieces(buffers: &[&[u8]]) -> Vec<iovec> {
    let piece = |buffer: &&[u8]| iovec {
        iov_base: buffer.as_ptr().cast_mut().cast(),
        iov_len: buffer.len(),
    };
    buffers.iter().map(piece).collect()
}

pub fn read_scattered(fd: Fd, buffers: &mut [&mut [u8]]) -> Answer<usize> {
    let pieces = pieces_mut(buffers);
    // SAFETY: the pieces describe valid buffers.
    answered(unsafe { libc::readv(fd, pieces.as_ptr(), pieces.len() as c_int) })
}

pub fn write_gathered(fd: Fd, buffers: &[&[u8]]) -> Answer<usize> {
    let pieces = pieces(buffers);
    // SAFETY: the pieces describe valid buffers.
    answered(unsafe { libc::writev(fd, pieces.as_ptr(), pieces.len() as c_int) })
}

/// The results of recvmsg.
pub struct Message {
    pub length: usize,
    pub from: Option<SocketAddr>,
    pub flags: c_int,
    /// Level and type of each control message.
    pub control: Vec<(c_int, c_int)>,
    /// The contents of each control message.
    pub contents: Vec<Vec<u8>>,
}

pub fn receive_message(fd: Fd, buffers: &mut [&mut [u8]], flags: c_int) -> Answer<Message> {
    let mut pieces = pieces_mut(buffers);
    let mut raw = Raw::empty();
    let mut control = [0_u64; 32];
    // SAFETY: a msghdr of zeros is valid.
    let mut header: msghdr = unsafe { zeroed() };
    header.msg_name = raw.pointer_mut().cast();
    header.msg_namelen = raw.length;
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len();
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control);
    // SAFETY: the header describes valid buffers.
    let length = answered(unsafe { libc::recvmsg(fd, &mut header, flags) })?;
    raw.length = header.msg_namelen;
    let (mut kinds, mut contents) = (Vec::new(), Vec::new());
    // SAFETY: the call wrote well-formed control messages.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&header);
        while !next.is_null() {
            kinds.push(((*next).cmsg_level, (*next).cmsg_type));
            let length = (*next).cmsg_len - libc::CMSG_LEN(0) as usize;
            let data = std::slice::from_raw_parts(libc::CMSG_DATA(next), length);
            contents.push(data.to_vec());
            next = libc::CMSG_NXTHDR(&header, next);
        }
    }
    let from = (raw.length > 0).then(|| decoded(&raw));
    Ok(Message {
        length,
        from,
        flags: header.msg_flags,
        control: kinds,
        contents,
    })
}

pub fn send_message(
    fd: Fd,
    buffers: &[&[u8]],
    to: Option<SocketAddr>,
    flags: c_int,
) -> Answer<usize> {
    let mut pieces = pieces(buffers);
    let mut raw = to.map(Raw::from);
    // SAFETY: a msghdr of zeros is valid.
    let mut header: msghdr = unsafe { zeroed() };
    if let Some(raw) = &mut raw {
        header.msg_name = raw.pointer_mut().cast();
        header.msg_namelen = raw.length;
    }
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len();
    // SAFETY: the header describes valid buffers.
    answered(unsafe { libc::sendmsg(fd, &header, flags) })
}

/// Calls recvmmsg with buffers of 64 bytes and returns their contents.
pub fn receive_messages(
    fd: Fd,
    count: usize,
    flags: c_int,
    timeout: Option<Duration>,
) -> Answer<Vec<Vec<u8>>> {
    let mut buffers = vec![[0_u8; 64]; count];
    let mut pieces: Vec<iovec> = buffers
        .iter_mut()
        .map(|buffer| iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        })
        .collect();
    let mut headers: Vec<libc::mmsghdr> = pieces.iter_mut().map(one_piece).collect();
    let mut time = timeout.map(timespec);
    let time = time.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
    // SAFETY: the headers describe valid buffers.
    let got =
        number(unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), count as u32, flags, time) })?;
    let texts = buffers.iter().zip(&headers).take(got as usize);
    Ok(texts
        .map(|(buffer, header)| buffer[..(header.msg_len as usize).min(64)].to_vec())
        .collect())
}

pub fn send_messages(fd: Fd, texts: &[&[u8]], flags: c_int) -> Answer<c_int> {
    let mut pieces = pieces(texts);
    let mut headers: Vec<libc::mmsghdr> = pieces.iter_mut().map(one_piece).collect();
    // SAFETY: the headers describe valid buffers.
    number(unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), headers.len() as u32, flags) })
}

fn one_piece(piece: &mut iovec) -> libc::mmsghdr {
    // SAFETY: a mmsghdr of zeros is valid.
    let mut header: libc::mmsghdr = unsafe { zeroed() };
    header.msg_hdr.msg_iov = piece;
    header.msg_hdr.msg_iovlen = 1;
    header
}

pub fn write(fd: Fd, buffer: &[u8]) -> Answer<usize> {
    // SAFETY: the length is that of the slice.
    answered(unsafe { libc::write(fd, buffer.as_ptr().cast(), buffer.len()) })
}

/// Calls send. MSG_NOSIGNAL is left to the caller.
pub fn send(fd: Fd, buffer: &[u8], flags: c_int) -> Answer<usize> {
    // SAFETY: the length is that of the slice.
    answered(unsafe { libc::send(fd, buffer.as_ptr().cast(), buffer.len(), flags) })
}

pub fn send_to(fd: Fd, buffer: &[u8], flags: c_int, to: SocketAddr) -> Answer<usize> {
    let raw = Raw::from(to);
    // SAFETY: the length is that of the slice; `raw` is an address of that length.
    answered(unsafe {
        libc::sendto(
            fd,
            buffer.as_ptr().cast(),
            buffer.len(),
            flags,
            raw.pointer(),
            raw.length,
        )
    })
}

/// Calls sendfile and returns the bytes sent and the offset afterwards.
pub fn send_file(to: Fd, from: Fd, offset: Option<i64>, count: usize) -> Answer<(usize, i64)> {
    let mut at = offset.unwrap_or(-1);
    let pointer = if offset.is_some() {
        &raw mut at
    } else {
        ptr::null_mut()
    };
    // SAFETY: `pointer` is null or points to `at`.
    let sent = answered(unsafe { libc::sendfile(to, from, pointer, count) })?;
    Ok((sent, at))
}

/// Creates a memory file with these contents, positioned at the start.
pub fn file(contents: &[u8]) -> Fd {
    // SAFETY: the arguments are a C string and an integer.
    let file = unsafe { libc::memfd_create(c"contents".as_ptr(), 0) };
    write(file, contents).expect("a memory file");
    seek(file, 0, libc::SEEK_SET);
    file
}

pub fn seek(fd: Fd, offset: i64, whence: c_int) -> i64 {
    // SAFETY: the arguments are integers.
    unsafe { libc::lseek(fd, offset, whence) }
}

/// Calls an ioctl that reads or writes one int.
pub fn ioctl(fd: Fd, request: u64, value: c_int) -> Answer<c_int> {
    let mut value = value;
    // SAFETY: the requests used take a pointer to an int.
    number(unsafe { libc::ioctl(fd, request, &raw mut value) })?;
    Ok(value)
}

pub fn file_type(fd: Fd) -> Answer<u32> {
    // SAFETY: a stat of zeros is valid.
    let mut status: libc::stat = unsafe { zeroed() };
    // SAFETY: `status` is valid for the call.
    number(unsafe { libc::fstat(fd, &mut status) })?;
    Ok(status.st_mode & libc::S_IFMT)
}

pub fn pipe() -> (Fd, Fd) {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    number(unsafe { libc::pipe(ends.as_mut_ptr()) }).expect("a pipe");
    (ends[0], ends[1])
}

/// Creates a timer that fires once.
pub fn timer(after: Duration) -> Fd {
    // SAFETY: the arguments are integers.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, 0) };
    let when = libc::itimerspec {
        it_interval: timespec(Duration::ZERO),
        it_value: timespec(after),
    };
    // SAFETY: `when` is valid for the call; null means that the old value is not requested.
    number(unsafe { libc::timerfd_settime(fd, 0, &when, ptr::null_mut()) }).expect("a timer");
    fd
}

/// Calls poll with pairs of descriptor and events. Returns the count and the events of each.
pub fn poll(wanted: &[(Fd, i16)], milliseconds: c_int) -> Answer<(c_int, Vec<i16>)> {
    let mut entries = entries(wanted);
    // SAFETY: the length is that of the array.
    let ready =
        number(unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as u64, milliseconds) })?;
    Ok((ready, entries.iter().map(|entry| entry.revents).collect()))
}

/// Calls ppoll with an empty signal mask, which admits SIGUSR1.
pub fn poll_open(wanted: &[(Fd, i16)], timeout: Duration) -> Answer<(c_int, Vec<i16>)> {
    let mut entries = entries(wanted);
    // SAFETY: zeros are an empty signal set; the array and the time are valid for the call.
    let ready = unsafe {
        let none: libc::sigset_t = zeroed();
        libc::ppoll(
            entries.as_mut_ptr(),
            entries.len() as u64,
            &timespec(timeout),
            &none,
        )
    };
    let ready = number(ready)?;
    Ok((ready, entries.iter().map(|entry| entry.revents).collect()))
}

/// Calls pselect for reading one descriptor, with a mask as [`poll_open`].
pub fn select_open(fd: Fd, timeout: Duration) -> Answer<c_int> {
    // SAFETY: zeros are empty sets; the descriptor is below FD_SETSIZE; all pointers are valid for the call.
    number(unsafe {
        let none: libc::sigset_t = zeroed();
        let mut read: libc::fd_set = zeroed();
        libc::FD_SET(fd, &mut read);
        let others = ptr::null_mut();
        libc::pselect(fd + 1, &mut read, others, others, &timespec(timeout), &none)
    })
}

/// Calls epoll_pwait with a mask as [`poll_open`].
pub fn epoll_wait_open(set: Fd, timeout: Duration) -> Answer<c_int> {
    let mut event = epoll_event { events: 0, u64: 0 };
    // SAFETY: zeros are an empty signal set; the event is valid for the call.
    number(unsafe {
        let none: libc::sigset_t = zeroed();
        libc::epoll_pwait(set, &mut event, 1, timeout.as_millis() as c_int, &none)
    })
}

/// Calls epoll_pwait2 with a mask as [`poll_open`].
pub fn epoll_wait2_open(set: Fd, timeout: Duration) -> Answer<c_int> {
    unsafe extern "C" {
        fn epoll_pwait2(
            set: c_int,
            events: *mut epoll_event,
            maximum: c_int,
            timeout: *const libc::timespec,
            mask: *const libc::sigset_t,
        ) -> c_int;
    }
    let mut event = epoll_event { events: 0, u64: 0 };
    // SAFETY: zeros are an empty signal set; the event and the time are valid for the call.
    number(unsafe {
        let none: libc::sigset_t = zeroed();
        epoll_pwait2(set, &mut event, 1, &timespec(timeout), &none)
    })
}

/// Calls select for reading with a set of 4096 bits, and returns the count.
pub fn select_far(wanted: &[Fd], milliseconds: i64) -> Answer<c_int> {
    let mut bits = [0_u64; 64];
    for fd in wanted {
        bits[*fd as usize / 64] |= 1 << (fd % 64);
    }
    let mut time = libc::timeval {
        tv_sec: 0,
        tv_usec: milliseconds * 1000,
    };
    // SAFETY: the set has as many bits as are passed.
    number(unsafe {
        let others = ptr::null_mut();
        libc::select(4096, bits.as_mut_ptr().cast(), others, others, &mut time)
    })
}

/// Returns the soft limit of descriptors.
pub fn allowed_descriptors() -> u64 {
    // SAFETY: `limit` is valid for the call.
    unsafe {
        let mut limit: libc::rlimit = zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur
    }
}

/// Raises or lowers the soft limit of descriptors.
pub fn allow_descriptors(count: u64) {
    // SAFETY: `limit` is valid for the calls.
    unsafe {
        let mut limit: libc::rlimit = zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = count.min(limit.rlim_max);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

fn entries(wanted: &[(Fd, i16)]) -> Vec<pollfd> {
    wanted
        .iter()
        .map(|&(fd, events)| pollfd {
            fd,
            events,
            revents: 0,
        })
        .collect()
}

/// Waits a few seconds at most for one of `events`, an error or a hang-up. Continues after a signal:
/// `SIGURG` is sent before the byte that it announces can be read.
pub fn wait_for(fd: Fd, events: i16) {
    while poll(&[(fd, events)], 3000) == Err(Errno(libc::EINTR)) {}
}

/// Returns the present events.
pub fn events_now(fd: Fd) -> Answer<i16> {
    events_within(fd, 0)
}

/// Waits for events, at most for this time, and returns them.
pub fn events_within(fd: Fd, milliseconds: c_int) -> Answer<i16> {
    let all = libc::POLLIN | libc::POLLOUT | libc::POLLPRI | libc::POLLRDHUP;
    poll(&[(fd, all)], milliseconds).map(|(_, events)| events[0])
}

/// Calls select. Returns the count, and the ready descriptors of each set.
pub fn select(sets: [&[Fd]; 3], timeout: Duration) -> Answer<(c_int, [Vec<Fd>; 3])> {
    // SAFETY: zeros are empty sets; the descriptors are below FD_SETSIZE.
    let mut raw = sets.map(|set| unsafe {
        let mut raw: libc::fd_set = zeroed();
        set.iter().for_each(|fd| libc::FD_SET(*fd, &mut raw));
        raw
    });
    let highest = sets
        .iter()
        .flat_map(|set| set.iter())
        .max()
        .map_or(0, |fd| fd + 1);
    let mut time = libc::timeval {
        tv_sec: timeout.as_secs() as i64,
        tv_usec: timeout.subsec_micros().into(),
    };
    let [read, write, except] = &mut raw;
    // SAFETY: sets and time are valid for the call.
    let ready = number(unsafe { libc::select(highest, read, write, except, &mut time) })?;
    let mut index = 0;
    let left = sets.map(|set| {
        let raw = &raw[index];
        index += 1;
        // SAFETY: the descriptors are below FD_SETSIZE.
        set.iter()
            .copied()
            .filter(|fd| unsafe { libc::FD_ISSET(*fd, raw) })
            .collect()
    });
    Ok((ready, left))
}

pub fn epoll_control(set: Fd, operation: c_int, fd: Fd, events: c_int, data: u64) -> Answer<c_int> {
    let mut event = epoll_event {
        events: events as u32,
        u64: data,
    };
    // SAFETY: the event is valid for the call.
    number(unsafe { libc::epoll_ctl(set, operation, fd, &mut event) })
}

/// Returns the data and events of each entry, in the order of the data.
pub fn epoll_wait(set: Fd, maximum: usize, milliseconds: c_int) -> Answer<Vec<(u64, u32)>> {
    let mut told = epoll_wait_in_order(set, maximum, milliseconds)?;
    told.sort_unstable();
    Ok(told)
}

/// In the order in which they are told.
pub fn epoll_wait_in_order(
    set: Fd,
    maximum: usize,
    milliseconds: c_int,
) -> Answer<Vec<(u64, u32)>> {
    let mut events = vec![epoll_event { events: 0, u64: 0 }; maximum];
    // SAFETY: the length is that of the array.
    let ready =
        unsafe { libc::epoll_wait(set, events.as_mut_ptr(), maximum as c_int, milliseconds) };
    let ready = number(ready)? as usize;
    let told = events[..ready].iter();
    Ok(told.map(|event| (event.u64, event.events)).collect())
}

/// Makes a system call by number with four integers.
pub fn by_number(call: libc::c_long, [a, b, c, d]: [usize; 4]) -> Answer<usize> {
    // SAFETY: callers pass integers, or pointers to valid buffers with their lengths.
    answered(unsafe { libc::syscall(call, a, b, c, d, 0_usize, 0_usize) })
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Calls an ioctl that returns an `int`.
pub fn ioctl_int(fd: Fd, request: libc::c_ulong) -> Answer<c_int> {
    let mut value: c_int = 0;
    // SAFETY: these requests write one `int`.
    number(unsafe { libc::ioctl(fd, request, &raw mut value) })?;
    Ok(value)
}

pub fn this_process() -> c_int {
    // SAFETY: the call has no arguments.
    unsafe { libc::getpid() }
}
