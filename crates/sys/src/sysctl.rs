//! Kernel parameters under `/proc/sys`, and ports reserved from the kernel.

use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, pread, read, write as write_fd};

/// The ports that the kernel does not choose by itself.
const RESERVED_PORTS: &str = "net/ipv4/ip_local_reserved_ports";

#[derive(Debug, thiserror::Error)]
#[error("cannot read /proc/sys/{name}: {errno}")]
pub struct ReadError {
    pub name: String,
    pub errno: Errno,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write /proc/sys/{name}: {errno}")]
pub struct WriteError {
    pub name: String,
    pub errno: Errno,
}

#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Reads parameter `name` (with slashes), trimmed; `net/…` is that of the calling thread's namespace.
pub fn read_value(name: &str) -> Result<String, ReadError> {
    let text = read_text(&format!("/proc/sys/{name}")).map_err(|errno| ReadError {
        name: name.to_owned(),
        errno,
    })?;
    Ok(text.trim().to_owned())
}

/// Writes parameter `name`.
pub fn write(name: &str, value: &str) -> Result<(), WriteError> {
    write_text(&format!("/proc/sys/{name}"), value).map_err(|errno| WriteError {
        name: name.to_owned(),
        errno,
    })
}

/// A parameter that is read repeatedly; refers to the namespace in which it was opened.
#[derive(Debug)]
pub struct Parameter {
    file: OwnedFd,
}

/// Longer values are not supported.
const SHORT: usize = 64;

impl Parameter {
    /// Opens parameter `name`, written as for [`read_value`].
    pub fn open(name: &str) -> Result<Parameter, ReadError> {
        let path = format!("/proc/sys/{name}");
        let opened = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let file = opened.map_err(|errno| ReadError {
            name: name.to_owned(),
            errno,
        })?;
        Ok(Parameter { file })
    }

    /// Its current value, a number.
    pub fn number(&self) -> Result<u32, Errno> {
        let mut text = [0; SHORT];
        let length = pread(&self.file, &mut text, 0)?;
        let text = std::str::from_utf8(&text[..length]).map_err(|_| Errno::ILSEQ)?;
        text.trim().parse().map_err(|_| Errno::RANGE)
    }
}

/// A range of ports that the kernel does not choose for its own sockets while this lives. Ports that
/// were already reserved stay reserved afterwards.
#[derive(Debug)]
pub struct ReservedPorts {
    added: PortSet,
}

impl ReservedPorts {
    /// Reserves `range` in the calling thread's network namespace.
    pub fn reserve(range: RangeInclusive<u16>) -> Result<ReservedPorts, ReserveError> {
        let mut ports = PortSet::parse(&read_value(RESERVED_PORTS)?);
        let added = ports.insert(range);
        write(RESERVED_PORTS, &ports.to_text())?;
        Ok(ReservedPorts { added })
    }

    /// The added ports as text, from which [`ReservedPorts::adopt`] restores the reservation.
    pub fn record(&self) -> String {
        self.added.to_text().trim().to_owned()
    }

    /// Takes over the reservation of a dead server from its record.
    pub fn adopt(record: &str) -> ReservedPorts {
        ReservedPorts {
            added: PortSet::parse(record),
        }
    }

    /// Ends the reservation; dropping does the same but cannot report a failure.
    pub fn release(mut self) -> Result<(), ReserveError> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), ReserveError> {
        if self.added.is_empty() {
            return Ok(());
        }
        let mut ports = PortSet::parse(&read_value(RESERVED_PORTS)?);
        ports.remove(&self.added);
        self.added = PortSet::default();
        Ok(write(RESERVED_PORTS, &ports.to_text())?)
    }
}

impl Drop for ReservedPorts {
    fn drop(&mut self) {
        // A failure leaves unused ports reserved, which is harmless.
        let _ = self.give_back();
    }
}

/// A set of ports in the kernel's format: `1,5-7`.
#[derive(Debug, Default, PartialEq, Eq)]
struct PortSet {
    ports: std::collections::BTreeSet<u16>,
}

impl PortSet {
    /// Skips anything that is not a port or range: the text comes from the kernel.
    fn parse(text: &str) -> PortSet {
        let words = text.split(',').filter_map(|word| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
        });
        PortSet {
            ports: words.flatten().collect(),
        }
    }

    /// Adds `range`; returns the ports that were new.
    fn insert(&mut self, range: RangeInclusive<u16>) -> PortSet {
        PortSet {
            ports: range.filter(|port| self.ports.insert(*port)).collect(),
        }
    }

    fn remove(&mut self, others: &PortSet) {
        self.ports.retain(|port| !others.ports.contains(port));
    }

    fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    fn to_text(&self) -> String {
        let mut ranges: Vec<(u16, u16)> = Vec::new();
        for &port in &self.ports {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == port => *last = port,
                _ => ranges.push((port, port)),
            }
        }
        let words = ranges.iter().map(|(first, last)| {
            if first == last {
                format!("{first}")
            } else {
                format!("{first}-{last}")
            }
        });
        // For "none" the kernel requires an empty line, not an empty write.
        words.collect::<Vec<_>>().join(",") + "\n"
    }
}

/// Reads a small file of `/proc`.
pub(crate) fn read_text(path: &str) -> Result<String, Errno> {
    let fd = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match read(&fd, &mut chunk)? {
            0 => return String::from_utf8(text).map_err(|_| Errno::ILSEQ),
            length => text.extend_from_slice(&chunk[..length]),
        }
    }
}

fn write_text(path: &str, text: &str) -> Result<(), Errno> {
    let fd = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    // Parameters are accepted as a whole or refused.
    write_fd(&fd, text.as_bytes()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_fresh_namespace;

    #[test]
    fn port_sets_read_and_write_as_the_kernel_does() {
        for text in ["\n", "5\n", "1,5-7,9\n", "65535\n", "1-65535\n"] {
            assert_eq!(PortSet::parse(text).to_text(), text);
        }
        assert!(PortSet::parse("x,7-,-3,9-2").is_empty());
    }

    #[test]
    fn ports_of_others_outlive_our_reservation() {
        in_fresh_namespace(|| {
            write(RESERVED_PORTS, "8080,40000-40010").unwrap();
            let reserved = ReservedPorts::reserve(40_005..=40_020).unwrap();
            let value = read_value(RESERVED_PORTS).unwrap();
            assert_eq!(value, "8080,40000-40020");
            reserved.release().unwrap();
            assert_eq!(read_value(RESERVED_PORTS).unwrap(), "8080,40000-40010");
        });
    }

    #[test]
    fn the_reservation_of_a_dead_server_can_be_ended_by_the_next() {
        in_fresh_namespace(|| {
            write(RESERVED_PORTS, "8080,40000-40010").unwrap();
            let reserved = ReservedPorts::reserve(40_005..=40_020).unwrap();
            let record = reserved.record();
            std::mem::forget(reserved);
            ReservedPorts::adopt(&record).release().unwrap();
            assert_eq!(read_value(RESERVED_PORTS).unwrap(), "8080,40000-40010");
        });
    }

    #[test]
    fn a_reservation_ends_when_it_is_dropped() {
        in_fresh_namespace(|| {
            drop(ReservedPorts::reserve(50_000..=50_001).unwrap());
            assert_eq!(read_value(RESERVED_PORTS).unwrap(), "");
        });
    }

    #[test]
    fn a_parameter_that_is_kept_open_tells_what_it_is_now() {
        in_fresh_namespace(|| {
            let parameter = Parameter::open("net/ipv4/tcp_ecn").unwrap();
            for value in [1, 0, 2] {
                write("net/ipv4/tcp_ecn", &value.to_string()).unwrap();
                assert_eq!(parameter.number(), Ok(value));
            }
        });
    }

    #[test]
    fn a_parameter_that_is_not_there_is_an_error() {
        assert_eq!(read_value("net/no/such").unwrap_err().errno, Errno::NOENT);
    }
}
