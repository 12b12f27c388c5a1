//! Netlink sockets: rtnetlink's for events, and one for requests to rtnetlink or another family.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send,
    socket_with, sockopt,
};

use super::MonitorError;

/// The kernel fills at most 32 KiB per message of a dump.
const BUFFER: usize = 64 * 1024;

/// Size of the event queue in bytes; if it is full, the kernel drops events and reports that.
const EVENT_BUFFER: usize = 1024 * 1024;

/// How often a dump is restarted because the table changed.
const ATTEMPTS: usize = 3;

/// Length of a message header; messages must not be shorter.
const HEADER: usize = 16;

/// Opens a socket of a netlink family; `None` is rtnetlink, number 0.
pub(super) fn open(flags: SocketFlags, family: Option<Protocol>) -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags | SocketFlags::CLOEXEC,
        family,
    )
}

/// Calls `each` with every message of one datagram. Messages that the parser cannot read are skipped:
/// tables hold entries that do not concern Portolan.
fn for_each_message<M: NetlinkDeserializable>(
    mut bytes: &[u8],
    mut each: impl FnMut(NetlinkMessage<M>),
) {
    while let Some(length) = bytes.first_chunk().map(|word| u32::from_ne_bytes(*word)) {
        let length = length as usize;
        if length < HEADER || length > bytes.len() {
            return;
        }
        if let Ok(message) = NetlinkMessage::deserialize(&bytes[..length]) {
            each(message);
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
}

/// The bit of a group that has no old name.
fn group(number: libc::c_uint) -> libc::c_int {
    1 << (number - 1)
}

/// A subscription to changes; never blocks.
#[derive(Debug)]
pub(super) struct Events {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl Events {
    pub(super) fn subscribe() -> Result<Events, MonitorError> {
        let fd = open(SocketFlags::NONBLOCK, None).map_err(MonitorError::Open)?;
        // If the kernel grants less, a storm of changes causes one more reading of the tables.
        let _ = sockopt::set_socket_recv_buffer_size_force(&fd, EVENT_BUFFER);
        let groups = libc::RTMGRP_LINK
            | libc::RTMGRP_NEIGH
            | libc::RTMGRP_IPV4_IFADDR
            | libc::RTMGRP_IPV4_ROUTE
            | libc::RTMGRP_IPV6_IFADDR
            | libc::RTMGRP_IPV6_ROUTE
            | group(libc::RTNLGRP_IPV4_RULE)
            | group(libc::RTNLGRP_IPV6_RULE);
        bind(&fd, &SocketAddrNetlink::new(0, groups as u32)).map_err(MonitorError::Subscribe)?;
        Ok(Events {
            fd,
            buffer: vec![0; BUFFER],
        })
    }

    /// Receives one datagram of events; `AGAIN` if there is none, `NOBUFS` if events were lost.
    pub(super) fn next(&mut self, mut each: impl FnMut(&RouteNetlinkMessage)) -> Result<(), Errno> {
        let (length, _) = recv(&self.fd, &mut self.buffer[..], RecvFlags::empty())?;
        for_each_message(&self.buffer[..length], |message| {
            if let NetlinkPayload::InnerMessage(event) = message.payload {
                each(&event);
            }
        });
        Ok(())
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A socket for requests, which the kernel answers at once.
#[derive(Debug)]
pub(crate) struct Requests {
    fd: OwnedFd,
    buffer: Vec<u8>,
    sequence: u32,
}

/// The result of one datagram of answers.
enum Progress {
    More,
    /// The answer is complete; the table may have changed during the dump.
    Done {
        interrupted: bool,
    },
}

impl Requests {
    /// A socket that the kernel never answers.
    #[cfg(test)]
    pub(super) fn broken() -> Requests {
        let fd = socket_with(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        );
        Requests {
            fd: fd.expect("there are descriptors"),
            buffer: Vec::new(),
            sequence: 0,
        }
    }

    pub(super) fn open() -> Result<Requests, Errno> {
        Requests::to(None)
    }

    /// A socket for requests to a netlink family; `None` is rtnetlink.
    pub(crate) fn to(family: Option<Protocol>) -> Result<Requests, Errno> {
        Ok(Requests {
            fd: open(SocketFlags::empty(), family)?,
            buffer: vec![0; BUFFER],
            sequence: 0,
        })
    }

    /// Reads a whole table; returns what `parse` makes of its entries.
    pub(crate) fn dump<M, T>(
        &mut self,
        request: &M,
        parse: fn(&M) -> Option<T>,
    ) -> Result<Vec<T>, Errno>
    where
        M: NetlinkSerializable + NetlinkDeserializable + Clone,
    {
        for _ in 0..ATTEMPTS {
            self.send(request.clone(), NLM_F_DUMP)?;
            let mut entries = Vec::new();
            let mut disturbed = false;
            loop {
                let answers = self.receive(&mut disturbed, |entry: &M| {
                    entries.extend(parse(entry));
                })?;
                if let Progress::Done { interrupted } = answers {
                    disturbed |= interrupted;
                    break;
                }
            }
            if !disturbed {
                return Ok(entries);
            }
        }
        Err(Errno::BUSY)
    }

    /// Sends `request`, creating what it names, and waits for the acknowledgement.
    pub(super) fn acknowledged(&mut self, request: RouteNetlinkMessage) -> Result<(), Errno> {
        self.send(request, NLM_F_ACK | NLM_F_CREATE)?;
        while let Progress::More = self.receive(&mut false, |_: &RouteNetlinkMessage| {})? {}
        Ok(())
    }

    fn send<M: NetlinkSerializable>(&mut self, request: M, flags: u16) -> Result<(), Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        send(&self.fd, &bytes, SendFlags::empty()).map(drop)
    }

    /// Receives one datagram of answers to the last request.
    fn receive<M: NetlinkDeserializable>(
        &mut self,
        disturbed: &mut bool,
        mut each: impl FnMut(&M),
    ) -> Result<Progress, Errno> {
        let (length, _) = recv(&self.fd, &mut self.buffer[..], RecvFlags::empty())?;
        let sequence = self.sequence;
        let mut progress = Ok(Progress::More);
        for_each_message(&self.buffer[..length], |message: NetlinkMessage<M>| {
            // An answer to an earlier request that was abandoned.
            if message.header.sequence_number != sequence {
                return;
            }
            let interrupted = message.header.flags & NLM_F_DUMP_INTR != 0;
            *disturbed |= interrupted;
            match message.payload {
                NetlinkPayload::InnerMessage(entry) => each(&entry),
                // A dump that fails after it has begun ends with the error, as a negative number.
                NetlinkPayload::Done(done) if done.code < 0 => {
                    progress = Err(Errno::from_raw_os_error(done.code.saturating_neg()));
                }
                NetlinkPayload::Done(_) => progress = Ok(Progress::Done { interrupted }),
                NetlinkPayload::Error(error) => {
                    progress = match error.code {
                        None => Ok(Progress::Done { interrupted }),
                        Some(code) => Err(Errno::from_raw_os_error(code.get().saturating_neg())),
                    }
                }
                _ => {}
            }
        });
        progress
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    /// The kernel is trusted, but not the parser, which is of another crate and must handle the messages
    /// of future kernels.
    #[test]
    fn no_bytes_make_the_parsers_panic() {
        portolan_fuzz::check!(3000)
            .with_type::<(Vec<(u8, Vec<u8>)>, u8)>()
            .for_each(|(messages, tail)| {
                let mut datagram = Vec::new();
                for (kind, body) in messages.iter().take(8) {
                    // RTM_NEWLINK is 16, RTM_NEWNEIGH 28, RTM_NEWRULE 32.
                    let kind = 16 + u16::from(kind % 17);
                    datagram.extend(((HEADER + body.len()) as u32).to_ne_bytes());
                    datagram.extend(kind.to_ne_bytes());
                    datagram.extend([0; 10]);
                    datagram.extend(body);
                    datagram.resize(datagram.len().next_multiple_of(4), 0);
                }
                datagram.extend(vec![1; usize::from(tail % 32)]);
                for_each_message(&datagram, |message: NetlinkMessage<RouteNetlinkMessage>| {
                    if let NetlinkPayload::InnerMessage(entry) = message.payload {
                        let _ = parse::link(&entry);
                        let _ = parse::address(&entry);
                        let _ = parse::route(&entry).map(|ranked| parse::route_order(&ranked));
                        let _ = parse::neighbour(&entry);
                        let _ = parse::rule(&entry);
                    }
                });
            });
    }
}
