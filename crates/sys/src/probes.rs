//! Static probes (USDT) at the boundaries of the library's layers, and a file in which a program sums up the time
//! between them.
//!
//! A probe is one no-operation and a note in the ELF file with its address (version 3 of SystemTap's `.note.stapsdt`,
//! which perf, bpftrace and debuggers read). Arguments stay where they are: the note names their registers. Callers pass
//! values that they have at hand, so that nothing is computed for a probe.
//!
//! The no-operation has one byte, which a tracer replaces by a trap. Linux 6.18 replaces five bytes by a call of a page
//! that children of fork do not get: they crash at their next probe.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{Mode, OFlags, ftruncate, open};
use rustix::io::Errno;

use crate::mapping::{Mapping, page_size};

macro_rules! probes {
    ($($(#[$doc:meta])* $name:ident($($first:ident $(, $rest:ident)*)?),)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            pub fn $name($($first: u64 $(, $rest: u64)*)?) {
                probe::probe!(portolan, $name $(, $first $(, $rest)*)?);
            }
        )*

        /// The names of all probes.
        pub const NAMES: &[&str] = &[$(stringify!($name),)*];
    };
}

probes! {
    /// A call of the program begins.
    call(),
    /// A call has taken bytes from a socket, by its descriptor.
    received(fd, bytes),
    /// A call has given bytes to a socket, by its descriptor.
    sent(fd, bytes),
    /// Bytes move between the program and a session.
    copy(),
    /// The channel is polled for frames.
    ring(),
    /// A frame is passed to the stack: the address of its record's header, in which the slot is at offset 8; its length;
    /// its address, at which the Ethernet header begins.
    input(record, length, frame),
    /// Sessions are polled for output.
    output(),
    /// A frame is passed to the kernel: the address of its headers, which begin with the virtio-net header.
    device(headers),
    /// The thread goes to sleep, and wakes up.
    sleep(),
    wake_up(),
    /// A session has arrived in the program.
    arrived(session, slot),
    /// The server has moved a session to a process, by its channel; received it from one, with the size of its capsule;
    /// asked its holder to give it back.
    cached(session, channel, slot),
    flushed(session, channel, bytes),
    recalled(session, channel),
}

/// Size of a row: nanoseconds and count.
const ROW: usize = 16;

/// Sums of time, in a file that others may read at any time.
#[derive(Debug)]
pub struct Totals {
    page: Mapping,
}

impl Totals {
    pub fn most() -> usize {
        page_size() / ROW
    }

    /// Creates or truncates the file at `path`, and starts from zero.
    ///
    /// # Errors
    /// If the file cannot be written or mapped.
    pub fn create(path: &Path) -> Result<Totals, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = open(path, flags, Mode::RUSR | Mode::WUSR)?;
        ftruncate(&file, 0)?;
        ftruncate(&file, page_size() as u64)?;
        let page = Mapping::read_write(std::os::fd::AsFd::as_fd(&file), 0, page_size())?;
        Ok(Totals { page })
    }

    /// # Panics
    /// If there are not as many rows.
    pub fn add(&self, row: usize, nanoseconds: u64) {
        self.page.u64_at(row * ROW).fetch_add(nanoseconds, Relaxed);
        self.page.u64_at(row * ROW + 8).fetch_add(1, Relaxed);
    }
}

/// Parses a file written by [`Totals`]: nanoseconds and count of each row.
pub fn read_totals(bytes: &[u8]) -> Vec<(u64, u64)> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    bytes
        .chunks_exact(ROW)
        .map(|row| (number(&row[..8]), number(&row[8..])))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fires all probes, so that they are in this file.
    #[inline(never)]
    fn fire() {
        call();
        received(1, 2);
        sent(1, 2);
        copy();
        ring();
        input(1, 2, 3);
        output();
        device(1);
        sleep();
        wake_up();
        arrived(1, 2);
        cached(1, 2, 3);
        flushed(1, 2, 3);
        recalled(1, 2);
    }

    /// Returns the arguments in the note of a probe, whose layout is as readers expect it.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn arguments(file: &[u8], name: &str) -> String {
        let names = format!("portolan\0{name}\0");
        let mut windows = file.windows(names.len());
        // Behind the version's strings is the note, with the owner, address, base and semaphore before the names.
        let at = windows.position(|at| at == names.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{name} has no note"));
        let owner = at - 24 - 8;
        assert_eq!(&file[owner..owner + 8], b"stapsdt\0", "{name}");
        let place = u64::from_ne_bytes(file[owner + 8..owner + 16].try_into().unwrap());
        assert_ne!(place, 0, "{name}");
        let arguments = &file[at + names.len()..];
        let end = arguments.iter().position(|&byte| byte == 0).unwrap();
        String::from_utf8(arguments[..end].to_vec()).unwrap()
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn every_probe_is_noted_in_the_file_with_its_arguments() {
        fire();
        let file = std::fs::read("/proc/self/exe").unwrap();
        for name in NAMES {
            let arguments = arguments(&file, name);
            let registers: Vec<&str> = arguments.split_whitespace().collect();
            let expected = match *name {
                "received" | "sent" | "arrived" | "recalled" => 2,
                "input" | "cached" | "flushed" => 3,
                "device" => 1,
                _ => 0,
            };
            assert_eq!(registers.len(), expected, "{name}: {arguments}");
            let are_whole = registers.iter().all(|one| one.starts_with("-8@"));
            assert!(are_whole, "{name}: {arguments}");
        }
    }

    #[test]
    fn sums_are_read_where_they_were_written() {
        let path = std::env::temp_dir().join(format!("portolan-totals-{}", std::process::id()));
        let totals = Totals::create(&path).unwrap();
        totals.add(0, 5);
        totals.add(3, 7);
        totals.add(3, 8);
        let read = read_totals(&std::fs::read(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            (read.len(), read[0], read[3]),
            (Totals::most(), (5, 1), (15, 2))
        );
    }
}
