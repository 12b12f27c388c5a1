//! Control messages: of the SEQPACKET connection between each process and the server, and those that the
//! server puts into a descriptor.
//!
//! Every request is one packet. The server answers each request that has a reply with one packet
//! that carries the same `id`, in any order.

use core::net::{IpAddr, SocketAddr};

use portolan_types::{ChannelId, FlowKey, Generation, Protocol, SessionId, Slot};
use serde::{Deserialize, Serialize};

use crate::capture::{CaptureNews, CaptureRequest, CaptureRing};
use crate::extension::{ExtensionReply, ExtensionRequest};
use crate::ip::IpOptions;
use crate::local::Side;
use crate::qos::{QosReply, QosRequest, Scope};
use crate::raw::Guard;
use crate::report::StatusReport;

/// Library or command to server.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Identifies the request in its reply; 0 requests no reply.
    pub id: u32,
    pub body: RequestBody,
}

/// Server to library or command.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reply {
    pub id: u32,
    pub body: ReplyBody,
}

/// A port from which a process opens connections itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedPort {
    /// Names it in requests.
    pub id: SessionId,
    pub number: u16,
}

/// How a request names its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionRef {
    /// A new session. The packet carries two fds: the descriptor's far end, which the server keeps, then the
    /// near end, whose socket cookie the server records before it closes its copy.
    New,
    Known(SessionId),
    /// A session of an earlier server, under its old number; fds as of `New`. For `Bind` only. Only processes that had
    /// the descriptor before the restart know the number: if another of them has already re-opened a TCP socket, the
    /// reply is
    /// `Rejoined`.
    Again(SessionId),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum RequestBody {
    /// First message of a library; its format never changes. `version` is the word of [`Speaks`](crate::Speaks).
    /// May carry the ring of a channel of an earlier server, to continue with that channel.
    /// Reply: `Welcome`, or `EPROTO` from a server of another version.
    Hello { version: u32, program: String },
    /// Carries a socket bound to a port below the first unprivileged one, which proves the right to bind that port with
    /// the next request. Reply: `Done`.
    ShowRight,
    /// Binds a local endpoint. UDP: the session is then cached at `slot`. Reply: `Bound`, `UseKernel` or
    /// `Error`. A known session is a TCP one whose port was released with a failed connection or with its
    /// listener.
    Bind {
        session: SessionRef,
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        reuse: Reuse,
        v6_only: bool,
        slot: Slot,
    },
    /// TCP: starts an active open; reply `Connecting`, and later a `DescriptorEvent` on the descriptor.
    /// UDP: sets the peer; reply `Connected`. Either: `UseKernel` or `Error`.
    Connect {
        session: SessionRef,
        protocol: Protocol,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        slot: Slot,
        options: HandshakeOptions,
        early: FastOpenMode,
    },
    /// Makes a bound session a listener, or changes its backlog. When it becomes one, the packet carries the
    /// far and near end of the SEQPACKET pair that replaces its descriptor. An unbound session first gets an
    /// ephemeral port. With a slot the process offers to perform the handshakes itself, with the port's
    /// segments delivered to that slot. Reply: `Listening` or `Error`.
    Listen {
        session: SessionRef,
        backlog: u32,
        options: HandshakeOptions,
        options_blob: SocketOptionsBlob,
        slot: Option<Slot>,
    },
    /// Requests a port token: a kernel socket bound to a listener's port that does not listen and that the server does
    /// not use. The library listens on it while there is no server, and later shows its right to the port with it.
    /// Reply:
    /// `PortToken` or `Error`.
    PortToken { session: SessionId },
    /// Makes a listener a bound session again: connections not yet accepted are reset; the port is kept if the process
    /// chose it. The packet carries the far and near end of the pair that replaces its descriptor. Reply: `Done` or
    /// `Error`.
    StopListening { session: SessionId },
    /// Replaces the descriptor of a bound session; the packet carries the far and near end.
    ReplaceDescriptor { session: SessionId },
    /// Registers a connection that the process has opened itself: cached at `slot` from then on. `port` is the listener
    /// delegated to it, or the leased port. The packet carries the far and near end of its descriptor. Reply: `Bound` or
    /// `Error`.
    Register {
        port: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        slot: Slot,
    },
    /// The process holds a connection of an earlier server's time: cached at `slot`, under its old number, or without a
    /// number (0), if it had not registered the connection and the row of the port entitles it. The packet carries the far
    /// and near end of a new descriptor, and the memory if that is the evidence. Reply: `Adopted` or `Error`.
    Adopt {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
        slot: Slot,
        evidence: Evidence,
        reuse: Reuse,
        v6_only: bool,
        delivery: Delivery,
        priority: u8,
    },
    /// Hands a connection of such a listener that was not accepted yet to the server. No reply.
    ReturnPending { listener: SessionId, capsule: Blob },
    /// Hands a connection of such a listener or of a leased port to the server that is not registered, and that its
    /// program has closed: the server finishes it. No reply.
    ReturnClosed { port: SessionId, capsule: Blob },
    /// Requests ephemeral ports of an address of this host, from which the process opens connections itself, with their
    /// segments delivered to `slot`. Reply: `Leased`, with at most that many, or `Error`.
    LeasePorts {
        local: IpAddr,
        slot: Slot,
        most: u32,
    },
    /// The process no longer opens connections from these ports, and has no unregistered ones on them. No reply.
    ReturnPorts { ports: Vec<SessionId> },
    /// Reports a flood of SYNs to such a listener, which the packet filter should answer (ADR 22), or a change of
    /// its queue. No reply.
    Flooded {
        listener: SessionId,
        queue: AcceptQueue,
    },
    /// Flows to such a listener that the process knows: the packet filter must leave them to it. No reply.
    ExemptFlows {
        listener: SessionId,
        flows: Vec<FlowKey>,
    },
    /// The process has the listener, as others do, and offers to perform a part of its handshakes. Reply: `Listening` or
    /// `Error`.
    TakePart {
        listener: SessionId,
        offer: PartOffer,
    },
    /// The process no longer performs the listener's handshakes. Reply: `Done` or `Error`.
    EndDelegation { listener: SessionId },
    /// Caches at `slot` a session that the server holds, accepted or parked; a relayed one stays relayed.
    /// A session held by another process is recalled first; for that the packet carries the descriptor, as
    /// proof. Reply: `Cached`, `CachedLocal`, `Relayed` or `Error`.
    Cache { session: SessionId, slot: Slot },
    /// The process has accepted a session and leaves it with the server until its first use
    /// ([`Caching::WithFirstUse`]). No reply.
    Accepted { session: SessionId },
    /// Makes the server relay a session, whose descriptor the packet carries; needs no `Hello`. Reply:
    /// `Relayed` or `Error`.
    Relay { session: SessionId, reader: Reader },
    /// UDP: from now on the session sends and receives through the kernel, for all who have the
    /// descriptor, which the packet carries; needs no `Hello`. Unread datagrams are sent along, as a list
    /// of [`crate::datagram::UnreadDatagram`]. Reply: `KernelSocket` or `Error`.
    Share {
        session: SessionId,
        /// The socket is of `AF_INET6`, whatever its addresses are.
        is_v6: bool,
        unread: Blob,
    },
    /// Datagrams that reached the process after it sent `Share`. No reply.
    Unread { session: SessionId, unread: Blob },
    /// Requests the sessions that the server recalls, and other news. Sent when the recall event is set.
    /// Reply: `Recalled`.
    FetchRecalls,
    /// Requests the rings in which the process is to record what its local sessions carry. Reply: `Captures`.
    FetchCaptures,
    /// Requests the process's transmit queues. Reply: `TxQueues`.
    TxQueues,
    /// All sessions of that transmit queue use it, and none of their frames wait elsewhere. No reply.
    TxQueueEntered { number: u8 },
    /// No session uses that transmit queue any more. No reply.
    TxQueueClosed { number: u8 },
    /// A cached TCP session is about to be flushed: from now on its packets go to the server, and wait there.
    /// Reply: `Done`, after which no new packets reach the process.
    BeginFlush { session: SessionId },
    /// The session could not be encoded, and stays. No reply.
    AbortFlush { session: SessionId },
    /// Returns a cached session. The capsule of a local one is empty: its state is in its memory. Reply:
    /// `Done`, after which the server holds it.
    Flush {
        session: SessionId,
        capsule: Capsule,
        then: AfterFlush,
        options_blob: SocketOptionsBlob,
    },
    /// Requests a receive ring for a session that the process holds. Reply: `Direct`, or `Error`, if its frames
    /// continue to use the channel's ring.
    Direct { session: SessionId },
    /// The process cannot map the ring that it was sent. No reply.
    RefuseRing { session: SessionId },
    /// Options set on a bound TCP socket whose descriptor other processes have or will get. Reply: `Done`.
    Describe {
        session: SessionId,
        options_blob: SocketOptionsBlob,
    },
    /// Sets the priority of frames of a session that the process holds (`SO_PRIORITY`). Reply: `Done`.
    Prioritize { session: SessionId, priority: u8 },
    /// Releases a session without state to keep: unconnected, listening or UDP. Reply: `Done`; the port is
    /// then free.
    Release { session: SessionId },
    /// Removes the UDP peer (`connect` to `AF_UNSPEC`). Reply: `Bound`.
    Disconnect { session: SessionId, slot: Slot },
    /// Requests the kernel socket that reserves a UDP session's port, to send what only the kernel can.
    /// Reply: `KernelSocket`, or `Error`.
    KernelSocket { session: SessionId, is_v6: bool },
    /// Changes a UDP session's group memberships. Reply: `Joined` or `Error`.
    Group {
        session: SessionId,
        change: GroupChange,
    },
    /// Requests that a neighbour be resolved. No reply; the result appears in the metastate.
    Resolve { interface: u32, address: IpAddr },
    /// A frame that arrived for a session the library no longer holds, or a SYN for one whose connection has ended. No
    /// reply.
    MisdeliveredFrame {
        #[serde(with = "crate::bytes")]
        frame: Vec<u8>,
    },
    /// Requests the notifier of the peer of a local session that this process holds; of a session of an earlier server's
    /// time, the one with the number in the session's memory. Reply: `PeerNotifier` or `Error`.
    PeerNotifier { session: SessionId, number: u64 },
    /// Identifies a descriptor that this process did not open. The packet carries the fd, as proof; needs
    /// no `Hello`. Reply: `Probed`.
    Probe,
    /// Claims all packets of a protocol for the process, at a slot of its raw flows. Reply: `Claimed` or
    /// `Error`.
    ClaimProtocol { guard: Guard, slot: Slot },
    /// Releases the protocol at that slot. No reply.
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
    /// For commands; needs no `Hello`. Has the caller's processes, or root all, record what their local sessions carry,
    /// until the connection is closed. Replies: `Capture`, as long as it lasts, or `Error`.
    Capture(CaptureRequest),
    /// For root's commands; needs no `Hello`. Replaces the server's configuration by this text. Reply: `Reloaded` or
    /// `Error`.
    Reload { text: Blob },
}

/// A part of a listener's handshakes. Its segments are delivered to the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartOffer {
    /// For the first time, or when it is asked to, because processes take part or leave. The server knows all connections
    /// whose handshakes the process has performed until now.
    Anew(Slot),
    /// The same flows as under the previous server.
    AsBefore(Slot),
}

/// Options that affect the handshakes that the server performs for a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandshakeOptions {
    pub ip: IpOptions,
    /// `SO_REUSEADDR`, for a port that is chosen with the connection.
    pub reuse_address: bool,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: Option<u32>,
    /// `SO_RCVBUF` as requested by the application, bytes.
    pub receive_buffer: Option<u32>,
    /// `TCP_MAXSEG`.
    pub max_segment: Option<u16>,
    /// `TCP_SYNCNT`.
    pub syn_retries: Option<u8>,
    /// `TCP_USER_TIMEOUT`.
    pub user_timeout_ms: Option<u32>,
    /// `TCP_DEFER_ACCEPT`.
    pub defer_accept_seconds: Option<u32>,
    /// `TCP_FASTOPEN`: limit of connections with incomplete handshakes.
    pub fast_open_queue: Option<u32>,
    /// `TCP_FASTOPEN_KEY`: keys of the listener's cookies; none for the server's secret.
    pub fast_open_keys: Option<FastOpenKeys>,
    /// `SO_CONCURRENT_SERVER`: whether children use accepted sessions; if unset, what was observed last.
    pub is_concurrent_server: Option<bool>,
    /// How the session's packets reach its holder; if unset, as configured in the server.
    pub delivery: Option<Delivery>,
    /// `SO_DELEGATE`: whether the process performs the handshakes; if unset, the server chooses.
    pub is_delegated: Option<bool>,
    /// `SO_PRIORITY`, at most [`HandshakeOptions::PRIORITY_MAX`].
    pub priority: u8,
}

impl HandshakeOptions {
    /// Higher ones name a user's classes and require root; sockets with such priorities are the kernel's.
    pub const PRIORITY_MAX: u8 = 6;
}

/// The key of new Fast Open cookies, and one whose cookies are still accepted.
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
    /// By the ring in shared memory; by the tap only while the holder sleeps.
    #[default]
    Shm,
    /// Each packet by the tap, as a message that the holder reads.
    Ipc,
    /// To the server, which runs the protocol and relays. For TCP only.
    Server,
    /// As `Shm`, by a filter in the device's driver (XDP) if the server has attached one.
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

/// The receive ring of a process's sessions (BR §3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MappingChoice {
    /// One ring for all sessions.
    #[default]
    Shared,
    /// A ring for each session, as long as rings are available.
    Direct,
}

/// Whether the accept queue has room for another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AcceptQueue {
    HasRoom,
    Full,
}

/// When an accepted session is transferred to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Caching {
    /// With `accept`, to the calling process.
    WithAccept,
    /// With the first call that needs it, to the calling process, which is a child of the one that
    /// accepted. What a child writes to the descriptor before begins a relay, without a request.
    WithFirstUse,
}

/// What shows that a process holds a connection of an earlier server's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Evidence {
    /// The row of its flow, which only servers write.
    Row(Generation),
    /// The memory of a session within the host, which nobody but its ends has.
    Memory(Side),
}

/// Which descriptor an adopted connection has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DescriptorOfAdopted {
    /// That of before: the next server has the other end of it.
    Kept,
    /// The one in the request.
    New,
}

/// How an active open uses Fast Open (RFC 7413).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FastOpenMode {
    #[default]
    No,
    /// `TCP_FASTOPEN_CONNECT`: opens only if there is no cookie, and requests one.
    IfCookie,
    /// Opens with data if there is a cookie or `cookieless`, and otherwise requests a cookie.
    Payload {
        bytes: Vec<u8>,
        cookieless: bool,
        /// The caller waits for the connection, to send what the SYN cannot carry.
        waits: bool,
    },
}

/// `SO_REUSEADDR` and `SO_REUSEPORT` at the time of the bind.
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
    /// Index of the device; 0 for the one chosen by the routes.
    pub interface: u32,
    pub source: Option<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupAction {
    /// Joins for all sources, or for the additional `source`.
    Join,
    /// Leaves entirely, or only for `source`.
    Leave,
    Block,
    Unblock,
}

/// What the server does with a returned session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterFlush {
    /// The last descriptor is being closed: finish sending, FIN, TIME-WAIT.
    Close,
    /// The descriptor stays open: relay through it.
    Relay(Reader),
    /// Other processes may have the descriptor: keep the session for the next one that requests it. It is
    /// closed with the last descriptor.
    Park,
}

/// Which process uses the descriptor of a session to be relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reader {
    /// The requesting process.
    Sender,
    /// A process that may not use Portolan. The requesting process will take the session back before it uses
    /// it again.
    Other,
}

/// A session in transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capsule {
    pub state: Blob,
    /// Unread bytes that precede those in `state`: in a memfd that the packet carries after that of
    /// `state`, if there is one.
    pub unread: Option<ByteRange>,
}

/// A range of a memory.
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

/// Bytes in the message, or in a memfd that the packet carries.
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

/// A piece of a list's bytes. Each comes with a reply of its own to the one request, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListPart {
    #[serde(with = "crate::bytes")]
    pub bytes: Vec<u8>,
    pub is_last: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ReplyBody {
    /// Fds, in this order: tap, receive ring map, doorbell map, metastate memfd (read-only),
    /// statistics memfd (see [`crate::report::StatisticsRow`]), journal memfd (see [`crate::journal`]), recall event and
    /// notifier (both sockets). Without the maps if the process continues with those that it has.
    Welcome {
        channel: ChannelId,
        /// The channel is that of the ring in `Hello`: connections whose rows lead there can be adopted.
        continues: bool,
        /// A random number of this run of the server: sessions opened under another must be opened again.
        incarnation: u64,
        /// Number of the notifier, by which peers in local sessions know it.
        notifier: u64,
        /// Bytes of the receive ring's data area, a power of two.
        ring_size: u32,
        /// Index of the process's tap device, for diagnosis only.
        tap: u32,
        /// The tap accepts UDP payloads for segmentation by the kernel (USO).
        cuts_datagrams: bool,
        parameters: Parameters,
    },
    Bound {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        generation: Generation,
    },
    Adopted {
        session: SessionId,
        descriptor: DescriptorOfAdopted,
    },
    /// Answer to `SessionRef::Again`: another process has re-opened the session; the packet carries its descriptor.
    Rejoined {
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
    },
    /// The packet carries the socket.
    PortToken,
    Leased {
        ports: Vec<LeasedPort>,
        /// How connections are opened (`portolan_stack::passive::OpenRules`, encoded).
        rules: Vec<u8>,
    },
    Connecting {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        /// Bytes of `FastOpenMode::Payload` sent with the SYN.
        early: u32,
    },
    /// Nothing is opened yet: data may be sent with the SYN (`FastOpenMode::IfCookie`).
    Deferred,
    Connected {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        generation: Generation,
    },
    /// The call is not Portolan's; the program should use the kernel's socket. If the session was bound, the
    /// packet carries the kernel socket that reserves the port.
    UseKernel {
        reason: KernelReason,
    },
    Listening {
        session: SessionId,
        #[serde(with = "portolan_types::endpoint")]
        local: SocketAddr,
        /// If set, the process performs the handshakes from now on, by these rules
        /// (`portolan_stack::passive::Rules`, encoded).
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
    /// With a size: a ring that is new to the process; the packet carries its map and that of its doorbell. Without: a
    /// ring that the process has already.
    Direct {
        ring_size: Option<u32>,
    },
    /// The packet carries the sending side.
    PeerNotifier {
        number: u64,
    },
    /// The server relays the session's data through the descriptor: calls go to the kernel.
    Relayed,
    Recalled {
        sessions: Vec<SessionId>,
        /// Local sessions of this process whose peers have ended, whatever their memory says: who shares it could take
        /// that back.
        ended: Vec<SessionId>,
        /// The transmit queues have changed.
        has_tx_queues: bool,
        /// The rings of `FetchCaptures` have changed.
        has_captures: bool,
    },
    /// All rings of the process. The packet carries the memory of the new ones, in the same order.
    Captures(Vec<CaptureRing>),
    /// `Process` carries its ring.
    Capture(CaptureNews),
    /// The packet carries the taps of the new ones, in their order.
    TxQueues(TxQueues),
    /// The packet carries the kernel socket.
    KernelSocket,
    /// The program has claimed it; a port with its number.
    Claimed {
        guard: Guard,
    },
    /// The device of the membership.
    Joined {
        interface: u32,
    },
    Done,
    Probed(Option<Probed>),
    /// An encoded list of [`SessionReport`](crate::report::SessionReport).
    Sessions(ListPart),
    /// An encoded list of [`RawReport`](crate::report::RawReport).
    RawFlows(ListPart),
    /// An encoded list of [`CounterReport`](crate::report::CounterReport).
    Counters(ListPart),
    Status(StatusReport),
    Reloaded(Reloaded),
    Qos(QosReply),
    Extension(ExtensionReply),
    /// An errno value of Linux.
    Error {
        errno: i32,
    },
}

/// The result of a new configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reloaded {
    /// It is in effect, with changed values of these keys.
    Changed(Vec<String>),
    /// It was refused, for these reasons.
    Refused(Vec<String>),
}

/// The transmit queues of a process, each with the number of bytes to hand over at once, which is limited so that a
/// sender soon notices when it must wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TxQueues {
    /// For sessions without a transmit queue of their own; none if nothing is reserved for them.
    pub main_burst: Option<u32>,
    pub others: Vec<TxQueue>,
}

impl TxQueues {
    /// Maximum per process, besides the main one. The descriptors of all fit into one message.
    pub const MAX: u8 = 8;
}

/// A tap for the sessions of one reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TxQueue {
    /// Starts at 1.
    pub number: u8,
    pub state: TxQueueState,
    /// A flow or a port.
    pub scope: Scope,
    pub burst: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TxQueueState {
    /// It is being created: its sessions wait for it.
    Awaited,
    /// Its tap comes with this message.
    New,
    Open,
}

/// Parameters sent to libraries once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Microseconds for which a waiting thread polls the ring before it sleeps.
    pub spin_us: u32,
    /// Default and maximum socket buffers in bytes.
    pub send_buffer: BufferLimits,
    pub receive_buffer: BufferLimits,
    /// Largest segment passed to the device, bytes of TCP payload.
    pub gso_max: u32,
    /// Name of the congestion controller, as in `TCP_CONGESTION`.
    pub congestion: String,
    /// For sessions without a choice of their own.
    pub delivery: Delivery,
    pub mapping: MappingChoice,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferLimits {
    pub initial: u32,
    pub maximum: u32,
}

/// Why a socket is the kernel's. `portolan ss` and the log show the names.
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
    /// Portolan does not support the family, type or option.
    Unsupported,
    /// The host has a policy of its own, which the kernel applies.
    Policy,
}

impl KernelReason {
    pub const fn name(self) -> &'static str {
        match self {
            KernelReason::LocalAddress => "local-address",
            KernelReason::UnmanagedDevice => "unmanaged-device",
            KernelReason::NoRoute => "no-route",
            KernelReason::NotUnicast => "not-unicast",
            KernelReason::Unsupported => "unsupported",
            KernelReason::Policy => "policy",
        }
    }
}

/// Answer to `Probe`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    /// That of the server, as in `Welcome`.
    pub incarnation: u64,
    pub session: SessionId,
    pub standing: ProbedState,
    /// The socket is of `AF_INET6`, whatever its addresses are.
    pub is_v6: bool,
    #[serde(with = "portolan_types::endpoint")]
    pub local: SocketAddr,
    pub options_blob: SocketOptionsBlob,
}

/// The state of a session found by its descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbedState {
    Bound,
    Listening {
        backlog: u32,
        /// Number of connections not yet accepted, if the server has the queue.
        waiting: u32,
    },
    /// A process or the server holds it; see `Cache`.
    Connected {
        #[serde(with = "portolan_types::endpoint")]
        remote: SocketAddr,
    },
    /// UDP: `Share` makes it available to all who use it.
    Datagrams {
        remote: Option<SocketAddr>,
    },
}

/// A library's state of a socket besides its session: the options that were set, in its own format.
/// The server keeps it for the next library that has the descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptionsBlob(pub Vec<u8>);

impl SocketOptionsBlob {
    /// Maximum length in bytes; longer ones are discarded by the server.
    pub const MAX: usize = 4096;
}

/// What the server sends on a descriptor: on that of a listener one per session to accept, on that of an
/// active open exactly one.
#[derive(Debug, Serialize, Deserialize)]
pub enum DescriptorEvent {
    /// The session is cached at the slot named in `Connect`.
    Established {
        capsule: Blob,
        generation: Generation,
    },
    /// A local session is open; the packet carries its memory. The opener's side is cached at the slot
    /// named in `Connect`.
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
    /// A connection that arrived through the kernel's stack; the packet carries the kernel socket.
    AcceptedKernel { remote: SocketAddr },
    /// From a library to itself: connections that it opened wait to be accepted.
    AcceptedHere,
}
