//! Which descriptors of this process are whose: the program's sockets on Portolan, the library's own, others. The negative
//! answer, by far the most common under a preload library, costs one atomic load.

pub(crate) mod limit;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use portolan_sys::descriptor;

/// Descriptors above this number stay the kernel's.
const MOST: usize = 1 << 16;

/// The library's own descriptors are moved up here, if the limit allows it, because some programs
/// expect small numbers.
const HIDDEN_FROM: RawFd = 900;

/// Above this limit there are enough numbers for the library and the program.
const AMPLE: u64 = 8192;
const LEFT: u64 = 16;

/// The part of the program's numbers that [`keep_spare`] may use.
const SPARE: RawFd = 8;

const FOREIGN: u8 = 0;
const OURS: u8 = 1;
/// The library's own: the channel, the control connection.
const INTERNAL: u8 = 2;
/// As [`INTERNAL`], but children of fork keep it.
const INHERITED: u8 = 3;

static KINDS: [AtomicU8; MOST] = [const { AtomicU8::new(FOREIGN) }; MOST];

/// Descriptors for each bit of [`HAVE_INTERNAL`].
const CHUNK: usize = MOST / u64::BITS as usize;

/// The chunks of [`KINDS`] that have had [`INTERNAL`] descriptors: a child of fork looks through these only, as it has none of
/// the pages yet.
static HAVE_INTERNAL: AtomicU64 = AtomicU64::new(0);

fn kind(fd: RawFd) -> u8 {
    usize::try_from(fd)
        .ok()
        .and_then(|fd| KINDS.get(fd))
        .map_or(FOREIGN, |kind| kind.load(Ordering::Acquire))
}

/// Is the descriptor one of Portolan's sockets or epoll sets? One atomic load.
pub fn is_ours(fd: RawFd) -> bool {
    kind(fd) == OURS
}

/// Is the descriptor used by the library itself? Programs must not use it.
pub fn is_internal(fd: RawFd) -> bool {
    matches!(kind(fd), INTERNAL | INHERITED)
}

pub(crate) fn can_hold(fd: RawFd) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd < MOST)
}

/// A descriptor that [`can_hold`] accepted is the program's, on Portolan.
pub(crate) fn claim(fd: RawFd) {
    store(fd, OURS);
}

/// It is so no longer.
pub(crate) fn release(fd: RawFd) {
    store(fd, FOREIGN);
}

fn store(fd: RawFd, kind: u8) {
    let index = usize::try_from(fd).ok();
    if let Some(cell) = index.and_then(|index| KINDS.get(index)) {
        cell.store(kind, Ordering::Release);
    }
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
        store(own.as_fd().as_raw_fd(), INHERITED);
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

/// Keeps a descriptor that the library can do without, unless it would take a number that the program may need.
pub(crate) fn keep_spare(fd: &OwnedFd) -> Option<InternalFd> {
    let copy = |first| rustix::io::fcntl_dupfd_cloexec(fd, first).ok();
    let limit = RawFd::try_from(limit::current()).unwrap_or(RawFd::MAX);
    let first = limit.saturating_add(LEFT as RawFd);
    let is_below = |end| move |fd: &OwnedFd| fd.as_raw_fd() < end;
    let above = limit::raise().and_then(|_raised| copy(first));
    // The other half is for what the library needs.
    let above = above.filter(is_below(first.saturating_add(limit::ROOM as RawFd / 2)));
    // A small part of many numbers is not missed.
    let spare = above.or_else(|| copy(HIDDEN_FROM).filter(is_below(limit / SPARE)))?;
    can_hold(spare.as_raw_fd()).then(|| {
        note_internal(&spare);
        InternalFd::hidden(spare)
    })
}

fn note_internal(fd: &OwnedFd) {
    let fd = fd.as_raw_fd();
    if let Ok(index) = usize::try_from(fd) {
        let bit = 1_u64.checked_shl((index / CHUNK) as u32).unwrap_or(0);
        if HAVE_INTERNAL.load(Ordering::Relaxed) & bit != bit {
            HAVE_INTERNAL.fetch_or(bit, Ordering::Relaxed);
        }
    }
    store(fd, INTERNAL);
}

/// Makes `onto`, one of the library's own descriptors, refer to the file of `from`: users of its
/// number continue with that.
pub(crate) fn renumber(
    from: BorrowedFd<'_>,
    onto: BorrowedFd<'_>,
) -> Result<(), rustix::io::Errno> {
    replace(from, onto.as_raw_fd(), true)
}

/// Makes the open descriptor `onto` refer to the file of `from`, also if the program's limit is lower than its number by now.
pub(crate) fn replace(
    from: impl AsFd,
    onto: RawFd,
    close_on_exec: bool,
) -> Result<(), rustix::io::Errno> {
    match descriptor::replace(&from, onto, close_on_exec) {
        Err(rustix::io::Errno::BADF) => {
            let _raised = limit::raise_above(onto.unsigned_abs().into());
            descriptor::replace(from, onto, close_on_exec)
        }
        result => result,
    }
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
    let chunks = HAVE_INTERNAL.load(Ordering::Relaxed);
    let chunks = (0..MOST / CHUNK).filter(move |chunk| chunks & 1 << chunk != 0);
    let numbers = chunks.flat_map(|chunk| chunk * CHUNK..(chunk + 1) * CHUNK);
    numbers.filter_map(|fd| {
        let kind = &KINDS[fd];
        let is_internal = kind.load(Ordering::Relaxed) == INTERNAL;
        is_internal.then(|| {
            kind.store(FOREIGN, Ordering::Release);
            fd as RawFd
        })
    })
}
