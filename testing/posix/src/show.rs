//! Formats results so that they are the same in every run.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use crate::call::{Answer, Errno};

/// Formats a call's result: its value, or the name of its error.
pub fn told<T: Display>(answer: Answer<T>) -> String {
    match answer {
        Ok(value) => value.to_string(),
        Err(errno) => errno.to_string(),
    }
}

/// Formats whether a call succeeded, for values that vary between runs.
pub fn worked<T>(answer: Answer<T>) -> String {
    told(answer.map(|_| "ok"))
}

/// Formats bytes as text.
pub fn text(bytes: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(bytes))
}

/// Formats the result of a receive: the count and the received text.
pub fn read_text(answer: Answer<usize>, buffer: &[u8]) -> String {
    match answer {
        Ok(length) => format!("{length} {}", text(&buffer[..length.min(buffer.len())])),
        Err(errno) => errno.to_string(),
    }
}

/// Runs `act` and checks whether it took about the expected time; a busy machine takes longer.
pub fn timed<T>(expected: Duration, act: impl FnOnce() -> T) -> (T, &'static str) {
    let started = Instant::now();
    let result = act();
    let took = started.elapsed();
    let verdict = match took {
        took if took + Duration::from_millis(15) < expected => "early",
        took if took > expected + Duration::from_secs(1) => "late",
        _ => "in time",
    };
    (result, verdict)
}

const POLL_NAMES: [(i16, &str); 9] = [
    (libc::POLLIN, "IN"),
    (libc::POLLPRI, "PRI"),
    (libc::POLLOUT, "OUT"),
    (libc::POLLERR, "ERR"),
    (libc::POLLHUP, "HUP"),
    (libc::POLLNVAL, "NVAL"),
    (libc::POLLRDHUP, "RDHUP"),
    (libc::POLLRDNORM, "RDNORM"),
    (libc::POLLWRNORM, "WRNORM"),
];

/// Formats events of poll, which epoll shares, by name.
pub fn events(bits: i16) -> String {
    named(bits, &POLL_NAMES)
}

/// Formats the flags of a received message by name.
pub fn message_flags(bits: i32) -> String {
    let names = [
        (libc::MSG_TRUNC, "TRUNC"),
        (libc::MSG_CTRUNC, "CTRUNC"),
        (libc::MSG_EOR, "EOR"),
        (libc::MSG_OOB, "OOB"),
        (libc::MSG_ERRQUEUE, "ERRQUEUE"),
        (libc::MSG_DONTWAIT, "DONTWAIT"),
        (libc::MSG_PEEK, "PEEK"),
        (libc::MSG_WAITALL, "WAITALL"),
        (libc::MSG_NOSIGNAL, "NOSIGNAL"),
        (libc::MSG_CMSG_CLOEXEC, "CMSG_CLOEXEC"),
    ];
    named(bits, &names)
}

fn named<T: Copy + PartialEq + Default + std::ops::BitAnd<Output = T>>(
    bits: T,
    names: &[(T, &str)],
) -> String {
    let set: Vec<_> = names
        .iter()
        .filter(|(bit, _)| bits & *bit != T::default())
        .map(|(_, name)| *name)
        .collect();
    if set.is_empty() {
        "-".to_owned()
    } else {
        set.join("|")
    }
}

const ERRNO_NAMES: [(i32, &str); 45] = [
    (0, "no error"),
    (libc::EPERM, "EPERM"),
    (libc::ENOENT, "ENOENT"),
    (libc::EINTR, "EINTR"),
    (libc::EIO, "EIO"),
    (libc::EBADF, "EBADF"),
    (libc::EAGAIN, "EAGAIN"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::EACCES, "EACCES"),
    (libc::EFAULT, "EFAULT"),
    (libc::EEXIST, "EEXIST"),
    (libc::EINVAL, "EINVAL"),
    (libc::EMFILE, "EMFILE"),
    (libc::ENOTTY, "ENOTTY"),
    (libc::ESPIPE, "ESPIPE"),
    (libc::EPIPE, "EPIPE"),
    (libc::EDOM, "EDOM"),
    (libc::ENOSYS, "ENOSYS"),
    (libc::ELOOP, "ELOOP"),
    (libc::ENOTSOCK, "ENOTSOCK"),
    (libc::EDESTADDRREQ, "EDESTADDRREQ"),
    (libc::EMSGSIZE, "EMSGSIZE"),
    (libc::ENOPROTOOPT, "ENOPROTOOPT"),
    (libc::EPROTONOSUPPORT, "EPROTONOSUPPORT"),
    (libc::ESOCKTNOSUPPORT, "ESOCKTNOSUPPORT"),
    (libc::EOPNOTSUPP, "EOPNOTSUPP"),
    (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
    (libc::EADDRINUSE, "EADDRINUSE"),
    (libc::EADDRNOTAVAIL, "EADDRNOTAVAIL"),
    (libc::ENETUNREACH, "ENETUNREACH"),
    (libc::ECONNRESET, "ECONNRESET"),
    (libc::EISCONN, "EISCONN"),
    (libc::ENOTCONN, "ENOTCONN"),
    (libc::ETIMEDOUT, "ETIMEDOUT"),
    (libc::ECONNREFUSED, "ECONNREFUSED"),
    (libc::EALREADY, "EALREADY"),
    (libc::EINPROGRESS, "EINPROGRESS"),
    (libc::ENETDOWN, "ENETDOWN"),
    (libc::ECONNABORTED, "ECONNABORTED"),
    (libc::ENOBUFS, "ENOBUFS"),
    (libc::EHOSTDOWN, "EHOSTDOWN"),
    (libc::EHOSTUNREACH, "EHOSTUNREACH"),
    (libc::EPROTO, "EPROTO"),
    (libc::ENONET, "ENONET"),
    (libc::EILSEQ, "EILSEQ"),
];

impl Display for Errno {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match ERRNO_NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => formatter.write_str(name),
            None => write!(formatter, "errno {}", self.0),
        }
    }
}
