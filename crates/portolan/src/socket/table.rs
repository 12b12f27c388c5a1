//! Which descriptors of this process are Portolan's. The negative answer, by far the most common
//! under a preload library, costs one atomic load.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use portolan_sys::descriptor;

use crate::process::limit;
use crate::socket::Socket;
use crate::wait::epoll::Epoll;

/// Descriptors above this number stay the kernel's.
const MOST: usize = 1 << 16;

/// The library's own descriptors are moved up here, if the limit allows it, because some programs
/// expect small numbers.
const HIDDEN_FROM: RawFd = 900;

/// Above this limit there are enough numbers for the library and the program.
const AMPLE: u64 = 8192;
const LEFT: u64 = 16;

const FOREIGN: u8 = 0;
const OURS: u8 = 1;
/// The library's own: the channel, the control connection.
const INTERNAL: u8 = 2;
/// As [`INTERNAL`], but children of fork keep it.
const INHERITED: u8 = 3;

static KINDS: [AtomicU8; MOST] = [const { AtomicU8::new(FOREIGN) }; MOST];
static FILES: RwLock<Vec<Option<File>>> = RwLock::new(Vec::new());

#[derive(Clone)]
pub(crate) enum File {
    Socket(Arc<Socket>),
    Epoll(Arc<Epoll>),
}

impl File {
    fn count(&self, change: impl FnOnce(&Socket)) {
        if let File::Socket(socket) = self {
            change(socket);
        }
    }
}

fn kind(fd: RawFd) -> u8 {
    usize::try_from(fd)
        .ok()
        .and_then(|fd| KINDS.get(fd))
        .map_or(FOREIGN, |kind| kind.load(Ordering::Acquire))
}

pub(crate) fn is_ours(fd: RawFd) -> bool {
    kind(fd) == OURS
}

pub(crate) fn is_internal(fd: RawFd) -> bool {
    matches!(kind(fd), INTERNAL | INHERITED)
}

pub(crate) fn can_hold(fd: RawFd) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd < MOST)
}

pub(crate) fn find(fd: RawFd) -> Option<File> {
    if !is_ours(fd) {
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

pub(crate) fn epoll(fd: RawFd) -> Option<Arc<Epoll>> {
    match find(fd)? {
        File::Epoll(epoll) => Some(epoll),
        File::Socket(_) => None,
    }
}

/// Adds a descriptor that [`can_hold`] accepted.
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
    KINDS[index].store(OURS, Ordering::Release);
}

pub(crate) fn remove(fd: RawFd) -> Option<File> {
    let index = usize::try_from(fd).ok()?;
    if !is_ours(fd) {
        return None;
    }
    let mut files = FILES.write().unwrap_or_else(PoisonError::into_inner);
    KINDS[index].store(FOREIGN, Ordering::Release);
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
    let is_it = |file: &File| matches!(file, File::Socket(other) if Arc::ptr_eq(other, socket));
    all()
        .into_iter()
        .filter(|(_, file)| is_it(file))
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
pub(crate) fn number_of_set(set: &Arc<Epoll>) -> Option<RawFd> {
    let is_it = |file: &File| matches!(file, File::Epoll(other) if Arc::ptr_eq(other, set));
    all()
        .into_iter()
        .find(|(_, file)| is_it(file))
        .map(|(fd, _)| fd)
}

/// Returns all descriptors in the table.
pub(crate) fn all() -> Vec<(RawFd, File)> {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files
        .iter()
        .zip(0..)
        .filter_map(|(file, fd)| Some((fd, file.clone()?)))
        .collect()
}

/// One of the library's own descriptors, closed by a bare system call: `OwnedFd` closes by libc's
/// symbol, which under the preload library refuses descriptors that are not the program's.
#[derive(Debug)]
pub(crate) struct InternalFd(ManuallyDrop<OwnedFd>);

impl InternalFd {
    pub(crate) fn new(fd: OwnedFd) -> InternalFd {
        InternalFd(ManuallyDrop::new(hide(fd)))
    }

    /// Wraps a descriptor that is hidden already, to be closed.
    pub(crate) fn hidden(fd: OwnedFd) -> InternalFd {
        InternalFd(ManuallyDrop::new(fd))
    }

    /// Wraps a descriptor that children of fork keep.
    pub(crate) fn inherited(fd: OwnedFd) -> InternalFd {
        let own = InternalFd::new(fd);
        set_kind(&own, INHERITED);
        own
    }
}

impl AsFd for InternalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for InternalFd {
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd();
        let cell = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd));
        // In a child of fork it has been closed already: see `take_hidden`.
        let is_own = |kind| matches!(kind, INTERNAL | INHERITED);
        if cell.is_none_or(|kind| is_own(kind.swap(FOREIGN, Ordering::AcqRel))) {
            descriptor::close(fd);
        }
    }
}

/// Moves one of the library's own descriptors, which will not be closed, out of the application's
/// range, and protects it from programs that close all they find.
pub(crate) fn hide(fd: OwnedFd) -> OwnedFd {
    let copy = |first| rustix::io::fcntl_dupfd_cloexec(&fd, first);
    // A few numbers above the limit are left for received descriptors (`process::control`).
    let above = limit::above(AMPLE, |limit| {
        let first = RawFd::try_from(limit.saturating_add(LEFT));
        copy(HIDDEN_FROM.max(first.unwrap_or(RawFd::MAX)))
    });
    let hidden = above.unwrap_or_else(|| copy(HIDDEN_FROM));
    let fd = hidden.unwrap_or(fd);
    note_internal(&fd);
    fd
}

fn note_internal(fd: &OwnedFd) {
    set_kind(fd, INTERNAL);
}

fn set_kind(fd: impl AsFd, kind: u8) {
    let number = usize::try_from(fd.as_fd().as_raw_fd()).ok();
    if let Some(cell) = number.and_then(|number| KINDS.get(number)) {
        cell.store(kind, Ordering::Release);
    }
}

/// Makes `onto`, one of the library's own descriptors, refer to the file of `from`: users of its
/// number continue with that.
pub(crate) fn renumber(
    from: BorrowedFd<'_>,
    onto: BorrowedFd<'_>,
) -> Result<(), rustix::io::Errno> {
    descriptor::replace(from, onto.as_raw_fd(), true)
}

/// Copies a descriptor for the library's own use, out of the program's range if that is possible.
/// If `limit` leaves no room there, the copy gets one of the highest free numbers.
pub(crate) fn hidden_copy(fd: BorrowedFd<'_>, limit: u64) -> Result<InternalFd, rustix::io::Errno> {
    let last = RawFd::try_from(limit.saturating_sub(16)).unwrap_or(HIDDEN_FROM);
    let from = |first| rustix::io::fcntl_dupfd_cloexec(fd, first);
    let copy = from(HIDDEN_FROM)
        .or_else(|_| from(last.min(HIDDEN_FROM)))
        .or_else(|_| from(0))?;
    note_internal(&copy);
    Ok(InternalFd(ManuallyDrop::new(copy)))
}

/// Takes the library's own descriptors; a child of fork must close its copies.
pub(crate) fn take_hidden() -> impl Iterator<Item = RawFd> {
    KINDS.iter().zip(0..).filter_map(|(kind, fd)| {
        let is_internal = kind.load(Ordering::Relaxed) == INTERNAL;
        is_internal.then(|| {
            kind.store(FOREIGN, Ordering::Release);
            fd
        })
    })
}
