//! One of Portolan's programs at tc ingress of one device: a cls_bpf filter of fixed handle and priority
//! on the clsact qdisc, beside the filters of others, which it never touches.
//!
//! TCX would save a look-up per frame. But it precedes the filters of others on a managed device, and attaching to a
//! tap waits for RCU readers while holding the lock that all devices share: programs started ten times slower.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use libbpf_rs::{TC_EGRESS, TC_H_CLSACT, TC_H_MIN_EGRESS, TC_H_MIN_INGRESS, TC_INGRESS, TcHook};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::AttachError;

/// "port": distinguishes Portolan's filter from those of others.
const HANDLE: u32 = 0x706f_7274;
/// After most others, so that theirs see every frame.
const PRIORITY: u32 = 0x706f;

/// Maximum size of the kernel's datagrams in a dump.
const LARGEST_DATAGRAM: usize = 32 * 1024;

/// Events of qdiscs, classes and filters (RTNLGRP_TC, as a mask).
const TC_GROUP: u32 = 1 << 3;

/// Events taken at a time: further ones wake up again.
const EVENTS_MAX: usize = 256;

/// An attached program.
#[derive(Debug)]
pub(crate) struct Hook {
    ifindex: u32,
    /// The clsact qdisc was created for this hook.
    owns_qdisc: bool,
}

impl Hook {
    /// Attaches `program`. Replaces what a dead server left under the same handle.
    pub(crate) fn attach(program: BorrowedFd<'_>, ifindex: u32) -> Result<Hook, AttachError> {
        let unanswered = |source| AttachError::Netlink { ifindex, source };
        if !has_ingress_qdisc(ifindex).map_err(unanswered)? {
            return Hook::attach_to_new(program, ifindex);
        }
        // If there is a leftover of Portolan, an earlier server created the qdisc.
        let owns_qdisc = filters(ifindex, TC_H_MIN_INGRESS)
            .map_err(unanswered)?
            .iter()
            .any(is_ours);
        replace_filter(program, ifindex)?;
        Ok(Hook {
            ifindex,
            owns_qdisc,
        })
    }

    /// Attaches `program` to a device without a qdisc for it.
    pub(crate) fn attach_to_new(
        program: BorrowedFd<'_>,
        ifindex: u32,
    ) -> Result<Hook, AttachError> {
        prepare(program, ifindex)?;
        Hook::attach_to_prepared(program, ifindex)
    }

    /// Attaches `program` to a device that [`prepare`] has prepared.
    pub(crate) fn attach_to_prepared(
        program: BorrowedFd<'_>,
        ifindex: u32,
    ) -> Result<Hook, AttachError> {
        replace_filter(program, ifindex)?;
        Ok(Hook {
            ifindex,
            owns_qdisc: true,
        })
    }

    /// Removes the program, and the qdisc if it was created for it and nobody else uses it.
    pub(crate) fn detach(self, program: BorrowedFd<'_>) -> Result<(), AttachError> {
        let ifindex = self.ifindex;
        let refused = |source| AttachError::Filter { ifindex, source };
        let mut hook = tc_hook(program, ifindex);
        hook.detach().map_err(refused)?;
        let in_use =
            is_in_use(ifindex).map_err(|source| AttachError::Netlink { ifindex, source })?;
        if self.owns_qdisc && !in_use {
            // With both attach points named, libbpf removes the qdisc itself.
            hook.attach_point(TC_INGRESS | TC_EGRESS)
                .destroy()
                .map_err(refused)?;
        }
        Ok(())
    }
}

/// Whether the filter is attached. A network administrator can remove it: `tc qdisc del dev eth0 clsact`.
pub fn is_attached(ifindex: u32) -> io::Result<bool> {
    Ok(filters(ifindex, TC_H_MIN_INGRESS)?.iter().any(is_ours))
}

/// Returns the number of the program that is attached, if there is one.
pub(crate) fn attached_program(ifindex: u32) -> io::Result<Option<u32>> {
    if !is_attached(ifindex)? {
        return Ok(None);
    }
    // A question names no program.
    let stderr = io::stderr();
    let found = tc_hook(stderr.as_fd(), ifindex).query();
    found.map(Some).map_err(io::Error::other)
}

/// Becomes readable when qdiscs or filters of the network namespace have changed.
#[derive(Debug)]
pub struct HookEvents(OwnedFd);

impl HookEvents {
    pub fn new() -> io::Result<HookEvents> {
        let socket = netlink_socket()?;
        net::bind(&socket, &SocketAddrNetlink::new(0, TC_GROUP))?;
        Ok(HookEvents(socket))
    }

    /// Discards pending events, and the report of lost ones.
    pub fn drain(&self) {
        for _ in 0..EVENTS_MAX {
            match net::recv(&self.0, &mut [0; 1], RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::NOBUFS) => {}
                Err(_) => return,
            }
        }
    }
}

impl AsFd for HookEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Gives a device the qdisc to which a program is attached. If the device is up, the kernel deactivates it meanwhile.
pub(crate) fn prepare(program: BorrowedFd<'_>, ifindex: u32) -> Result<(), AttachError> {
    let refused = |source| AttachError::Filter { ifindex, source };
    tc_hook(program, ifindex).create().map_err(refused)?;
    Ok(())
}

/// Attaches `program`, in place of the one that is attached.
fn replace_filter(program: BorrowedFd<'_>, ifindex: u32) -> Result<(), AttachError> {
    let refused = |source| AttachError::Filter { ifindex, source };
    let attached = tc_hook(program, ifindex).replace(true).attach();
    attached.map(drop).map_err(refused)
}

fn tc_hook(program: BorrowedFd<'_>, ifindex: u32) -> TcHook {
    let mut hook = TcHook::new(program);
    hook.ifindex(ifindex as i32)
        .attach_point(TC_INGRESS)
        .handle(HANDLE)
        .priority(PRIORITY);
    hook
}

fn has_ingress_qdisc(ifindex: u32) -> io::Result<bool> {
    let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    Ok(dump(request)?.iter().any(|reply| match reply {
        RouteNetlinkMessage::NewQueueDiscipline(qdisc) => {
            qdisc.header.index == ifindex as i32 && is_ingress(qdisc)
        }
        _ => false,
    }))
}

fn is_ingress(qdisc: &TcMessage) -> bool {
    qdisc.attributes.iter().any(
        |attribute| matches!(attribute, TcAttribute::Kind(kind) if kind == "clsact" || kind == "ingress"),
    )
}

fn is_ours(filter: &TcMessage) -> bool {
    // The upper half of this field is the priority.
    filter.header.handle == TcHandle::from(HANDLE) && filter.header.info >> 16 == PRIORITY
}

/// Whether anybody's filter is on the device's clsact qdisc.
fn is_in_use(ifindex: u32) -> io::Result<bool> {
    Ok(!filters(ifindex, TC_H_MIN_INGRESS)?.is_empty()
        || !filters(ifindex, TC_H_MIN_EGRESS)?.is_empty())
}

fn filters(ifindex: u32, attach_point: u32) -> io::Result<Vec<TcMessage>> {
    let mut message = TcMessage::with_index(ifindex as i32);
    message.header.parent = TcHandle::from(TC_H_CLSACT & 0xffff_0000 | attach_point);
    let replies = dump(RouteNetlinkMessage::GetTrafficFilter(message))?;
    Ok(replies
        .into_iter()
        .filter_map(|reply| match reply {
            RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter),
            _ => None,
        })
        .collect())
}

/// All replies to a dump request.
fn dump(request: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let socket = netlink_socket()?;
    net::connect(&socket, &SocketAddrNetlink::new(0, 0))?;
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    net::send(&socket, &bytes, SendFlags::empty())?;

    let mut replies = Vec::new();
    let mut datagram = vec![0; LARGEST_DATAGRAM];
    loop {
        let (length, _) = net::recv(&socket, &mut datagram, RecvFlags::empty())?;
        if take_replies(&datagram[..length.min(LARGEST_DATAGRAM)], &mut replies)? {
            return Ok(replies);
        }
    }
}

fn netlink_socket() -> Result<OwnedFd, Errno> {
    // Protocol 0 of this family is NETLINK_ROUTE.
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
}

/// Returns whether the dump is complete.
fn take_replies(mut datagram: &[u8], replies: &mut Vec<RouteNetlinkMessage>) -> io::Result<bool> {
    while !datagram.is_empty() {
        let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(datagram)
            .map_err(io::Error::other)?;
        match reply.payload {
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::InnerMessage(inner) => replies.push(inner),
            _ => {}
        }
        // Messages are padded to four bytes.
        let length = (reply.header.length as usize).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or(&[]);
    }
    Ok(false)
}
