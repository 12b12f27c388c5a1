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
    /// Class of the device's qdisc in which its frames are sent; 0: the channel's class.
    pub class: u16,
    /// The flow's own ring, if its channel's owner has one for it; 0: the channel's ring.
    pub ring: u32,
    /// Index in the table of budgets; 0: none.
    pub budget: u16,
    pub reserved: u16,
}

impl FlowRow {
    /// Several sockets have the binding: see the tables of senders, and of members for broadcasts.
    pub const SHARED: u16 = 1;
    /// Unicast goes to the buckets in the table of shares.
    pub const DEALT: u16 = 2;
    /// A listener whose handshakes the channel's owner performs, sending from that port.
    pub const DELEGATED: u16 = 4;
    /// Handlers are installed for received packets.
    pub const EXTENDED: u16 = 8;
    /// Handlers are installed for sent packets.
    pub const EXTENDED_SENDING: u16 = 16;
    /// Its frames are delivered by the tap, whether or not the owner sleeps.
    pub const BY_TAP: u16 = 32;
    /// A port of a transport that the channel's owner runs itself: frames are delivered unparsed.
    pub const RAW: u16 = 64;
    /// May be delivered before the kernel makes a buffer of the frame, if a device has that hook (XDP).
    pub const IN_DRIVER: u16 = 128;
    /// Besides `DELEGATED`: the port is under lease, and no listener's. The filters do not ask.
    pub const LEASED: u16 = 256;
}

/// Rows of the table of budgets; row 0 means no budget.
pub const BUDGETS: u16 = 1024;

/// A receive budget, kept by the packet filter. A price is the time that one packet or byte costs, 0 if it is free;
/// `*_paid` is a virtual clock. Times are in 1/64 ns.
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
    /// Packets within the budget, beyond it, and dropped while the ring was filling.
    pub passed: u64,
    pub dropped: u64,
    pub early: u64,
}

impl Budget {
    /// Highest priority: never dropped early.
    pub const LAST: u8 = 7;
    /// Price of a packet at one packet per second.
    pub const SECOND: u64 = 1_000_000_000 << 6;
    /// Price of a byte at one bit per second.
    pub const BYTE_SECOND: u64 = (8 * 1_000_000_000) << 20;
}

/// Frames lost by a channel's owner, counted by the packet filter.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Losses {
    pub ring_full: u64,
    pub over_budget: u64,
    pub early: u64,
}

/// A tap through which a channel sends, by device index.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FilterTap {
    pub channel: u32,
    /// For frames whose row has none; 0 if nothing is reserved.
    pub class: u16,
    pub reserved: u16,
}

/// What the filters know about a channel besides its ring and doorbell.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FilterChannel {
    pub tap_ifindex: u32,
    /// The user of the channel's process, plus one; 0: it has none.
    owner: u32,
}

impl FilterChannel {
    /// A channel without a process.
    pub fn spare(tap_ifindex: u32) -> FilterChannel {
        FilterChannel {
            tap_ifindex,
            owner: 0,
        }
    }

    pub fn owned_by(self, uid: u32) -> FilterChannel {
        FilterChannel {
            // The highest number is no user's.
            owner: uid.wrapping_add(1),
            ..self
        }
    }

    /// Returns the user of its process.
    pub fn owner(&self) -> Option<u32> {
        self.owner.checked_sub(1)
    }
}

/// Major number of Portolan's qdisc on a device ("po").
pub const TRAFFIC_HANDLE: u16 = 0x706f;
/// Its class for traffic without a reservation.
pub const BEST_EFFORT_CLASS: u16 = 2;
/// A row's class below this is the priority chosen by its program (`SO_PRIORITY`), with this bit set.
pub const FIRST_CLASS: u16 = 0x10;
pub const CHOSEN_PRIORITY: u16 = 8;

/// Key of the binding table (TCP listeners, unconnected UDP). Any address is all zeros for IPv6,
/// `::ffff:0.0.0.0` for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BindingKey {
    pub local: [u8; 16],
    pub local_port: [u8; 2],
    pub protocol: u8,
    pub reserved: u8,
}

/// Key of the table of raw flows: an EtherType or IP protocol that one program has as its own.
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

    /// Returns none for a port, which is in the binding table.
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

/// Number of buckets over which flows to a shared binding are spread.
pub const SHARE_BUCKETS: u32 = 128;

/// Key of the table of shares, which assigns buckets of a shared binding to sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShareKey {
    pub binding: BindingKey,
    pub bucket: u32,
}

/// Key of the table of senders: a channel that may send from a shared binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SenderKey {
    pub binding: BindingKey,
    pub channel: u32,
}

/// Maximum number of sockets that get copies of one datagram.
pub const MEMBERS_MAX: usize = 64;

/// Key of the table of members: the sockets that each get a copy of datagrams to a group, or, with
/// interface 0, of broadcasts to a shared binding. Indices are dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemberKey {
    pub group: [u8; 16],
    pub interface: u32,
    pub port: [u8; 2],
    pub index: u16,
}

/// Values of the table of local addresses.
pub const ADDRESS_OWN: u8 = 1;
pub const ADDRESS_BROADCAST: u8 = 2;

/// A managed device, for the transmit filter. `ifindex` 0 ends the table.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FilterInterface {
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub reserved: [u8; 2],
}

/// Maximum number of devices that a server can manage.
pub const MAX_INTERFACES: usize = 16;

/// Precedes each frame in a receive ring.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RecordHeader {
    /// Length of the frame that follows, including the Ethernet header.
    pub length: u32,
    /// Segment size if the kernel has merged segments (GRO, GSO), else 0.
    pub gso_size: u16,
    /// [`RecordHeader::ICMP_ERROR`] and friends.
    pub flags: u16,
    pub slot: u32,
    pub generation: u32,
    /// `bpf_ktime_get_ns` when the filter processed it (the clock of `Instant`).
    pub timestamp: u64,
    pub ifindex: u32,
    pub reserved: u32,
}

impl RecordHeader {
    /// The frame is an ICMP error about the flow, not one of its packets.
    pub const ICMP_ERROR: u16 = 1;
    /// Matched the binding table, not the flow table.
    pub const BINDING: u16 = 2;
    /// A fragment of a datagram.
    pub const FRAGMENT: u16 = 4;
    /// A fragment that arrived before the first of its datagram, or the first one: a copy for the server, to
    /// be held, or to release what it holds.
    pub const HELD: u16 = 8;
    /// A copy of a datagram that others, and the kernel, get too.
    pub const COPY: u16 = 16;
    /// Of a raw protocol: the slot is a raw flow's.
    pub const RAW: u16 = 32;

    pub fn is_raw(&self) -> bool {
        self.flags & RecordHeader::RAW != 0
    }

    pub fn is_fragment(&self) -> bool {
        self.flags & RecordHeader::FRAGMENT != 0
    }
}

/// Replaces the Ethernet addresses of a frame delivered by the tap.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct TapStamp {
    pub slot: u32,
    pub generation: u32,
    /// As in [`RecordHeader`].
    pub flags: u16,
    /// Device on which the frame arrived; 0 if its index does not fit.
    pub ifindex: u16,
}

/// One page shared by a channel's owner (read, write) and the filter: the owner announces whether it sleeps,
/// the filter keeps counters. The first page of the channel's doorbell map.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Doorbell {
    /// [`Doorbell::AWAKE`], [`Doorbell::ASLEEP`]; written by the owner, and set to `AWAKE` by the
    /// filter when it has notified.
    pub state: u32,
    /// Frames sent to the tap; wraps.
    pub by_tap: u32,
    /// All frames, delivered by ring and by tap.
    pub delivered: u64,
    /// Frames lost because the ring was full.
    pub overflow: u64,
    pub reserved: [u64; 5],
    /// When the owner last polled, in nanoseconds of the monotonic clock; 0 if it polls without a clock. This field and
    /// the following ones are written by the owner.
    pub attended_at: u64,
    /// Nonzero: the owner, while awake, must be woken through the ring for frames that it has not polled for a
    /// while.
    pub wants_attention: u32,
    /// Nonzero: the owner's last sending was limited by a window.
    pub awaits_window: u32,
}

impl Doorbell {
    pub const AWAKE: u32 = 0;
    /// Wake the owner through the ring with the next frame.
    pub const ASLEEP: u32 = 1;
    /// Wake the owner by sending the next frames through its tap, behind a [`TapStamp`].
    pub const ASLEEP_ON_TAP: u32 = 2;
}

/// Settings of the programs, given at load time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct FilterSettings {
    /// The search algorithm for flows: [`FilterSettings::HASH`] or [`FilterSettings::LINEAR`].
    pub algorithm: u32,
    /// The traffic class of packets that enclose a handle; 0 if handles are disabled.
    pub marker: u32,
    /// [`OLDEST_PROTOCOL`](crate::OLDEST_PROTOCOL), which is raised with the layouts: a server takes over tables of its own
    /// format only.
    pub format: u32,
}

impl FilterSettings {
    pub const HASH: u32 = 0;
    pub const LINEAR: u32 = 1;
}

/// A place for a flow in the table for linear search.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LinearRow {
    /// Even while the place is free or being changed.
    pub version: u32,
    pub reserved: u32,
    pub key: FilterKey,
    pub row: FlowRow,
}

/// The row of a handle; `nonce` is 0 while it is free or being changed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct HandleRow {
    pub nonce: u64,
    pub row: FlowRow,
}

/// Maximum number of handles of a host.
pub const HANDLES: u32 = 1 << 16;

/// Parameters with which the packet filter answers the SYNs to a listener during a flood.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Flood {
    /// Key of the port's cookies.
    pub secret: [u8; 16],
    /// Number of SYNs answered, and of those dropped because of [`Flood::FULL`].
    pub answered: u64,
    pub dropped: u64,
    pub window: u16,
    /// The largest segment that the listener accepts; 0: as determined by the path.
    pub max_segment: u16,
    /// Window scale shift, or [`Flood::NO_SCALE`].
    pub scale: u8,
    pub flags: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// SYNs with a lower hop limit are left to the owner.
    pub least_hops: u8,
    pub reserved: [u8; 7],
}

/// SYNs of one flood that the filter has processed.
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
    /// The accept queue is full: SYNs are dropped.
    pub const FULL: u8 = 16;
}

/// What outlives a server.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Lasting {
    /// Of the hash by which peers are dealt; the filter chooses it.
    pub share_seed: u32,
    pub reserved: u32,
    /// The server's, from which its other secrets are derived; zeros: not chosen yet.
    pub secret: [u8; 16],
}

/// Key of the table of return paths: an address and its prefix length.
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

/// The path to a peer; interface 0 if the filter does not answer SYNs with such a source.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ReturnPath {
    pub interface: u32,
    pub mtu: u32,
}

/// Maximum number of entries of the table of return paths.
pub const RETURN_PATHS: usize = 16_384;

/// Maximum number of processes named in one request for holders.
pub const HOLDERS_MAX: usize = 8;

/// Request to the program `count_fd_refs`, and its answer. Descriptors are those of the requesting process.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Holders {
    pub descriptor: u32,
    /// Connections to the processes whose descriptors are counted.
    pub connections: [u32; HOLDERS_MAX],
    pub count: u32,
    /// References to the open file in total.
    pub references: u32,
    /// Descriptors in those processes.
    pub descriptors: u32,
}

/// Request to the program `are_pair`, and its answer. Descriptors are those of the requesting process.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PairEnds {
    pub far: u32,
    pub near: u32,
    /// 1 if they are the ends of one pair.
    pub are_pair: u32,
}

/// Request to the program `runs_file`, and its answer. Descriptors are those of the requesting process.
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
const _: () = assert!(size_of::<FilterSettings>() == 12);
const _: () = assert!(size_of::<FilterChannel>() == 8);
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
const _: () = assert!(size_of::<Lasting>() == 24);
const _: () = assert!(size_of::<Budget>() == 72);
const _: () = assert!(size_of::<Losses>() == 24);
const _: () = assert!(size_of::<Flood>() == 48);
const _: () = assert!(size_of::<PathKey>() == 20);
const _: () = assert!(size_of::<ReturnPath>() == 8);

/// An address in the format of the filter's tables.
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn endpoint(address: [u8; 16], port: [u8; 2]) -> SocketAddr {
    let address = Ipv6Addr::from(address).to_canonical();
    SocketAddr::new(address, u16::from_be_bytes(port))
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

    /// Returns the flow, without the scopes of its addresses, which the tables do not have. None for other protocols.
    pub fn flow(&self) -> Option<FlowKey> {
        Some(FlowKey {
            protocol: Protocol::from_number(self.protocol)?,
            local: endpoint(self.local, self.local_port),
            remote: endpoint(self.remote, self.remote_port),
        })
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

    /// Returns the endpoint, without the scope of its address.
    pub fn local(&self) -> SocketAddr {
        endpoint(self.local, self.local_port)
    }

    /// Whether packets to the flow's local endpoint are for a socket with this binding.
    pub fn is_for(&self, flow: &FlowKey) -> bool {
        let any = match flow.local.ip() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        [flow.local.ip(), any]
            .map(|ip| BindingKey::new(flow.protocol, SocketAddr::new(ip, flow.local.port())))
            .contains(self)
    }

    /// The keys of a socket's binding: a socket bound to any IPv6 address also has that of IPv4, unless it is
    /// IPv6-only.
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
