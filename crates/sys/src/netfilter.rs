//! Which rules of netfilter the sockets of this network namespace are subject to: the base chains of nftables (also
//! those that `iptables` makes there), and the tables of iptables' own kernel modules. Only whether there are rules is
//! read; the kernel applies them.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NlaBuffer, NlasIterator};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

/// The kernel fills at most 32 KiB per message of a dump.
const BUFFER: usize = 64 * 1024;

/// How often a dump is restarted because the ruleset changed.
const ATTEMPTS: usize = 3;

/// Lengths of `struct nlmsghdr` and `struct nfgenmsg`.
const HEADER: usize = 16;
const GENERIC: usize = 4;

/// Types of messages that end a dump.
const NLMSG_ERROR: u16 = libc::NLMSG_ERROR as u16;
const NLMSG_DONE: u16 = libc::NLMSG_DONE as u16;

const NFT_MSG_GETCHAIN: u16 = message(libc::NFT_MSG_GETCHAIN);
const NFT_MSG_NEWCHAIN: u16 = message(libc::NFT_MSG_NEWCHAIN);

// linux/netfilter/nf_tables.h
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_USE: u16 = 6;
const NFTA_HOOK_HOOKNUM: u16 = 1;

const NF_ACCEPT: u32 = 1;
const NF_NETDEV_EGRESS: u32 = 1;

/// The tables of iptables' own modules. The files exist while the modules are loaded.
const LEGACY: [&str; 2] = ["/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"];

const fn message(number: libc::c_int) -> u16 {
    (libc::NFNL_SUBSYS_NFTABLES << 8 | number) as u16
}

/// Whether a table of iptables' own modules is in use. The kernel does not report such changes.
pub fn has_legacy_tables() -> bool {
    LEGACY
        .iter()
        .any(|names| fs::read(names).is_ok_and(|names| !names.is_empty()))
}

/// The nftables of a network namespace: that of the thread that opened it.
#[derive(Debug)]
pub struct Nftables {
    events: OwnedFd,
    requests: OwnedFd,
    buffer: Vec<u8>,
    sequence: u32,
}

impl Nftables {
    /// Fails with `PROTONOSUPPORT` on a kernel without nftables.
    pub fn open() -> Result<Nftables, Errno> {
        let events = socket(SocketFlags::NONBLOCK)?;
        let group = 1 << (libc::NFNLGRP_NFTABLES - 1);
        bind(&events, &SocketAddrNetlink::new(0, group))?;
        Ok(Nftables {
            events,
            requests: socket(SocketFlags::empty())?,
            buffer: vec![0; BUFFER],
            sequence: 0,
        })
    }

    /// Discards pending events; each means that the ruleset has changed.
    pub fn drain(&mut self) {
        // Lost events end as an error, after which others may follow.
        while matches!(
            recv(&self.events, &mut self.buffer[..], RecvFlags::empty()),
            Ok(_) | Err(Errno::NOBUFS | Errno::INTR)
        ) {}
    }

    /// Whether a base chain sees packets of this host's sockets and has rules, or a policy other than `accept`.
    pub fn has_rules(&mut self) -> Result<bool, Errno> {
        for _ in 0..ATTEMPTS {
            self.ask_for_chains()?;
            if let Some(has_rules) = self.read_chains()? {
                return Ok(has_rules);
            }
        }
        Err(Errno::BUSY)
    }

    fn ask_for_chains(&mut self) -> Result<(), Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = Vec::with_capacity(HEADER + GENERIC);
        request.extend(((HEADER + GENERIC) as u32).to_ne_bytes());
        request.extend(NFT_MSG_GETCHAIN.to_ne_bytes());
        request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
        request.extend(self.sequence.to_ne_bytes());
        // Port number and `struct nfgenmsg`: of all families.
        request.resize(HEADER + GENERIC, 0);
        send(&self.requests, &request, SendFlags::empty()).map(drop)
    }

    /// Returns `None` if the ruleset changed in between.
    fn read_chains(&mut self) -> Result<Option<bool>, Errno> {
        let (mut has_rules, mut is_disturbed) = (false, false);
        loop {
            let (length, _) = recv(&self.requests, &mut self.buffer[..], RecvFlags::empty())?;
            for Message {
                kind,
                flags,
                body,
                sequence,
            } in messages(&self.buffer[..length])
            {
                // Of a dump that was abandoned.
                if sequence != self.sequence {
                    continue;
                }
                is_disturbed |= flags & NLM_F_DUMP_INTR != 0;
                match kind {
                    NLMSG_DONE => return Ok((!is_disturbed).then_some(has_rules)),
                    NLMSG_ERROR => return Err(error_of(body)),
                    NFT_MSG_NEWCHAIN => has_rules |= is_rule(body),
                    _ => {}
                }
            }
        }
    }
}

/// Readable when the ruleset has changed.
impl AsFd for Nftables {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags | SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )
}

struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages of one datagram.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let message = bytes.get(..length).filter(|_| length >= HEADER)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        let half = |at: usize| u16::from_ne_bytes([message[at], message[at + 1]]);
        Some(Message {
            kind: half(4),
            flags: half(6),
            sequence: u32::from_ne_bytes(*message[8..].first_chunk()?),
            body: &message[HEADER..],
        })
    })
}

/// `struct nlmsgerr` begins with the negative number.
fn error_of(body: &[u8]) -> Errno {
    let number = body.first_chunk().map(|word| i32::from_ne_bytes(*word));
    match number {
        Some(number @ -4095..0) => Errno::from_raw_os_error(-number),
        _ => Errno::PROTO,
    }
}

/// Whether a chain has an effect on packets of this host's sockets.
fn is_rule(body: &[u8]) -> bool {
    let Some((&[family, ..], attributes)) = body.split_at_checked(GENERIC) else {
        return false;
    };
    let mut hook = None;
    let (mut rules, mut policy) = (0, NF_ACCEPT);
    for attribute in NlasIterator::new(attributes).map_while(Result::ok) {
        match attribute.kind() {
            NFTA_CHAIN_HOOK => hook = hook_of(attribute.value()),
            NFTA_CHAIN_POLICY => policy = word(&attribute).unwrap_or(NF_ACCEPT),
            NFTA_CHAIN_USE => rules = word(&attribute).unwrap_or(0),
            _ => {}
        }
    }
    // Other chains are called by base chains.
    hook.is_some_and(|hook| sees_sockets(family, hook)) && (rules != 0 || policy != NF_ACCEPT)
}

fn hook_of(nested: &[u8]) -> Option<u32> {
    let mut attributes = NlasIterator::new(nested).map_while(Result::ok);
    let number = attributes.find(|attribute| attribute.kind() == NFTA_HOOK_HOOKNUM)?;
    word(&number)
}

fn word(attribute: &NlaBuffer<&[u8]>) -> Option<u32> {
    attribute
        .value()
        .first_chunk()
        .map(|word| u32::from_be_bytes(*word))
}

/// What Portolan's frames pass in any case, as those at a device's egress, is no concern; nor is what this host
/// forwards.
fn sees_sockets(family: u8, hook: u32) -> bool {
    match i32::from(family) {
        libc::NFPROTO_INET | libc::NFPROTO_IPV4 | libc::NFPROTO_IPV6 => {
            hook != libc::NF_INET_FORWARD as u32
        }
        libc::NFPROTO_NETDEV => hook != NF_NETDEV_EGRESS,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
