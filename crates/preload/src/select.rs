//! Converts `fd_set`s to an array for `posix::poll`, and its result to `fd_set`s.
//!
//! Sets may be larger than FD_SETSIZE: as for the kernel, the count gives their length.

use std::{
    ffi::c_ulong,
    slice,
    time::{Duration, Instant},
};

use libc::{
    POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND,
    POLLWRNORM, c_int, c_short, fd_set, pollfd, sigset_t,
};
use portolan::posix;
use rustix::io::Errno;

use crate::{
    interpose::{CallError, Outcome},
    memory::writable,
};

const WORD_BITS: usize = c_ulong::BITS as usize;
/// Events that make a descriptor ready in the read, write and except set (Linux, fs/select.c).
const READY: [c_short; 3] = [
    POLLRDNORM | POLLRDBAND | POLLIN | POLLHUP | POLLERR,
    POLLWRBAND | POLLWRNORM | POLLOUT | POLLERR,
    POLLPRI,
];

/// The remaining time of a select; a time beyond the clock's range means without limit.
pub(crate) struct Wait {
    deadline: Option<Instant>,
}

impl Wait {
    pub(crate) fn until(timeout: Option<Duration>) -> Self {
        Self {
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
        }
    }

    /// Returns the remaining time; `None` means without limit.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

/// The caller's read, write and except sets.
pub(crate) struct Sets<'a> {
    words: [Option<&'a mut [c_ulong]>; 3],
    count: usize,
}

impl Sets<'_> {
    /// # Safety
    /// Each of `sets` is null or a bit set of at least `count` bits.
    pub(crate) unsafe fn borrow(count: c_int, sets: [*mut fd_set; 3]) -> Result<Self, Errno> {
        let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        let length = count.div_ceil(WORD_BITS);
        for set in sets.into_iter().filter(|set| !set.is_null()) {
            writable(set.cast::<c_ulong>(), length)?;
        }
        let words = sets.map(|set| {
            if set.is_null() {
                None
            } else {
                // SAFETY: the caller's promise.
                Some(unsafe { slice::from_raw_parts_mut(set.cast::<c_ulong>(), length) })
            }
        });
        Ok(Self { words, count })
    }

    /// Waits until a descriptor is ready in the sense of its set, and clears all others in the sets.
    pub(crate) fn wait(mut self, wait: &Wait, mask: Option<&sigset_t>) -> Outcome<c_int> {
        if !(0..self.count).any(|fd| self.wanted(fd) != 0 && posix::is_ours(fd as c_int)) {
            return Err(CallError::NotOurs);
        }
        let mut entries = self.entries();
        loop {
            let polled = posix::poll(&mut entries, wait.left(), mask)?;
            if entries.iter().any(|entry| entry.revents & POLLNVAL != 0) {
                return Err(Errno::BADF.into());
            }
            if polled == 0 || entries.iter().any(|entry| ready_in(entry) != 0) {
                return Ok(self.store(&entries));
            }
            // poll reports hang-ups, which do not count for the write and except sets: such descriptors are ignored
            // from here on.
            for entry in entries.iter_mut().filter(|entry| entry.revents != 0) {
                entry.fd = -1;
            }
        }
    }

    /// Returns the sets that contain `fd`, one bit for each.
    fn wanted(&self, fd: usize) -> u8 {
        let is_in = |words: &Option<&mut [c_ulong]>| {
            words
                .as_ref()
                .is_some_and(|words| words[fd / WORD_BITS] >> (fd % WORD_BITS) & 1 != 0)
        };
        (0..3)
            .filter(|set| is_in(&self.words[*set]))
            .fold(0, |sets, set| sets | 1 << set)
    }

    fn entries(&self) -> Vec<pollfd> {
        (0..self.count)
            .filter_map(|fd| match self.wanted(fd) {
                0 => None,
                sets => Some(pollfd {
                    fd: fd as c_int,
                    events: asked(sets),
                    revents: 0,
                }),
            })
            .collect()
    }

    fn store(&mut self, entries: &[pollfd]) -> c_int {
        for words in self.words.iter_mut().flatten() {
            words.fill(0);
        }
        let mut total = 0;
        for entry in entries.iter().filter(|entry| entry.fd >= 0) {
            let (fd, sets) = (entry.fd as usize, ready_in(entry));
            for (set, words) in self.words.iter_mut().enumerate() {
                if let Some(words) = words.as_mut().filter(|_| sets >> set & 1 != 0) {
                    words[fd / WORD_BITS] |= 1 << (fd % WORD_BITS);
                }
            }
            total += sets.count_ones();
        }
        total as c_int
    }
}

/// Returns the events to poll for a descriptor in `sets`.
fn asked(sets: u8) -> c_short {
    (0..3)
        .filter(|set| sets >> set & 1 != 0)
        .fold(0, |events, set| events | READY[set])
        & !(POLLHUP | POLLERR)
}

/// Returns the sets in which the entry is ready, among those that contained it.
fn ready_in(entry: &pollfd) -> u8 {
    let was_in = |set: &usize| entry.events & READY[*set] != 0;
    (0..3)
        .filter(|set| was_in(set) && entry.revents & READY[*set] != 0)
        .fold(0, |sets, set| sets | 1 << set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(read: &mut [c_ulong], write: &mut [c_ulong]) -> Sets<'static> {
        let count = read.len() * WORD_BITS;
        let sets = [
            read.as_mut_ptr().cast(),
            write.as_mut_ptr().cast(),
            std::ptr::null_mut(),
        ];
        // SAFETY: the sets have `count` bits and outlive their use in these tests.
        unsafe { Sets::borrow(count as c_int, sets) }.unwrap()
    }

    fn entry(fd: c_int, sets: u8, revents: c_short) -> pollfd {
        pollfd {
            fd,
            events: asked(sets),
            revents,
        }
    }

    #[test]
    fn each_descriptor_becomes_one_entry_with_the_events_of_its_sets() {
        let (mut read, mut write) = ([1 << 3, 1], [1 << 3, 0]);
        let entries = sets(&mut read, &mut write).entries();
        let told: Vec<_> = entries
            .iter()
            .map(|entry| (entry.fd, entry.events))
            .collect();
        assert_eq!(told, [(3, asked(0b11)), (64, asked(0b01))]);
    }

    #[test]
    fn ready_descriptors_are_counted_once_for_each_set() {
        let (mut read, mut write) = ([1 << 3, 1], [1 << 3, 0]);
        let answer = [entry(3, 0b11, POLLIN | POLLOUT), entry(64, 0b01, 0)];
        assert_eq!(sets(&mut read, &mut write).store(&answer), 2);
        assert_eq!((read, write), ([1 << 3, 0], [1 << 3, 0]));
    }

    #[test]
    fn a_hang_up_is_readable_but_not_writable() {
        assert_eq!(ready_in(&entry(3, 0b111, POLLHUP)), 0b001);
        assert_eq!(ready_in(&entry(3, 0b111, POLLERR)), 0b011);
        assert_eq!(ready_in(&entry(3, 0b100, POLLPRI)), 0b100);
    }

    #[test]
    fn a_negative_count_is_invalid() {
        // SAFETY: null sets.
        let refused = unsafe { Sets::borrow(-1, [std::ptr::null_mut(); 3]) };
        assert_eq!(refused.err(), Some(Errno::INVAL));
    }
}
