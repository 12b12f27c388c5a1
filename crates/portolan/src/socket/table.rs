//! The program's descriptors of sockets and epoll sets on Portolan.

use std::os::fd::RawFd;
use std::sync::{Arc, PoisonError, RwLock};

use crate::descriptors;
use crate::socket::Socket;
use crate::wait::epoll::Epoll;

static FILES: RwLock<Vec<Option<File>>> = RwLock::new(Vec::new());

#[derive(Clone)]
pub(crate) enum File {
    Socket(Arc<Socket>),
    Epoll(Arc<Epoll<Socket>>),
}

impl File {
    fn count(&self, change: impl FnOnce(&Socket)) {
        if let File::Socket(socket) = self {
            change(socket);
        }
    }
}

pub(crate) fn find(fd: RawFd) -> Option<File> {
    if !descriptors::is_ours(fd) {
        return None;
    }
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files.get(usize::try_from(fd).ok()?)?.clone()
}

pub(crate) fn socket(fd: RawFd) -> Option<Arc<Socket>> {
    match find(fd)? {
        File::Socket(socket) => Some(socket),
        File::Epoll(_) => None,
    }
}

pub(crate) fn epoll(fd: RawFd) -> Option<Arc<Epoll<Socket>>> {
    match find(fd)? {
        File::Epoll(epoll) => Some(epoll),
        File::Socket(_) => None,
    }
}

/// Adds a descriptor that [`descriptors::can_hold`] accepted.
pub(crate) fn insert(fd: RawFd, file: File) {
    let Ok(index) = usize::try_from(fd) else {
        return;
    };
    let mut files = FILES.write().unwrap_or_else(PoisonError::into_inner);
    if files.len() <= index {
        files.resize_with(index + 1, || None);
    }
    file.count(Socket::add_number);
    if let Some(before) = files[index].replace(file) {
        before.count(Socket::drop_number);
    }
    descriptors::claim(fd);
}

pub(crate) fn remove(fd: RawFd) -> Option<File> {
    let index = usize::try_from(fd).ok()?;
    if !descriptors::is_ours(fd) {
        return None;
    }
    let mut files = FILES.write().unwrap_or_else(PoisonError::into_inner);
    descriptors::release(fd);
    let file = files.get_mut(index)?.take()?;
    file.count(Socket::drop_number);
    Some(file)
}

/// Does the program have no socket and no epoll set of ours?
pub(crate) fn is_empty() -> bool {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files.iter().all(Option::is_none)
}

/// Does the program have sockets of ours, not just epoll sets?
pub(crate) fn has_sockets() -> bool {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files
        .iter()
        .any(|file| matches!(file, Some(File::Socket(_))))
}

/// Returns the descriptors of a socket.
pub(crate) fn numbers_of(socket: &Arc<Socket>) -> Vec<RawFd> {
    sockets()
        .into_iter()
        .filter(|(_, other)| Arc::ptr_eq(other, socket))
        .map(|(fd, _)| fd)
        .collect()
}

/// As [`numbers_of`], but faster if `likely` is the only one.
pub(crate) fn numbers(socket: &Arc<Socket>, likely: RawFd) -> Vec<RawFd> {
    let is_it = self::socket(likely).is_some_and(|other| Arc::ptr_eq(&other, socket));
    if is_it && socket.has_one_number() {
        vec![likely]
    } else {
        numbers_of(socket)
    }
}

/// Returns a descriptor of the socket: `likely`, if it still is one.
pub(crate) fn number_of(socket: &Arc<Socket>, likely: RawFd) -> Option<RawFd> {
    let is_it = |other: &Arc<Socket>| Arc::ptr_eq(other, socket);
    if self::socket(likely).is_some_and(|other| is_it(&other)) {
        Some(likely)
    } else {
        numbers_of(socket).first().copied()
    }
}

/// Calls `look` with a descriptor of the socket, which cannot be closed through the library until
/// it returns: it must not block. Returns `None` if the socket has no descriptor.
pub(crate) fn with_number<T>(
    socket: &Arc<Socket>,
    likely: RawFd,
    look: impl FnOnce(RawFd) -> T,
) -> Option<T> {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    let is_it = |file: &Option<File>| matches!(file, Some(File::Socket(other)) if Arc::ptr_eq(other, socket));
    let likely = usize::try_from(likely).ok();
    let number = likely
        .filter(|&number| files.get(number).is_some_and(is_it))
        .or_else(|| files.iter().position(is_it))?;
    RawFd::try_from(number).ok().map(look)
}

/// Returns a descriptor of an epoll set.
pub(crate) fn number_of_set(set: &Arc<Epoll<Socket>>) -> Option<RawFd> {
    epolls()
        .into_iter()
        .find(|(_, other)| Arc::ptr_eq(other, set))
        .map(|(fd, _)| fd)
}

/// Returns all sockets, each once for every descriptor.
pub(crate) fn sockets() -> Vec<(RawFd, Arc<Socket>)> {
    let socket = |(fd, file)| match file {
        File::Socket(socket) => Some((fd, socket)),
        File::Epoll(_) => None,
    };
    all().into_iter().filter_map(socket).collect()
}

/// Returns all epoll sets, each once for every descriptor.
pub(crate) fn epolls() -> Vec<(RawFd, Arc<Epoll<Socket>>)> {
    let epoll = |(fd, file)| match file {
        File::Epoll(epoll) => Some((fd, epoll)),
        File::Socket(_) => None,
    };
    all().into_iter().filter_map(epoll).collect()
}

fn all() -> Vec<(RawFd, File)> {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files
        .iter()
        .zip(0..)
        .filter_map(|(file, fd)| Some((fd, file.clone()?)))
        .collect()
}
