//! Memberships of multicast groups, in the many forms that `setsockopt` has for them. The server
//! joins on the kernel's socket; this module tracks which datagrams the session then receives.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use libc::{IPPROTO_IP, IPPROTO_IPV6};
use portolan_proto::control::{GroupAction, GroupChange, ReplyBody, RequestBody};
use portolan_stack::Memberships;
use portolan_sys::descriptor::set_socket_option;
use portolan_types::{Protocol, SessionId};
use rustix::io::Errno;

use crate::descriptors::InternalFd;
use crate::migration::fallback::new_kernel_socket;
use crate::outcome::{CallError, Outcome, refusal};
use crate::process::Process;
use crate::socket::{Socket, SocketPhase};

/// linux/in.h: `MCAST_JOIN_GROUP` and the five that follow.
const MCAST: std::ops::RangeInclusive<i32> = 42..=47;

/// Handles a membership option; returns `None` if it is another option.
pub(super) fn set_membership(
    process: &'static Process,
    socket: &Arc<Socket>,
    level: i32,
    name: i32,
    value: &[u8],
) -> Option<Outcome<()>> {
    let is_membership = match level {
        IPPROTO_IP => matches!(name, 35..=40) || MCAST.contains(&name),
        IPPROTO_IPV6 => matches!(name, 20 | 21) || MCAST.contains(&name),
        _ => false,
    };
    if !is_membership {
        return None;
    }
    if socket.protocol == Protocol::Tcp {
        return Some(set_on_stream(socket, level, name, value));
    }
    let change = parse(process, level, name, value).map_err(CallError::from);
    Some(change.and_then(|change| make(process, socket, change)))
}

/// A stream receives nothing from groups, but Linux has the host join them all the same, except for the oldest options.
fn set_on_stream(socket: &Socket, level: i32, name: i32, value: &[u8]) -> Outcome<()> {
    let is_oldest = match level {
        IPPROTO_IP => matches!(name, 35 | 36),
        _ => matches!(name, 20 | 21),
    };
    if is_oldest {
        return Err(Errno::PROTO.into());
    }
    let mut datagrams = socket.datagrams();
    let member = match &mut datagrams.kernel_socket {
        Some(member) => member,
        none => none.insert(InternalFd::new(new_kernel_socket(socket)?)),
    };
    Ok(set_socket_option(member, level, name, value)?)
}

fn make(process: &'static Process, socket: &Arc<Socket>, change: GroupChange) -> Outcome<()> {
    if !change.group.is_multicast() {
        return Err(Errno::INVAL.into());
    }
    let session = socket.setup().session;
    match (socket.phase(), session) {
        (SocketPhase::Cached, Some(session)) => tell_server(process, socket, session, change),
        (SocketPhase::Idle, _) => {
            note_early(process, socket, change)?;
            Ok(())
        }
        _ => Err(CallError::NotOurs),
    }
}

/// Keeps a change until the socket has a port; it is checked as far as possible.
fn note_early(process: &Process, socket: &Socket, change: GroupChange) -> Result<(), Errno> {
    let core = process.lock();
    let has_device = match change.interface {
        0 => core.routes.multicast_interface(change.group).is_some(),
        index => core.routes.has_interface(index),
    };
    drop(core);
    if !has_device {
        return Err(Errno::NODEV);
    }
    let mut datagrams = socket.datagrams();
    let early = &mut datagrams.joined_early;
    let of_group =
        |known: &&GroupChange| known.group == change.group && known.interface == change.interface;
    // Changes of single sources end no membership here.
    let is_member = early
        .iter()
        .filter(of_group)
        .rfind(|known| known.source.is_none() || known.action == GroupAction::Join)
        .is_some_and(|known| known.action == GroupAction::Join);
    match change.action {
        GroupAction::Join if is_member && change.source.is_none() => return Err(Errno::ADDRINUSE),
        GroupAction::Leave if !is_member => return Err(Errno::ADDRNOTAVAIL),
        _ => early.push(change),
    }
    Ok(())
}

/// Makes the kept changes, when the session has a port.
pub(super) fn join_early_groups(process: &'static Process, socket: &Arc<Socket>, id: SessionId) {
    let early = std::mem::take(&mut socket.datagrams().joined_early);
    for change in early {
        // The program's call has succeeded: no call is left to report a failure.
        let _ = tell_server(process, socket, id, change);
    }
}

fn tell_server(
    process: &'static Process,
    socket: &Arc<Socket>,
    session: SessionId,
    change: GroupChange,
) -> Outcome<()> {
    let request = RequestBody::Group { session, change };
    let interface = match process.control.call(request, &[]) {
        Ok((ReplyBody::Joined { interface }, _)) => interface,
        other => return Err(refusal(other)),
    };
    let ended = {
        let mut core = process.lock();
        let Some(udp) = core.stack.udp(socket.slot()) else {
            return Ok(());
        };
        note(&mut udp.memberships, change, interface)
    };
    if ended {
        let change = GroupChange {
            action: GroupAction::Leave,
            source: None,
            interface,
            ..change
        };
        // The kernel's membership has ended already; this ends the filter's.
        let _ = process
            .control
            .call(RequestBody::Group { session, change }, &[]);
    }
    Ok(())
}

/// Returns true if the membership ended with its last source.
fn note(memberships: &mut Memberships, change: GroupChange, interface: u32) -> bool {
    let group = change.group;
    match (change.action, change.source) {
        (GroupAction::Join, None) => memberships.join(group, interface),
        (GroupAction::Leave, None) => memberships.leave(group, interface),
        (GroupAction::Join | GroupAction::Unblock, Some(source)) => {
            memberships.allow(group, interface, source);
        }
        (GroupAction::Leave | GroupAction::Block, Some(source)) => {
            return memberships.disallow(group, interface, source);
        }
        (GroupAction::Block | GroupAction::Unblock, None) => {}
    }
    false
}

fn parse(process: &Process, level: i32, name: i32, value: &[u8]) -> Result<GroupChange, Errno> {
    let value = Value(value);
    if MCAST.contains(&name) {
        return parse_mcast(level, name, value);
    }
    if level == IPPROTO_IPV6 {
        return Ok(GroupChange {
            action: if name == 20 {
                GroupAction::Join
            } else {
                GroupAction::Leave
            },
            group: value.v6(0)?,
            interface: value.number(16)?,
            source: None,
        });
    }
    let is_source = matches!(name, 37..=40);
    let interface = match value.number(8) {
        Ok(index) if !is_source && index != 0 => index,
        _ => interface_of(process, value.v4(4)?)?,
    };
    Ok(GroupChange {
        action: match name {
            35 | 39 => GroupAction::Join,
            36 | 40 => GroupAction::Leave,
            37 => GroupAction::Unblock,
            _ => GroupAction::Block,
        },
        group: value.v4(0)?,
        interface,
        source: is_source.then(|| value.v4(8)).transpose()?,
    })
}

/// `struct group_req`, or `struct group_source_req`.
fn parse_mcast(level: i32, name: i32, value: Value<'_>) -> Result<GroupChange, Errno> {
    let (action, has_source) = match name {
        42 => (GroupAction::Join, false),
        45 => (GroupAction::Leave, false),
        43 => (GroupAction::Block, true),
        44 => (GroupAction::Unblock, true),
        46 => (GroupAction::Join, true),
        _ => (GroupAction::Leave, true),
    };
    let address = |at| value.address(at, level);
    Ok(GroupChange {
        action,
        group: address(8)?,
        interface: value.number(0)?,
        source: has_source.then(|| address(136)).transpose()?,
    })
}

/// Returns the device with that address; 0 for none given, which leaves the choice to the server.
pub(super) fn interface_of(process: &Process, address: IpAddr) -> Result<u32, Errno> {
    if address.is_unspecified() {
        return Ok(0);
    }
    let core = process.lock();
    core.routes.interface_with(address).ok_or(Errno::NODEV)
}

/// Checks that a device exists.
fn known_interface(process: &Process, index: u32) -> Result<u32, Errno> {
    let is_known = process.lock().routes.has_interface(index);
    is_known.then_some(index).ok_or(Errno::NODEV)
}

/// `IPV6_MULTICAST_IF` must name an existing device, or none.
pub(super) fn check_interface(process: &Process, value: &[u8]) -> Result<(), Errno> {
    match Value(value).number(0)? {
        0 => Ok(()),
        index => known_interface(process, index).map(drop),
    }
}

/// `IP_MULTICAST_IF`: an address, `struct ip_mreq` or `struct ip_mreqn`; returns the latter.
pub(super) fn sending_interface(process: &Process, value: &[u8]) -> Result<Vec<u8>, Errno> {
    let value = Value(value);
    let address = value.v4(4).or_else(|_| value.v4(0))?;
    let interface = match value.number(8) {
        Ok(index) if index != 0 => {
            known_interface(process, index).map_err(|_| Errno::ADDRNOTAVAIL)?
        }
        _ => interface_of(process, address).map_err(|_| Errno::ADDRNOTAVAIL)?,
    };
    let IpAddr::V4(address) = address else {
        return Err(Errno::INVAL);
    };
    Ok([[0; 4], address.octets(), interface.to_ne_bytes()].concat())
}

/// The bytes of an option.
#[derive(Clone, Copy)]
struct Value<'a>(&'a [u8]);

impl Value<'_> {
    fn field<const N: usize>(self, at: usize) -> Result<[u8; N], Errno> {
        let field = self.0.get(at..).and_then(|rest| rest.first_chunk());
        field.copied().ok_or(Errno::INVAL)
    }

    fn number(self, at: usize) -> Result<u32, Errno> {
        self.field(at).map(u32::from_ne_bytes)
    }

    fn v4(self, at: usize) -> Result<IpAddr, Errno> {
        self.field::<4>(at)
            .map(|bytes| Ipv4Addr::from(bytes).into())
    }

    fn v6(self, at: usize) -> Result<IpAddr, Errno> {
        self.field::<16>(at)
            .map(|bytes| Ipv6Addr::from(bytes).into())
    }

    /// `struct sockaddr_storage` of the level's family.
    fn address(self, at: usize, level: i32) -> Result<IpAddr, Errno> {
        let family = i32::from(u16::from_ne_bytes(self.field(at)?));
        // All of it must be present.
        self.field::<128>(at)?;
        match (family, level) {
            (libc::AF_INET, IPPROTO_IP) => self.v4(at + 4),
            (libc::AF_INET6, IPPROTO_IPV6) => self.v6(at + 8),
            _ => Err(Errno::ADDRNOTAVAIL),
        }
    }
}
