//! Layouts shared with the eBPF programs. Each struct mirrors one in `bpf/portolan.h`; sizes are
//! asserted on both sides.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use portolan_types::{FlowKey, Protocol};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::raw::Guard;

/// Key of the flow table. Ports in network order; IPv4 addresses as IPv4-mapped IPv6 (RFC 4291
/// §2.5.5.2), so that one table serves both families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FilterKey {
    pub local: [u8; 16],
    pub remote: [u8; 16],
    pub local_port: [u8; 2],
    pub remote_port: [u8; 2],
    pub protocol: u8,
    pub reserved: [u8; 3],
}

/// Row of the flow table and of the binding table: where matching packets go.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FlowRow {
    pub channel: u32,
    pub slot: u32,
    pub generation: u32,
    pub flags: u16,
    /// Of the device's scheduler, in which its frames are sent; 0: that of the channel.
    pub class: u16,
    /// Its own, of those that the channel's owner has beside the channel's; 0: that one.
    pub ring: u32,
    /// In the table of budgets; 0: none.
    pub budget: u16,
    pub reserved: u16,
}

impl FlowRow {
    /// Several sockets have the binding: look for senders, and for members on a broadcast.
    pub const SHARED: u16 = 1;
    /// And unicast goes to the buckets in the table of shares.
    pub const DEALT: u16 = 2;
    /// A listener whose handshakes the channel's owner performs, and answers from that port.
    pub const DELEGATED: u16 = 4;
    /// Handlers are installed for what it receives.
    pub const EXTENDED: u16 = 8;
    /// And for what it sends.
    pub const EXTENDED_SENDING: u16 = 16;
    /// Its frames go by the tap, whether the owner sleeps or not.
    pub const BY_TAP: u16 = 32;
    /// A port of a transport that the channel's owner runs himself: frames come as they are.
    pub const RAW: u16 = 64;
    /// It may be delivered before the kernel makes a buffer of the frame, where a device has that hook (XDP).
    pub const IN_DRIVER: u16 = 128;
}

/// Rows of the table of budgets; the first is no budget.
pub const BUDGETS: u16 = 1024;

/// A receive budget, kept by the packet filter. A price is what one packet or byte costs of the time that has
/// passed, 0 if it is free; `*_paid` is the time up to which all is paid. Time is in 1/64 ns.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Budget {
    pub packet_price: u64,
    /// In 1/2^20 ns.
    pub byte_price: u64,
    pub burst: u64,
    pub priority: u32,
    pub reserved: u32,
    pub packets_paid: u64,
    pub bytes_paid: u64,
    /// Packets within the budget, beyond it, and dropped while the ring filled.
    pub passed: u64,
    pub dropped: u64,
    pub early: u64,
}

impl Budget {
    /// Never dropped early.
    pub const LAST: u8 = 7;
    /// What a packet costs at a rate of one in a second.
    pub const SECOND: u64 = 1_000_000_000 << 6;
    /// What a byte costs at a rate of one bit in a second.
    pub const BYTE_SECOND: u64 = (8 * 1_000_000_000) << 20;
}

/// Frames that a channel's owner lost, as the packet filter counts them for each channel.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Losses {
    pub ring_full: u64,
    pub over_budget: u64,
    pub early: u64,
}

/// What a channel sends through, by the index of its device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FilterTap {
    pub channel: u32,
    /// For frames of rows without one; 0 while nothing is reserved.
    pub class: u16,
    pub reserved: u16,
}

/// Major number of our scheduler on a device ("po").
pub const TRAFFIC_HANDLE: u16 = 0x706f;
/// Its class for all who reserved nothing.
pub const BEST_EFFORT_CLASS: u16 = 2;
/// Below this a row's class is none: what its program has chosen (`SO_PRIORITY`), with this bit.
pub const FIRST_CLASS: u16 = 0x10;
pub const CHOSEN_PRIORITY: u16 = 8;

/// Key of the binding table (TCP listeners, unconnected UDP). Any address of IPv6 is all zeros, of
/// IPv4 `::ffff:0.0.0.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BindingKey {
    pub local: [u8; 16],
    pub local_port: [u8; 2],
    pub protocol: u8,
    pub reserved: u8,
}

/// Key of the table of raw flows: a kind of frame or of packet that one program has for a protocol of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawKey {
    pub kind: u8,
    pub reserved: u8,
    pub number: [u8; 2],
}

impl RawKey {
    const ETHERTYPE: u8 = 1;
    const IP_PROTOCOL: u8 = 2;

    /// None for a port, which is in the binding table.
    pub fn new(guard: Guard) -> Option<RawKey> {
        let (kind, number) = match guard {
            Guard::EtherType(number) => (RawKey::ETHERTYPE, number),
            Guard::IpProtocol(number) => (RawKey::IP_PROTOCOL, number.into()),
            Guard::Port { .. } => return None,
        };
        Some(RawKey {
            kind,
            reserved: 0,
            number: number.to_be_bytes(),
        })
    }
}

/// Buckets over which flows to a shared binding are spread.
pub const SHARE_BUCKETS: u32 = 128;

/// Key of the table of shares: whose a bucket of a dealt binding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShareKey {
    pub binding: BindingKey,
    pub bucket: u32,
}

/// Key of the table of senders: a channel that sends from a binding which is not its alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SenderKey {
    pub binding: BindingKey,
    pub channel: u32,
}

/// Sockets that get copies of one datagram.
pub const MEMBERS_MAX: usize = 64;

/// Key of the table of members: the sockets that each get a copy of what comes to a group, or,
/// with interface 0, of a broadcast to a shared binding. Indices are dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemberKey {
    pub group: [u8; 16],
    pub interface: u32,
    pub port: [u8; 2],
    pub index: u16,
}

/// Values of the table of this host's addresses.
pub const ADDRESS_OWN: u8 = 1;
pub const ADDRESS_BROADCAST: u8 = 2;

/// A managed device, as the transmit filter knows it. `ifindex` 0 ends the table.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FilterInterface {
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub reserved: [u8; 2],
}

/// Devices one server can manage.
pub const MAX_INTERFACES: usize = 16;

/// Goes before each frame in a receive ring.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RecordHeader {
    /// Bytes of the frame that follows, Ethernet header included.
    pub length: u32,
    /// Segment size if the kernel coalesced several (GRO, GSO), else 0.
    pub gso_size: u16,
    /// [`RecordHeader::ICMP_ERROR`] and friends.
    pub flags: u16,
    pub slot: u32,
    pub generation: u32,
    /// `bpf_ktime_get_ns` when the filter saw it (the clock of `Instant`).
    pub timestamp: u64,
    pub ifindex: u32,
    pub reserved: u32,
}

impl RecordHeader {
    /// The frame is an ICMP error about the flow, not one of its packets.
    pub const ICMP_ERROR: u16 = 1;
    /// Matched the binding table, not the flow table.
    pub const BINDING: u16 = 2;
    /// One piece of a datagram.
    pub const FRAGMENT: u16 = 4;
    /// A fragment that came before the first of its datagram, or that first: a copy for the server
    /// to hold, or to let go of what it holds.
    pub const HELD: u16 = 8;
    /// A copy of what others, and the kernel, get too.
    pub const COPY: u16 = 16;
    /// Of a protocol of the program's own: the slot is a raw flow's.
    pub const RAW: u16 = 32;

    pub fn is_raw(&self) -> bool {
        self.flags & RecordHeader::RAW != 0
    }

    pub fn is_fragment(&self) -> bool {
        self.flags & RecordHeader::FRAGMENT != 0
    }
}

/// What a frame that comes by the tap has in place of its Ethernet addresses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct TapStamp {
    pub slot: u32,
    pub generation: u32,
    /// As in [`RecordHeader`].
    pub flags: u16,
    /// Device that the frame came in by; 0 if its index is too large to fit.
    pub ifindex: u16,
}

/// One page shared by a channel's owner (read, write) and the filter: the owner says whether it
/// sleeps, the filter counts. The first page of the channel's doorbell map.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Doorbell {
    /// [`Doorbell::AWAKE`], [`Doorbell::ASLEEP`]; written by the owner, and set to `AWAKE` by the
    /// filter when it has notified.
    pub state: u32,
    /// Frames sent to the tap; wraps.
    pub by_tap: u32,
    /// All frames, by ring and by tap.
    pub delivered: u64,
    /// Frames lost because the ring was full.
    pub overflow: u64,
    pub reserved: [u64; 5],
    /// When the owner looked last, in nanoseconds of the monotonic clock; 0 if it looks without a clock. This and what
    /// follows is written by the owner.
    pub attended_at: u64,
    /// Other than 0: the owner, if awake, is to be woken through the ring for frames that it has not looked at for a
    /// while.
    pub wants_attention: u32,
    /// Other than 0: what it sent last was more than the windows let through.
    pub awaits_window: u32,
}

impl Doorbell {
    pub const AWAKE: u32 = 0;
    /// Wake the owner through the ring with the next frame.
    pub const ASLEEP: u32 = 1;
    /// Wake the owner by sending the next frames through its tap, behind a [`TapStamp`].
    pub const ASLEEP_ON_TAP: u32 = 2;
}

/// What the programs are told when they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct FilterSettings {
    /// [`FilterSettings::HASH`] or [`FilterSettings::LINEAR`]: how flows are found.
    pub algorithm: u32,
    /// The traffic class of packets that enclose a handle; 0: handles mean nothing.
    pub marker: u32,
}

impl FilterSettings {
    pub const HASH: u32 = 0;
    pub const LINEAR: u32 = 1;
}

/// A place for a flow in the table that is searched row by row.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LinearRow {
    /// Even while the place is free or changes.
    pub version: u32,
    pub reserved: u32,
    pub key: FilterKey,
    pub row: FlowRow,
}

/// What a handle leads to; `nonce` is 0 while that is nothing, or changes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct HandleRow {
    pub nonce: u64,
    pub row: FlowRow,
}

/// Handles that one host can give out.
pub const HANDLES: u32 = 1 << 16;

/// With what the SYNs to a listener are answered by the packet filter, while they are a flood.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Flood {
    /// Of the port's cookies.
    pub secret: [u8; 16],
    /// SYNs that were, and that would have been but for [`Flood::FULL`].
    pub answered: u64,
    pub dropped: u64,
    pub window: u16,
    /// The largest segment that the listener wants; 0: what the path takes.
    pub max_segment: u16,
    /// Of windows, or [`Flood::NO_SCALE`].
    pub scale: u8,
    pub flags: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// SYNs that have fewer hops left are the owner's.
    pub least_hops: u8,
    pub reserved: [u8; 7],
}

/// SYNs of one flood that the filter has dealt with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FloodSeen {
    pub answered: u64,
    pub dropped: u64,
}

impl Flood {
    pub const NO_SCALE: u8 = 0xff;
    pub const TIMESTAMPS: u8 = 1;
    pub const SACK: u8 = 2;
    pub const ECN: u8 = 4;
    pub const DONT_FRAGMENT: u8 = 8;
    /// As many connections as may be wait to be accepted: SYNs are dropped.
    pub const FULL: u8 = 16;
}

/// Key of the table of return paths: an address, and how many of its bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PathKey {
    pub prefix: u32,
    pub address: [u8; 16],
}

impl PathKey {
    pub fn new(address: IpAddr, prefix: u8) -> PathKey {
        let before = if address.is_ipv4() { 96 } else { 0 };
        PathKey {
            prefix: before + u32::from(prefix),
            address: mapped(address),
        }
    }
}

/// The way back to a peer; interface 0 if the filter does not answer SYNs that seem to come from there.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ReturnPath {
    pub interface: u32,
    pub mtu: u32,
}

/// Entries of the table of return paths.
pub const RETURN_PATHS: usize = 16_384;

/// Processes that one look for holders can name.
pub const HOLDERS_MAX: usize = 8;

/// What the program `count_fd_refs` is asked, and its answer. Descriptors are the asking process's.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Holders {
    pub descriptor: u32,
    /// Connections to the processes whose descriptors are counted.
    pub connections: [u32; HOLDERS_MAX],
    pub count: u32,
    /// To the open file in all.
    pub references: u32,
    /// In those processes.
    pub descriptors: u32,
}

/// What the program `are_pair` is asked, and its answer. Descriptors are the asking process's.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PairEnds {
    pub far: u32,
    pub near: u32,
    /// 1 if they are the ends of one pair.
    pub are_pair: u32,
}

/// What the program `runs_file` is asked, and its answer. Descriptors are the asking process's.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RunningFile {
    pub connection: u32,
    pub file: u32,
    /// 1 if the process at the connection's other end runs the file.
    pub is_running: u32,
}

const _: () = assert!(size_of::<Holders>() == 48);
const _: () = assert!(size_of::<RunningFile>() == 12);
const _: () = assert!(size_of::<PairEnds>() == 12);
const _: () = assert!(size_of::<FilterSettings>() == 8);
const _: () = assert!(size_of::<HandleRow>() == 32);
const _: () = assert!(size_of::<LinearRow>() == 72);
const _: () = assert!(size_of::<FilterKey>() == 40);
const _: () = assert!(size_of::<FlowRow>() == 24);
const _: () = assert!(size_of::<FilterTap>() == 8);
const _: () = assert!(size_of::<BindingKey>() == 20);
const _: () = assert!(size_of::<RawKey>() == 4);
const _: () = assert!(size_of::<ShareKey>() == 24);
const _: () = assert!(size_of::<SenderKey>() == 24);
const _: () = assert!(size_of::<MemberKey>() == 24);
const _: () = assert!(size_of::<FilterInterface>() == 12);
const _: () = assert!(size_of::<RecordHeader>() == 32);
const _: () = assert!(size_of::<TapStamp>() == 12);
const _: () = assert!(size_of::<Doorbell>() == 80);
const _: () = assert!(size_of::<Budget>() == 72);
const _: () = assert!(size_of::<Losses>() == 24);
const _: () = assert!(size_of::<Flood>() == 48);
const _: () = assert!(size_of::<PathKey>() == 20);
const _: () = assert!(size_of::<ReturnPath>() == 8);

/// An address as the filter's tables hold it.
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl FilterKey {
    pub fn new(flow: &FlowKey) -> FilterKey {
        FilterKey {
            local: mapped(flow.local.ip()),
            remote: mapped(flow.remote.ip()),
            local_port: flow.local.port().to_be_bytes(),
            remote_port: flow.remote.port().to_be_bytes(),
            protocol: flow.protocol.number(),
            reserved: [0; 3],
        }
    }
}

impl BindingKey {
    pub fn new(protocol: Protocol, local: SocketAddr) -> BindingKey {
        BindingKey {
            local: mapped(local.ip()),
            local_port: local.port().to_be_bytes(),
            protocol: protocol.number(),
            reserved: 0,
        }
    }

    /// Is what comes for the flow's local endpoint for a socket with this binding?
    pub fn is_for(&self, flow: &FlowKey) -> bool {
        let any = match flow.local.ip() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        [flow.local.ip(), any]
            .map(|ip| BindingKey::new(flow.protocol, SocketAddr::new(ip, flow.local.port())))
            .contains(self)
    }

    /// The keys of a socket's binding: one that is bound to any IPv6 address has IPv4's, too,
    /// unless it is for IPv6 only.
    pub fn of(
        protocol: Protocol,
        local: SocketAddr,
        v6_only: bool,
    ) -> impl Iterator<Item = BindingKey> + Clone {
        let is_dual = local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && !v6_only;
        let v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), local.port());
        let second = is_dual.then(|| BindingKey::new(protocol, v4));
        [Some(BindingKey::new(protocol, local)), second]
            .into_iter()
            .flatten()
    }
}
