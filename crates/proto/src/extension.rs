//! Protocol extensions (PX): what an owner sends to have one installed, and what the server reports about
//! installed ones. The owner parses the object file; only instructions, maps and the relocations that
//! connect them are sent.

pub mod layout;

use portolan_types::{Protocol, SessionId};
use serde::{Deserialize, Serialize};

use crate::control::ListPart;
use crate::qos::Refusal;
use crate::raw;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExtensionRequest {
    /// For registered processes. Shows the maps, in order, if a previous server has installed it. Reply: `Installed` or
    /// `Refused`.
    Install(Extension),
    /// Verifies the code as `Install` does, and discards it; needs no `Hello`, and no guard. Reply:
    /// `Checked` or `Refused`.
    Check(Code),
    /// Announces a handler that runs in a thread of the process: it is listed as long as the process has the endpoint.
    /// Reply:
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
    /// The packet carries the maps, in order.
    Installed {
        number: u16,
        cost: Cost,
    },
    Checked(Cost),
    /// The handler's statistics belong in that row of the statistics memfd.
    Announced {
        number: u16,
        row: u8,
    },
    Removed,
    /// An encoded list of [`ExtensionReport`].
    List(ListPart),
    Refused(Refusal),
}

/// A handler, and when it is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    pub name: String,
    pub event: Event,
    /// Endpoints whose packets raise the event for the handler.
    pub guards: Vec<Guard>,
    /// On one event, the handler with the lowest priority is called first; among equals, the earliest.
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
    /// On the port of a listener: all segments, of all its connections.
    TcpReceive,
    /// Packets that the owner sends from the port.
    UdpSend,
    TcpSend,
    /// Frames of a raw EtherType of the owner.
    EthernetReceive,
    /// Packets of a raw IP protocol of the owner.
    IpReceive,
    /// Frames and packets of these that the owner sends.
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

    /// The event of a raw protocol in that direction.
    pub fn of_raw(guard: raw::Guard, direction: Direction) -> Event {
        match (guard, direction) {
            (raw::Guard::EtherType(_), Direction::Receive) => Event::EthernetReceive,
            (raw::Guard::EtherType(_), Direction::Send) => Event::EthernetSend,
            (raw::Guard::IpProtocol(_), Direction::Receive) => Event::IpReceive,
            (raw::Guard::IpProtocol(_), Direction::Send) => Event::IpSend,
            (raw::Guard::Port { protocol, .. }, direction) => Event::of(protocol, direction),
        }
    }

    /// The transport protocol; none if there are no ports.
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

    /// The names used in the paper.
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

    /// The numbers in the filter's tables.
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

/// Which packets raise the event for the extension: those of an endpoint of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guard {
    /// The port of this session.
    Session(SessionId),
    /// A raw protocol, which includes a transport at a port.
    Raw(raw::Guard),
}

/// The direction of the packets that a handler is written for: it determines the view and the permitted verdicts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    #[default]
    Receive,
    Send,
}

/// The parsed output of clang.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    pub direction: Direction,
    /// In the kernel's format, eight bytes each: the functions in sequence.
    pub instructions: Vec<u64>,
    /// Index of the handler's first instruction.
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
    /// Neither the extension nor its owner may write it.
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

    /// The numbers in linux/bpf.h.
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

/// The two instructions at `instruction` load the map, or, with `offset`, the address of that byte of
/// its entry 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocation {
    pub instruction: u32,
    pub map: u16,
    pub offset: Option<u32>,
}

/// The cost of an admitted extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    pub instructions: u32,
    /// Instructions processed by the verifier, an upper bound for each run.
    pub verified: u32,
    /// Size of its maps in bytes.
    pub memory: u64,
}

/// An extension, as `portolan ext` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtensionReport {
    pub number: u16,
    pub name: String,
    pub pid: u32,
    pub uid: u32,
    pub event: Event,
    /// Or EtherTypes, or IP protocols, depending on the event.
    pub ports: Vec<u16>,
    pub priority: u8,
    pub placement: Placement,
    pub standing: ExtensionState,
    pub cost: Cost,
    /// Limit of one run in nanoseconds.
    pub limit: u64,
    pub statistics: layout::ExtensionStatistics,
}

/// Where a handler runs (PX §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    Filter,
    /// In a thread of its owner, who bears the cost, without a limit. The owner reports the statistics.
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
    /// It exceeded its limit too often and was removed.
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
