//! Protocol extensions (PX): what an owner sends to have one installed, and what the server says of
//! those that are. An object file is parsed by its owner; only instructions, maps and what joins
//! them travel.

pub mod layout;

use portolan_types::{Protocol, SessionId};
use serde::{Deserialize, Serialize};

use crate::control::Blob;
use crate::qos::Refusal;
use crate::raw;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExtensionRequest {
    /// For registered processes. Reply: `Installed` or `Refused`.
    Install(Extension),
    /// Admits as `Install` does and forgets it again; needs no `Hello`, and no guard. Reply:
    /// `Checked` or `Refused`.
    Check(Code),
    /// A handler that runs in a thread of the process: it is listed for as long as the process has the endpoint. Reply:
    /// `Announced` or `Refused`.
    Announce {
        name: String,
        event: Event,
        guard: Guard,
        priority: u8,
    },
    /// Reply: `Removed` or `Refused`.
    Remove { number: u16 },
    /// Reply: `List`.
    List,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExtensionReply {
    /// The packet carries the maps, in their order.
    Installed {
        number: u16,
        cost: Cost,
    },
    Checked(Cost),
    /// What the handler did is to be said in that row of the statistics memfd.
    Announced {
        number: u16,
        row: u8,
    },
    Removed,
    /// An encoded list of [`ExtensionReport`].
    List(Blob),
    Refused(Refusal),
}

/// A handler, and when it is to be called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    pub name: String,
    pub event: Event,
    /// Endpoints whose packets raise the event for it.
    pub guards: Vec<Guard>,
    /// Of several on one event, the lowest is called first; of equals, the one that came first.
    pub priority: u8,
    pub code: Code,
}

impl Extension {
    pub const NAME_MAX: usize = 32;
    pub const GUARDS_MAX: usize = 64;
}

/// Nodes of the protocol graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    UdpReceive,
    /// Of a listener's port: all segments, whatever connection they are of.
    TcpReceive,
    /// What the owner sends from the port.
    UdpSend,
    TcpSend,
    /// Frames of an EtherType of the owner's own.
    EthernetReceive,
    /// Packets of an IP protocol of the owner's own.
    IpReceive,
    /// Of those what the owner sends.
    EthernetSend,
    IpSend,
}

impl Event {
    pub const ALL: [Event; 8] = [
        Event::UdpReceive,
        Event::TcpReceive,
        Event::UdpSend,
        Event::TcpSend,
        Event::EthernetReceive,
        Event::IpReceive,
        Event::EthernetSend,
        Event::IpSend,
    ];

    pub fn of(protocol: Protocol, direction: Direction) -> Event {
        match (protocol, direction) {
            (Protocol::Udp, Direction::Receive) => Event::UdpReceive,
            (Protocol::Tcp, Direction::Receive) => Event::TcpReceive,
            (Protocol::Udp, Direction::Send) => Event::UdpSend,
            (Protocol::Tcp, Direction::Send) => Event::TcpSend,
        }
    }

    /// What raises it, in that direction, for a protocol that a program runs itself.
    pub fn of_raw(guard: raw::Guard, direction: Direction) -> Event {
        match (guard, direction) {
            (raw::Guard::EtherType(_), Direction::Receive) => Event::EthernetReceive,
            (raw::Guard::EtherType(_), Direction::Send) => Event::EthernetSend,
            (raw::Guard::IpProtocol(_), Direction::Receive) => Event::IpReceive,
            (raw::Guard::IpProtocol(_), Direction::Send) => Event::IpSend,
            (raw::Guard::Port { protocol, .. }, direction) => Event::of(protocol, direction),
        }
    }

    /// None where there are no ports.
    pub const fn protocol(self) -> Option<Protocol> {
        match self {
            Event::UdpReceive | Event::UdpSend => Some(Protocol::Udp),
            Event::TcpReceive | Event::TcpSend => Some(Protocol::Tcp),
            Event::EthernetReceive | Event::IpReceive | Event::EthernetSend | Event::IpSend => None,
        }
    }

    pub const fn direction(self) -> Direction {
        match self {
            Event::UdpReceive | Event::TcpReceive | Event::EthernetReceive | Event::IpReceive => {
                Direction::Receive
            }
            Event::UdpSend | Event::TcpSend | Event::EthernetSend | Event::IpSend => {
                Direction::Send
            }
        }
    }

    pub fn from_name(name: &str) -> Option<Event> {
        Event::ALL.into_iter().find(|event| event.name() == name)
    }

    /// As the paper writes them.
    pub const fn name(self) -> &'static str {
        match self {
            Event::UdpReceive => "UDP.PacketRecv",
            Event::TcpReceive => "TCP.PacketRecv",
            Event::UdpSend => "UDP.PacketSend",
            Event::TcpSend => "TCP.PacketSend",
            Event::EthernetReceive => "Ethernet.PacketRecv",
            Event::IpReceive => "IP.PacketRecv",
            Event::EthernetSend => "Ethernet.PacketSend",
            Event::IpSend => "IP.PacketSend",
        }
    }

    /// As the filter's tables know it.
    pub const fn number(self) -> u8 {
        match self {
            Event::UdpReceive => 1,
            Event::TcpReceive => 2,
            Event::UdpSend => 3,
            Event::TcpSend => 4,
            Event::EthernetReceive => 5,
            Event::IpReceive => 6,
            Event::EthernetSend => 7,
            Event::IpSend => 8,
        }
    }
}

/// Which packets raise the event for the extension: those of an endpoint that its owner has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guard {
    /// The port of this session.
    Session(SessionId),
    /// A protocol that the owner runs itself, a transport at a port among them.
    Raw(raw::Guard),
}

/// Which packets a handler is written for: what it is shown, and may decide, differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    #[default]
    Receive,
    Send,
}

/// What clang made, parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    pub direction: Direction,
    /// As the kernel has them, eight bytes each: the functions, one behind the other.
    pub instructions: Vec<u64>,
    /// Where the handler begins.
    pub handler: u32,
    pub predicate: Option<u32>,
    pub maps: Vec<MapDefinition>,
    pub relocations: Vec<Relocation>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapDefinition {
    pub name: String,
    pub kind: MapKind,
    pub key: u32,
    pub value: u32,
    pub entries: u32,
    /// Of entry 0 of an array.
    pub contents: Vec<u8>,
    /// Neither the extension nor its owner writes it.
    pub is_constant: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MapKind {
    Hash,
    Array,
    PerCpuArray,
    LruHash,
    Ring,
}

impl MapKind {
    pub const ALL: [MapKind; 5] = [
        MapKind::Hash,
        MapKind::Array,
        MapKind::PerCpuArray,
        MapKind::LruHash,
        MapKind::Ring,
    ];

    /// As linux/bpf.h numbers them.
    pub const fn number(self) -> u32 {
        match self {
            MapKind::Hash => 1,
            MapKind::Array => 2,
            MapKind::PerCpuArray => 6,
            MapKind::LruHash => 9,
            MapKind::Ring => 27,
        }
    }

    pub fn from_number(number: u32) -> Option<MapKind> {
        MapKind::ALL
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

/// The two instructions from `instruction` on load the map, or with `offset` the address of that
/// byte of its entry 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocation {
    pub instruction: u32,
    pub map: u16,
    pub offset: Option<u32>,
}

/// What an admitted extension costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    pub instructions: u32,
    /// The verifier went through, so that no run takes more.
    pub verified: u32,
    /// Bytes of its maps.
    pub memory: u64,
}

/// One extension, as `portolan ext` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtensionReport {
    pub number: u16,
    pub name: String,
    pub pid: u32,
    pub uid: u32,
    pub event: Event,
    /// Or EtherTypes, or IP protocols, as the event has them.
    pub ports: Vec<u16>,
    pub priority: u8,
    pub placement: Placement,
    pub standing: ExtensionState,
    pub cost: Cost,
    /// Nanoseconds that one run may take.
    pub limit: u64,
    pub statistics: layout::ExtensionStatistics,
}

/// Where a handler runs (PX §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    Filter,
    /// Of its owner's: what it costs is its owner's, and nothing limits it. What it did its owner says.
    Thread,
}

impl Placement {
    pub const fn name(self) -> &'static str {
        match self {
            Placement::Filter => "filter",
            Placement::Thread => "thread",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExtensionState {
    Running,
    /// It took too long too often, and was removed.
    OverBudget,
}

impl ExtensionState {
    pub const fn name(self) -> &'static str {
        match self {
            ExtensionState::Running => "running",
            ExtensionState::OverBudget => "over-budget",
        }
    }
}
