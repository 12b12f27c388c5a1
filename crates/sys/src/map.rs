//! A BPF map of an extension, accessed by its owner through the descriptor that the server passed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Commands of bpf(2).
const LOOKUP: i64 = 1;
const UPDATE: i64 = 2;
const DELETE: i64 = 3;

/// The part of `union bpf_attr` that these commands use.
#[repr(C)]
struct Attributes {
    fd: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// A map whose keys and values are bytes.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    key: usize,
    value: usize,
}

impl Map {
    /// `key` and `value` are their sizes in bytes.
    pub fn new(fd: OwnedFd, key: u32, value: u32) -> Map {
        Map {
            fd,
            key: key as usize,
            value: value as usize,
        }
    }

    /// Looks up an entry; `ENOENT` if there is none.
    pub fn get(&self, key: &[u8]) -> Result<Vec<u8>, Errno> {
        // The kernel rounds up the size, and writes the values of all CPUs if the map is per CPU.
        let room = self.value.next_multiple_of(8) * processors();
        let mut value = vec![0; room];
        self.call(LOOKUP, key, value.as_mut_ptr() as u64)?;
        value.truncate(self.value);
        Ok(value)
    }

    pub fn set(&self, key: &[u8], value: &[u8]) -> Result<(), Errno> {
        if value.len() != self.value {
            return Err(Errno::INVAL);
        }
        // As in `get`: the values of all CPUs are set alike.
        let width = self.value.next_multiple_of(8);
        let mut all = vec![0; width * processors()];
        for one in all.chunks_mut(width.max(1)) {
            one[..value.len()].copy_from_slice(value);
        }
        self.call(UPDATE, key, all.as_ptr() as u64)
    }

    pub fn remove(&self, key: &[u8]) -> Result<(), Errno> {
        self.call(DELETE, key, 0)
    }

    fn call(&self, command: i64, key: &[u8], value: u64) -> Result<(), Errno> {
        if key.len() != self.key {
            return Err(Errno::INVAL);
        }
        let attributes = Attributes {
            fd: self.fd.as_raw_fd().cast_unsigned(),
            reserved: 0,
            key: key.as_ptr() as u64,
            value,
            flags: 0,
        };
        // SAFETY: the kernel reads `self.key` bytes at the key, and reads or writes at the value as much
        // as a map of this shape has, for which the callers have allocated space. The server, which made
        // the map and reported its shape, is trusted to be right.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                &raw const attributes,
                size_of::<Attributes>(),
            )
        };
        match answer {
            0.. => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Number of possible CPUs.
fn processors() -> usize {
    static COUNT: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *COUNT.get_or_init(|| {
        let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible");
        let possible = possible.unwrap_or_default();
        let last = possible.trim().rsplit(['-', ',']).next();
        // Without /sys it is unknown; this is the kernel's maximum.
        last.and_then(|last| last.parse().ok())
            .map_or(8192, |last: usize| last + 1)
    })
}
