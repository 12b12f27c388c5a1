//! What the other threads of this process wait for, as reported by `/proc` (proc_pid_syscall(5)).

use std::fs;
use std::ops::Range;
use std::os::fd::RawFd;

use crate::raw;

/// Limit of the descriptor sets that are examined.
const DESCRIPTORS_MAX: usize = 1 << 16;

const BITS: usize = u64::BITS as usize;

/// A system call in which a thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sleep {
    number: libc::c_long,
    arguments: [usize; 6],
    /// The address after the system call instruction.
    instruction: usize,
}

/// The descriptors on which other threads wait by `poll` or `select`, called from code outside this library. None
/// without
/// `/proc`, or if the kernel does not tell.
pub fn polled_past_library() -> Vec<RawFd> {
    let sleeps: Vec<Sleep> = threads()
        .filter_map(|thread| fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).ok())
        .filter_map(|line| parse(&line))
        .filter(Sleep::is_poll)
        .collect();
    if sleeps.is_empty() {
        return Vec::new();
    }
    let own = own_code();
    let is_foreign = |sleep: &&Sleep| !own.iter().any(|code| code.contains(&sleep.instruction));
    let foreign = sleeps.iter().filter(is_foreign);
    foreign.flat_map(Sleep::descriptors).collect()
}

fn threads() -> impl Iterator<Item = String> {
    let entries = fs::read_dir("/proc/self/task").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

/// Parses a line like `271 0x7ffc0 0x1 0x0 0x0 0x8 0x0 0x7ffb8 0x7f001`; other lines are of threads not in a system
/// call.
fn parse(line: &str) -> Option<Sleep> {
    let (number, rest) = line.trim_end().split_once(' ')?;
    let words: Vec<usize> = rest
        .split(' ')
        .map_while(|word| usize::from_str_radix(word.strip_prefix("0x")?, 16).ok())
        .collect();
    let [a, b, c, d, e, f, _stack, instruction] = *<&[usize; 8]>::try_from(&words[..]).ok()?;
    Some(Sleep {
        number: number.parse().ok()?,
        arguments: [a, b, c, d, e, f],
        instruction,
    })
}

/// The code ranges of the object that contains this function.
fn own_code() -> Vec<Range<usize>> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let here = own_code as *const () as usize;
    let own = maps
        .lines()
        .filter_map(mapping)
        .find(|(range, _)| range.contains(&here));
    let Some((_, own)) = own else {
        return Vec::new();
    };
    let mappings = maps.lines().filter_map(mapping);
    let of_own = mappings.filter(|(_, file)| *file == own);
    of_own.map(|(range, _)| range).collect()
}

/// Parses a line like `7f00-7f10 r-xp 00001000 08:01 123  /lib/x.so`: the addresses, and the file's device and inode.
fn mapping(line: &str) -> Option<(Range<usize>, (&str, &str))> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (device, inode) = (words.nth(2)?, words.next()?);
    let address = |word| usize::from_str_radix(word, 16).ok();
    Some((address(start)?..address(end)?, (device, inode)))
}

impl Sleep {
    fn is_poll(&self) -> bool {
        self.is_by_list() || self.is_by_bits()
    }

    fn is_by_list(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.number == libc::SYS_poll {
            return true;
        }
        self.number == libc::SYS_ppoll
    }

    fn is_by_bits(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.number == libc::SYS_select {
            return true;
        }
        self.number == libc::SYS_pselect6
    }

    fn descriptors(&self) -> Vec<RawFd> {
        if self.is_by_list() {
            let [list, count, ..] = self.arguments;
            let entries = copy_words(list, count.min(DESCRIPTORS_MAX));
            // `struct pollfd` begins with the descriptor.
            return entries.into_iter().map(first_half).collect();
        }
        let [count, sets @ ..] = self.arguments;
        let words = count.min(DESCRIPTORS_MAX).div_ceil(BITS);
        let sets = sets[..3].iter().filter(|set| **set != 0);
        sets.flat_map(|set| set_bits(&copy_words(*set, words)))
            .collect()
    }
}

fn first_half(entry: u64) -> RawFd {
    let [a, b, c, d, ..] = entry.to_ne_bytes();
    RawFd::from_ne_bytes([a, b, c, d])
}

fn set_bits(words: &[u64]) -> Vec<RawFd> {
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let bits = (0..BITS).filter(|bit| word >> bit & 1 == 1);
        found.extend(bits.filter_map(|bit| RawFd::try_from(at * BITS + bit).ok()));
    }
    found
}

/// Copies memory of this process that another thread may change or unmap at any time; empty if it cannot be read.
fn copy_words(start: usize, count: usize) -> Vec<u64> {
    let mut words = vec![0_u64; count];
    let length = size_of_val(&words[..]);
    let to = [words.as_mut_ptr().expose_provenance(), length];
    let from = [start, length];
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: each list is one `struct iovec`, a pointer and a length; the destination is within `words`, and the
    // kernel checks the source.
    let read = unsafe {
        raw::syscall(
            libc::SYS_process_vm_readv,
            [
                process as usize,
                to.as_ptr().expose_provenance(),
                1,
                from.as_ptr().expose_provenance(),
                1,
                0,
            ],
        )
    };
    words.truncate(read.map_or(0, |length| length / size_of::<u64>()));
    words
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::pipe::pipe;

    use super::*;
    use crate::wait::{pollfd, ppoll};

    #[test]
    fn calls_are_read_as_the_kernel_writes_them() {
        let line = "271 0x7ffd10 0x2 0x0 0x0 0x8 0x0 0x7ffd00 0x7f0013dc\n";
        let sleep = parse(line).expect("a call");
        assert_eq!((sleep.number, sleep.arguments[1]), (271, 2));
        assert_eq!(sleep.instruction, 0x7f00_13dc);
        for line in ["running", "-1 0x7ffd00 0x7f0013dc", "", "271 0x1 0x2"] {
            assert!(parse(line).is_none(), "{line}");
        }
        let line = "7f0000-7f1000 r-xp 00001000 08:01 123   /lib/x.so";
        assert_eq!(
            mapping(line),
            Some((0x7f_0000..0x7f_1000, ("08:01", "123")))
        );
    }

    /// Runs `wait` on another thread, waiting for a pipe; returns what was seen meanwhile.
    fn seen_during(wait: impl FnOnce(&OwnedFd) + Send) -> (RawFd, Vec<RawFd>) {
        let (reader, writer) = pipe().expect("descriptors");
        let (said, hears) = mpsc::channel();
        thread::scope(|scope| {
            let sleeper = &reader;
            scope.spawn(move || {
                said.send(crate::thread::number()).expect("it is heard");
                wait(sleeper);
            });
            let thread = hears.recv().expect("it says so");
            let until = Instant::now() + Duration::from_secs(10);
            let path = format!("/proc/self/task/{thread}/syscall");
            let is_asleep = || {
                fs::read_to_string(&path)
                    .ok()
                    .and_then(|line| parse(&line))
                    .is_some_and(|sleep| sleep.is_poll())
            };
            while !is_asleep() && Instant::now() < until {
                thread::yield_now();
            }
            let seen = polled_past_library();
            rustix::io::write(&writer, b"!").expect("there is room");
            (reader.as_raw_fd(), seen)
        })
    }

    fn entry(fd: &OwnedFd) -> libc::pollfd {
        pollfd(fd.as_raw_fd(), libc::POLLIN)
    }

    #[test]
    fn who_polls_by_other_code_is_seen() {
        let (fd, seen) = seen_during(|fd| {
            let mut entries = [entry(fd)];
            // SAFETY: one entry.
            unsafe { libc::poll(entries.as_mut_ptr(), 1, -1) };
        });
        assert!(seen.contains(&fd), "{seen:?}");
        let (fd, seen) = seen_during(|fd| {
            let fd = fd.as_raw_fd();
            // SAFETY: zeros are an empty set, and the number is within it.
            unsafe {
                let mut set: libc::fd_set = std::mem::zeroed();
                libc::FD_SET(fd, &mut set);
                let none = std::ptr::null_mut();
                libc::select(fd + 1, &mut set, none, none, std::ptr::null_mut());
            }
        });
        assert!(seen.contains(&fd), "{seen:?}");
    }

    #[test]
    fn who_polls_by_this_code_is_not() {
        let (fd, seen) = seen_during(|fd| {
            ppoll(&mut [entry(fd)], None, None).expect("it comes");
        });
        assert!(!seen.contains(&fd), "{seen:?}");
    }

    #[test]
    fn what_cannot_be_read_is_nothing() {
        assert_eq!(copy_words(8, 4), [0_u64; 0]);
        assert_eq!(copy_words(usize::MAX - 7, 4), [0_u64; 0]);
        let words = [7_u64, 9];
        assert_eq!(copy_words(words.as_ptr().expose_provenance(), 2), words);
        assert_eq!(set_bits(&[1 << 5, 1]), [5, 64]);
    }
}
