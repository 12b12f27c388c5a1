//! rtnetlink messages of traffic control, encoded by hand.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::netlink;

pub(super) const CREATE: u16 = 0x400;
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const DUMP: u16 = 0x300;
/// The table changed while it was read.
const INTERRUPTED: u16 = 0x10;

const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Bytes of `nlmsghdr` and `tcmsg`.
const HEADER: usize = 16;
const TC_HEADER: usize = 20;
const ATTRIBUTE: usize = 4;
/// Flag bits of an attribute's type are outside this mask.
const TYPE_MASK: u16 = 0x3fff;

const ATTEMPTS: usize = 10;
/// The kernel fills at most 32 KiB per message of a dump.
const BUFFER: usize = 64 << 10;

/// The fields of `tcmsg` that are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub ifindex: u32,
    pub handle: u32,
    pub parent: u32,
}

/// Attributes to send.
#[derive(Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn with(mut self, kind: u16, bytes: &[u8]) -> Attributes {
        // The data is a few hundred bytes, or was received in an attribute.
        let length = (ATTRIBUTE + bytes.len()) as u16;
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Received attributes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    /// The bytes of an attribute; empty if it is missing.
    pub(super) fn bytes(&self, kind: u16) -> &'a [u8] {
        let mut rest = self.0;
        while let Some((found, bytes, after)) = next_attribute(rest) {
            if found == kind {
                return bytes;
            }
            rest = after;
        }
        &[]
    }

    pub(super) fn nested(&self, kind: u16) -> Reader<'a> {
        Reader(self.bytes(kind))
    }

    pub(super) fn text(&self, kind: u16) -> String {
        let bytes = self.bytes(kind);
        let end = bytes
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

fn next_attribute(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
    let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & TYPE_MASK;
    let value = bytes.get(ATTRIBUTE..length)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    Some((kind, value, rest))
}

/// A socket on which every request is answered before the next.
#[derive(Debug)]
pub(super) struct Kernel {
    fd: OwnedFd,
    buffer: Vec<u8>,
    sequence: u32,
}

impl Kernel {
    pub(super) fn open() -> Result<Kernel, Errno> {
        Ok(Kernel {
            fd: netlink::request_socket()?,
            buffer: vec![0; BUFFER],
            sequence: 0,
        })
    }

    /// Creates, changes or removes an object. `names` are its handle and its parent's.
    pub(super) fn change(
        &mut self,
        kind: u16,
        flags: u16,
        ifindex: u32,
        names: (u32, u32),
        attributes: &[u8],
    ) -> Result<(), Errno> {
        self.send(kind, flags | ACKNOWLEDGE, ifindex, names, attributes)?;
        self.answers(|_, _| ()).map(drop)
    }

    /// Reads a whole table of a device.
    pub(super) fn dump(
        &mut self,
        kind: u16,
        ifindex: u32,
        parent: u32,
        mut each: impl FnMut(&Header, &Reader<'_>),
    ) -> Result<(), Errno> {
        for _ in 0..ATTEMPTS {
            self.send(kind, DUMP, ifindex, (0, parent), &[])?;
            let mut entries: Vec<(Header, Vec<u8>)> = Vec::new();
            let disturbed =
                self.answers(|header, bytes| entries.push((*header, bytes.to_vec())))?;
            if !disturbed {
                for (header, bytes) in &entries {
                    each(header, &Reader(bytes));
                }
                return Ok(());
            }
        }
        Err(Errno::BUSY)
    }

    fn send(
        &mut self,
        kind: u16,
        flags: u16,
        ifindex: u32,
        (handle, parent): (u32, u32),
        attributes: &[u8],
    ) -> Result<(), Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = (HEADER + TC_HEADER + attributes.len()) as u32;
        let mut bytes = Vec::with_capacity(length as usize);
        bytes.extend(length.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((REQUEST | flags).to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        // The kernel fills in the port; the family is unspecified.
        for word in [0, 0, ifindex, handle, parent, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(attributes);
        send(&self.fd, &bytes, SendFlags::empty()).map(drop)
    }

    /// Receives all answers to the last request; returns whether the table changed meanwhile.
    fn answers(&mut self, mut each: impl FnMut(&Header, &[u8])) -> Result<bool, Errno> {
        let mut disturbed = false;
        loop {
            let (length, _) = recv(&self.fd, &mut self.buffer[..], RecvFlags::empty())?;
            let mut rest = &self.buffer[..length.min(BUFFER)];
            while let Some((message, after)) = next_message(rest) {
                rest = after;
                if message.sequence != self.sequence {
                    continue;
                }
                disturbed |= message.flags & INTERRUPTED != 0;
                match message.kind {
                    DONE => return Ok(disturbed),
                    ERROR => return error_of(message.body).map(|()| disturbed),
                    _ => {
                        if let Some((header, attributes)) = split(message.body) {
                            each(&header, attributes);
                        }
                    }
                }
            }
        }
    }
}

struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

fn next_message(bytes: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let length = word(bytes, 0)? as usize;
    let body = bytes.get(HEADER..length)?;
    let kinds = word(bytes, 4)?.to_ne_bytes();
    let message = Message {
        kind: u16::from_ne_bytes([kinds[0], kinds[1]]),
        flags: u16::from_ne_bytes([kinds[2], kinds[3]]),
        sequence: word(bytes, 8)?,
        body,
    };
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    Some((message, rest))
}

fn error_of(body: &[u8]) -> Result<(), Errno> {
    match word(body, 0).unwrap_or(0) as i32 {
        0 => Ok(()),
        code => Err(Errno::from_raw_os_error(code.saturating_neg())),
    }
}

fn split(body: &[u8]) -> Option<(Header, &[u8])> {
    let header = Header {
        ifindex: word(body, 4)?,
        handle: word(body, 8)?,
        parent: word(body, 12)?,
    };
    Some((header, body.get(TC_HEADER..)?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_make_the_reader_panic_or_stay() {
        portolan_fuzz::check!(3000)
            .with_type::<Vec<u8>>()
            .for_each(|bytes| {
                let mut rest = bytes.as_slice();
                while let Some((message, after)) = next_message(rest) {
                    assert!(after.len() < rest.len());
                    if let Some((_, attributes)) = split(message.body) {
                        let _ = super::super::counts_of(&Reader(attributes));
                        let _ = Reader(attributes).text(1);
                    }
                    rest = after;
                }
            });
    }
}
