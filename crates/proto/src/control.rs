//! Control messages: one SEQPACKET connection per process to the server, and the messages that the
//! server leaves on a descriptor.
//!
//! Every request is one packet. The server answers each request that has a reply with one packet
//! that carries the same `id`, in any order.

use core::net::{IpAddr, SocketAddr};

use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, Slot};
use serde::{Deserialize, Serialize};

use crate::extension::{ExtensionReply, ExtensionRequest};
use crate::ip::IpOptions;
use crate::local::Side;
use crate::qos::{QosReply, QosRequest, Scope};
use crate::raw::Guard;
use crate::report::StatusReport;

/// Library or command to server.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Names the request in its reply; 0 wants no reply.
    pub id: u32,
    pub body: RequestBody,
}

/// Server to library or command.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    pub id: u32,
    pub body: ReplyBody,
}

/// How the server learns which session a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionRef {
    /// A new session. The packet carries two fds: the descriptor's far end, which the server
    /// keeps, then the near end, whose socket cookie it notes before it closes its copy.
    New,
    Known(SessionId),
    /// A session of an earlier server, which it keeps its number of; fds as of `New`. Of `Bind` only. Who has the
    /// descriptor from before the restart knows the number: a TCP socket that another of those processes has brought
    /// already is `Rejoined`.
    Again(SessionId),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum RequestBody {
    /// First message of a library; its shape never changes. `version` is [`PROTOCOL`](crate::PROTOCOL).
    /// Reply: `Welcome`, or `EPROTO` from a server of another version.
    Hello { version: u32, program: String },
    /// Carries a socket that is bound to a port below the first unprivileged one, as the right to bind that port by the
    /// next request. Reply: `Done`.
    ShowRight,
    /// Takes a local endpoint. UDP: the session is cached at `slot` from then on. Reply: `Bound`,
    /// `UseKernel` or `Error`. A known session is one of TCP whose port went with a connection that
    /// failed, or with its listener.
    Bind {
        session: SessionRef,
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        reuse: Reuse,
        v6_only: bool,
        slot: Slot,
    },
    /// TCP: starts an active open; reply `Connecting`, and later a `DescriptorEvent` on the
    /// descriptor. UDP: fixes the peer; reply `Connected`. Either: `UseKernel` or `Error`.
    Connect {
        session: SessionRef,
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        slot: Slot,
        options: HandshakeOptions,
        early: FastOpenMode,
    },
    /// Makes a bound session a listener, or changes its backlog. When it becomes one the packet
    /// carries the far and near end of the SEQPACKET pair that replaces its descriptor. An
    /// unbound session gets an ephemeral port first. With a slot the process would perform the
    /// handshakes itself, and have the port's segments come there. Reply: `Listening` or `Error`.
    Listen {
        session: SessionRef,
        backlog: u32,
        options: HandshakeOptions,
        options_blob: SocketOptionsBlob,
        slot: Option<Slot>,
    },
    /// Wants a kernel socket that is bound to a listener's port, and neither listens nor is used by the server. It is what
    /// listens while there is no server, and the right to that port after that. Reply: `PortToken` or `Error`.
    PortToken { session: SessionId },
    /// Makes a listener a bound session again: connections that nobody has accepted are reset, the port stays if the
    /// process chose it. The packet carries the far and near end of the pair that replaces its descriptor. Reply: `Done` or `Error`.
    StopListening { session: SessionId },
    /// A bound session has another descriptor from now on: the far and near end come with this.
    ReplaceDescriptor { session: SessionId },
    /// A connection of a listener that is delegated to the process, which accepts it: cached at `slot`
    /// from then on. The packet carries the far and near end of its descriptor. Reply: `Bound` or
    /// `Error`.
    RegisterAccepted {
        listener: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        slot: Slot,
    },
    /// A connection of such a listener that nobody has accepted yet: the server holds it from then on.
    /// No reply.
    ReturnPending { listener: SessionId, capsule: Blob },
    /// SYNs to such a listener are a flood, which the packet filter is to answer (ADR 22), or its queue is
    /// another than it was told to be. No reply.
    Flooded {
        listener: SessionId,
        queue: AcceptQueue,
    },
    /// Flows to such a listener that are known to the process: the packet filter is to leave them to it.
    /// No reply.
    ExemptFlows {
        listener: SessionId,
        flows: Vec<FlowKey>,
    },
    /// The process performs the listener's handshakes no longer. Reply: `Done` or `Error`.
    EndDelegation { listener: SessionId },
    /// Caches at `slot` a session that the server holds, accepted or parked; a relayed one stays so.
    /// One that another process holds is recalled from it first; for that the packet carries the
    /// descriptor, as proof. Reply: `Cached`, `CachedLocal`, `Relayed` or `Error`.
    Cache { session: SessionId, slot: Slot },
    /// The process has accepted a session and leaves it with the server until somebody uses it
    /// ([`Caching::WithFirstUse`]). No reply.
    Accepted { session: SessionId },
    /// Has the server relay a session, whose descriptor the packet carries; needs no `Hello`.
    /// Reply: `Relayed` or `Error`.
    Relay { session: SessionId, reader: Reader },
    /// UDP: what the session sends and receives goes by the kernel from now on, for all who have the
    /// descriptor, which the packet carries; needs no `Hello`. With it goes what nobody has read, a
    /// list of [`crate::datagram::UnreadDatagram`]. Reply: `KernelSocket` or `Error`.
    Share {
        session: SessionId,
        /// The socket is of `AF_INET6`, whatever its addresses are.
        is_v6: bool,
        unread: Blob,
    },
    /// Datagrams that reached the process after it had sent `Share`. No reply.
    Unread { session: SessionId, unread: Blob },
    /// Which sessions does the server want back, and is there anything else to hear? Asked when the
    /// alert rings. Reply: `Recalled`.
    FetchRecalls,
    /// Which transmit queues has the process, and for what? Reply: `TxQueues`.
    TxQueues,
    /// All sessions of that transmit queue go through it, and nothing of them waits elsewhere. No reply.
    DoorwayEntered { number: u8 },
    /// Nothing goes through that transmit queue any more. No reply.
    DoorwayClosed { number: u8 },
    /// A cached TCP session is about to be flushed: its packets go to the server from now on, and wait there.
    /// Reply: `Done`, after which nothing new comes to the process for it.
    BeginFlush { session: SessionId },
    /// It could not be packed, and stays. No reply.
    AbortFlush { session: SessionId },
    /// Returns a cached session. The capsule of a local one is empty: all is in its memory. Reply:
    /// `Done`, after which the server holds it.
    Flush {
        session: SessionId,
        capsule: Capsule,
        then: AfterFlush,
        options_blob: SocketOptionsBlob,
    },
    /// Has the frames of a session that the process holds come by a ring of its own. Reply: `Direct`, or `Error`: they go on
    /// coming by that of the channel.
    Direct { session: SessionId },
    /// The process cannot map the ring that it was sent. No reply.
    RefuseRing { session: SessionId },
    /// What was set on a bound TCP socket that others are about to have, or have. Reply: `Done`.
    Describe {
        session: SessionId,
        options_blob: SocketOptionsBlob,
    },
    /// With which priority the frames of a session that the process holds leave (`SO_PRIORITY`). Reply: `Done`.
    Prioritize { session: SessionId, priority: u8 },
    /// Gives up a session that has no state worth a capsule: unconnected, listening or UDP.
    /// Reply: `Done`; the port is free then.
    Release { session: SessionId },
    /// Forgets the UDP peer (`connect` to `AF_UNSPEC`). Reply: `Bound`.
    Disconnect { session: SessionId, slot: Slot },
    /// Wants the kernel socket that holds a UDP session's port, to send what only the kernel can.
    /// Reply: `KernelSocket`, or `Error`.
    KernelSocket { session: SessionId, is_v6: bool },
    /// Changes what a UDP session hears of a group. Reply: `Joined` or `Error`.
    Group {
        session: SessionId,
        change: GroupChange,
    },
    /// Wants a neighbour resolved. No reply; metastate will tell.
    Resolve { interface: u32, address: IpAddr },
    /// A frame that arrived for a session the library no longer holds. No reply.
    MisdeliveredFrame {
        #[serde(with = "crate::bytes")]
        frame: Vec<u8>,
    },
    /// Whose notifier wakes the peer of a local session that this process holds? Reply: `PeerNotifier` or
    /// `Error`.
    PeerNotifier { session: SessionId },
    /// What is behind a descriptor this process did not open? The packet carries the fd, which is
    /// the proof; needs no `Hello`. Reply: `Probed`.
    Probe,
    /// Has all that is of a protocol come to the process, at a slot of its raw flows. Reply: `Claimed` or
    /// `Error`.
    ClaimProtocol { guard: Guard, slot: Slot },
    /// Gives the protocol up that comes to that slot. No reply.
    UnclaimProtocol { guard: Guard, slot: Slot },
    /// Guarantees; needs no `Hello`. Reply: `Qos`.
    Qos(QosRequest),
    /// Protocol extensions. Reply: `Extension`.
    Extension(ExtensionRequest),
    /// For commands; needs no `Hello`. Reply: `Sessions`.
    ListSessions,
    /// For commands; needs no `Hello`. Reply: `RawFlows`.
    ListRawFlows,
    /// For commands; needs no `Hello`. Reply: `Counters`.
    ReadCounters,
    /// For commands; needs no `Hello`. Reply: `Status`.
    ReadStatus,
    /// For root's commands; needs no `Hello`. The text of a configuration, which takes the place of the server's. Reply:
    /// `Reloaded` or `Error`.
    Reload { text: Blob },
}

/// Options that concern the handshakes the server does for a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandshakeOptions {
    pub ip: IpOptions,
    /// `SO_REUSEADDR`: of a port that comes with the connection.
    pub reuse_address: bool,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: Option<u32>,
    /// Receive buffer the application asked for (`SO_RCVBUF`), bytes.
    pub receive_buffer: Option<u32>,
    /// `TCP_MAXSEG`.
    pub max_segment: Option<u16>,
    /// `TCP_SYNCNT`.
    pub syn_retries: Option<u8>,
    /// `TCP_USER_TIMEOUT`.
    pub user_timeout_ms: Option<u32>,
    /// `TCP_DEFER_ACCEPT`.
    pub defer_accept_seconds: Option<u32>,
    /// `TCP_FASTOPEN`: connections that may wait with their handshake undone.
    pub fast_open_queue: Option<u32>,
    /// `TCP_FASTOPEN_KEY`: what the cookies of the listener are made with, if not with the server's secret.
    pub fast_open_keys: Option<FastOpenKeys>,
    /// `SO_CONCURRENT_SERVER`: whether children use what is accepted; if not said, what was seen last.
    pub is_concurrent_server: Option<bool>,
    /// How the packets of the session reach its holder; if not said, as the server's configuration says.
    pub delivery: Option<Delivery>,
    /// `SO_DELEGATE`: whether the process performs the handshakes; if not said, the server chooses.
    pub is_delegated: Option<bool>,
    /// `SO_PRIORITY`, at most [`HandshakeOptions::PRIORITY_MAX`].
    pub priority: u8,
}

impl HandshakeOptions {
    /// Higher ones name classes of the user's, and are root's; sockets with such become the kernel's.
    pub const PRIORITY_MAX: u8 = 6;
}

/// The key that Fast Open cookies are made with, and one whose cookies are taken still.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastOpenKeys {
    pub primary: [u8; 16],
    pub backup: Option<[u8; 16]>,
}

impl std::fmt::Debug for FastOpenKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FastOpenKeys")
    }
}

/// How the packets of a session reach its holder (MB §4.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Delivery {
    /// By the ring in shared memory; by the tap only while it sleeps.
    #[default]
    Shm,
    /// Each by the tap: a message that the holder reads.
    Ipc,
    /// To the server, which does the work and relays. Of TCP only.
    Server,
    /// As `Shm`, by a filter in the device's driver (XDP) where the server has one there.
    ShmIpf,
}

impl Delivery {
    /// In the order of their numbers in `SO_DELIVERY`.
    pub const ALL: [Delivery; 4] = [
        Delivery::Shm,
        Delivery::Ipc,
        Delivery::Server,
        Delivery::ShmIpf,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Delivery::Shm => "shm",
            Delivery::Ipc => "ipc",
            Delivery::Server => "server",
            Delivery::ShmIpf => "shm-ipf",
        }
    }

    pub fn from_name(name: &str) -> Option<Delivery> {
        Delivery::ALL.into_iter().find(|form| form.name() == name)
    }
}

/// By which ring frames come to a process (BR §3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MappingChoice {
    /// All by one.
    #[default]
    Shared,
    /// Those of each session by its own, as long as there are some.
    Direct,
}

/// May one more connection wait to be accepted?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AcceptQueue {
    HasRoom,
    Full,
}

/// When an accepted session goes to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Caching {
    /// With `accept`, to the process that calls it.
    WithAccept,
    /// With the first call that needs it, to the process that makes it, which is a child of the one
    /// that accepted.
    WithFirstUse,
}

/// How an active open uses Fast Open (RFC 7413).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FastOpenMode {
    #[default]
    No,
    /// `TCP_FASTOPEN_CONNECT`: opens only if there is no cookie, and asks for one.
    IfCookie,
    /// Opens with text, if there is a cookie or `cookieless`, and else asks for one.
    Payload {
        bytes: Vec<u8>,
        cookieless: bool,
        /// The caller waits for the connection, with what the SYN does not take.
        waits: bool,
    },
}

/// `SO_REUSEADDR` and `SO_REUSEPORT` as they stand at bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reuse {
    pub address: bool,
    pub port: bool,
}

/// One change of a session's memberships (RFC 3376 §3.1, RFC 3810 §3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupChange {
    pub action: GroupAction,
    pub group: IpAddr,
    /// Index of the device; 0 leaves the choice to the routes.
    pub interface: u32,
    pub source: Option<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupAction {
    /// To all sources, or with `source` to one more.
    Join,
    /// Altogether, or with `source` that one.
    Leave,
    Block,
    Unblock,
}

/// What the server does with a session it got back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterFlush {
    /// The last descriptor is closing: finish sending, FIN, TIME_WAIT.
    Close,
    /// The descriptor lives on: relay through it.
    Relay(Reader),
    /// Other processes may have the descriptor: keep the session for the next that asks. It is
    /// closed with the last descriptor.
    Park,
}

/// Who uses the descriptor of a session that is to be relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reader {
    /// The process that asks.
    Sender,
    /// Somebody who may know nothing of Portolan. The process that asks would have the session back
    /// before it uses it again.
    Other,
}

/// A session as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capsule {
    pub state: Blob,
    /// Bytes that nobody has read and that come before those in `state`: in a memfd that the packet
    /// carries behind the one of `state`, if there is one.
    pub unread: Option<ByteRange>,
}

/// A part of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    pub start: u32,
    pub length: u32,
}

impl From<Blob> for Capsule {
    fn from(state: Blob) -> Capsule {
        Capsule {
            state,
            unread: None,
        }
    }
}

/// Bytes that travel inside the message, or in the memfd that the packet carries.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blob {
    Inline(#[serde(with = "crate::bytes")] Vec<u8>),
    Memfd { length: u32 },
}

impl core::fmt::Debug for Blob {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Blob::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Blob::Memfd { length } => write!(f, "Memfd({length} bytes)"),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ReplyBody {
    /// Fds, in this order: tap, receive ring map, doorbell map, metastate memfd (read-only),
    /// statistics memfd (see [`crate::report::StatisticsPage`]), alert (an eventfd), notifier (a pipe).
    Welcome {
        channel: ChannelId,
        /// A random number of this run of the server: what was opened under another is to be opened again.
        incarnation: u64,
        /// Number of the notifier, which peers in local sessions know it by.
        notifier: u64,
        /// Bytes of the receive ring's data area, a power of two.
        ring_size: u32,
        /// Index of the process's tap device, for diagnosis only.
        tap: u32,
        /// The tap takes a UDP payload that the kernel is to cut into datagrams (USO).
        cuts_datagrams: bool,
        parameters: Parameters,
    },
    Bound {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        generation: Generation,
    },
    /// Answer to `SessionRef::Again`: another process has brought the session, and the packet carries its descriptor.
    Rejoined {
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
    },
    /// The packet carries the socket.
    PortToken,
    Connecting {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        /// Bytes of `Early::Text` that went with the SYN.
        early: u32,
    },
    /// Nothing is opened yet: text may go with the SYN (`Early::IfCookie`).
    Deferred,
    Connected {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        generation: Generation,
    },
    /// The call is not Portolan's; the program should use the kernel's socket. If the session was
    /// bound, the packet carries the kernel socket that holds the port.
    UseKernel {
        reason: KernelReason,
    },
    Listening {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        /// The process performs the handshakes from now on, by these (`portolan_stack::passive::Rules`,
        /// encoded).
        rules: Option<Vec<u8>>,
    },
    Cached {
        capsule: Capsule,
        generation: Generation,
        options_blob: SocketOptionsBlob,
    },
    /// One end of a local session; the packet carries its memory.
    CachedLocal {
        side: Side,
        options_blob: SocketOptionsBlob,
    },
    /// A ring that is new to the process, of so many bytes: the packet carries its map and that of its doorbell. None: it is
    /// one that the process has already.
    Direct {
        ring_size: Option<u32>,
    },
    /// The packet carries the side that rings.
    PeerNotifier {
        number: u64,
    },
    /// The server moves the session's data through the descriptor: calls go to the kernel.
    Relayed,
    Recalled {
        sessions: Vec<SessionId>,
        /// The transmit queues have changed.
        has_tx_queues: bool,
    },
    /// The packet carries the taps of those that are new, in their order.
    TxQueues(TxQueues),
    /// The packet carries the kernel socket.
    KernelSocket,
    /// The program has it: a port with its number.
    Claimed {
        guard: Guard,
    },
    /// On that device.
    Joined {
        interface: u32,
    },
    Done,
    Probed(Option<Probed>),
    /// An encoded list of [`SessionReport`](crate::report::SessionReport).
    Sessions(Blob),
    /// An encoded list of [`RawReport`](crate::report::RawReport).
    RawFlows(Blob),
    /// An encoded list of [`CounterReport`](crate::report::CounterReport).
    Counters(Blob),
    Status(StatusReport),
    Reloaded(Reloaded),
    Qos(QosReply),
    Extension(ExtensionReply),
    /// An errno value of Linux.
    Error {
        errno: i32,
    },
}

/// What has become of a new configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reloaded {
    /// It holds, with other values of these keys.
    Changed(Vec<String>),
    /// The old one stays, for these reasons.
    Refused(Vec<String>),
}

/// What a process sends through. Of each transmit queue is said how much is to be handed over at once, in bytes,
/// so that a sender notices soon when it has to wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TxQueues {
    /// Of sessions without a transmit queue of their own; none if nothing is reserved for them.
    pub main_burst: Option<u32>,
    pub others: Vec<TxQueue>,
}

impl TxQueues {
    /// Of one process, besides its main one. The descriptors of all fit into a message.
    pub const MAX: u8 = 8;
}

/// A tap for the sessions of one reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TxQueue {
    /// From 1 on.
    pub number: u8,
    pub state: TxQueueState,
    /// A flow or a port.
    pub scope: Scope,
    pub burst: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TxQueueState {
    /// It is being made: its sessions wait for it.
    Awaited,
    /// Its tap comes with this message.
    New,
    Open,
}

/// What libraries are told once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Microseconds a waiting thread looks at the ring before it sleeps.
    pub spin_us: u32,
    /// Default and maximum socket buffers in bytes.
    pub send_buffer: BufferLimits,
    pub receive_buffer: BufferLimits,
    /// Largest segment handed to the device, bytes of TCP payload.
    pub gso_max: u32,
    /// Name of the congestion controller, as in `TCP_CONGESTION`.
    pub congestion: String,
    /// Of sessions that choose nothing.
    pub delivery: Delivery,
    pub mapping: MappingChoice,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferLimits {
    pub initial: u32,
    pub maximum: u32,
}

/// Why a socket is the kernel's. The names are what `portolan ss` and the log show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KernelReason {
    /// The peer or the bound address is this host.
    LocalAddress,
    /// The route leaves through a device that Portolan does not manage.
    UnmanagedDevice,
    /// No route: the kernel gives the exact error.
    NoRoute,
    /// Multicast and broadcast destinations.
    NotUnicast,
    /// The family, type or option is not Portolan's.
    Unsupported,
}

impl KernelReason {
    pub const fn name(self) -> &'static str {
        match self {
            KernelReason::LocalAddress => "local-address",
            KernelReason::UnmanagedDevice => "unmanaged-device",
            KernelReason::NoRoute => "no-route",
            KernelReason::NotUnicast => "not-unicast",
            KernelReason::Unsupported => "unsupported",
        }
    }
}

/// Answer to `Probe`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    /// Of the server, as in `Welcome`.
    pub incarnation: u64,
    pub session: SessionId,
    pub standing: ProbedState,
    /// The socket is of `AF_INET6`, whatever its addresses are.
    pub is_v6: bool,
    #[serde(with = "portolan_types::endpoint")]
    pub local: SocketAddr,
    pub options_blob: SocketOptionsBlob,
}

/// Where a session stands that somebody has a descriptor of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbedState {
    Bound,
    Listening {
        backlog: u32,
        /// Connections that nobody has accepted, where the server has the queue.
        waiting: u32,
    },
    /// Somebody holds it, or the server does: `Cache` tells.
    Connected {
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
    },
    /// UDP: `Share` gives it to whoever uses it.
    Datagrams {
        remote: Option<SocketAddr>,
    },
}

/// What a library knows of a socket beside its session: the options that were set, in its own form.
/// The server keeps it for the next library that has the descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptionsBlob(pub Vec<u8>);

impl SocketOptionsBlob {
    /// Bytes; the server forgets what is longer.
    pub const MAX: usize = 4096;
}

/// What the server leaves on a descriptor: on a listener's one for every session to accept, on a
/// connecting one exactly one.
#[derive(Debug, Serialize, Deserialize)]
pub enum DescriptorEvent {
    /// The session is cached at the slot named in `Connect`.
    Established {
        capsule: Blob,
        generation: Generation,
    },
    /// A local session is open; the packet carries its memory. The opener's side is cached at the
    /// slot named in `Connect`.
    EstablishedLocal,
    /// The active open failed.
    Failed { errno: i32 },
    /// A session to accept; the packet carries its descriptor. The server holds it until `Cache`.
    Accepted {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        caching: Caching,
    },
    /// A connection that reached the port by the kernel's stack; the packet carries the kernel
    /// socket.
    AcceptedKernel { remote: SocketAddr },
    /// From a library to itself: connections that it opened wait to be accepted.
    AcceptedHere,
}
