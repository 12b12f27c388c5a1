//! Layouts that the managers in the kernel and the server share, as in [`crate::filter`].

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Rows of the tables of extensions; number 0 is none.
pub const EXTENSIONS: u16 = 256;

/// Handlers of one event of one endpoint.
pub const CHAIN_MAX: usize = 8;

/// What an endpoint is guarded by: a port; or the IP protocol alone; or, with protocol 0, an EtherType in the port's
/// place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct GuardKey {
    pub channel: u32,
    pub port: [u8; 2],
    pub protocol: u8,
    pub event: u8,
}

impl GuardKey {
    /// The port, EtherType or IP protocol.
    pub fn number(&self) -> u16 {
        match u16::from_be_bytes(self.port) {
            0 => self.protocol.into(),
            port => port,
        }
    }
}

/// Extensions in the order in which they are called.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Chain {
    pub count: u32,
    pub numbers: [u16; CHAIN_MAX],
}

/// Whether an extension may run, and for how many nanoseconds at a time.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ExtensionControl {
    pub limit: u64,
    pub is_stopped: u32,
    pub reserved: u32,
}

/// What an extension did on one processor, or on all. Times in nanoseconds.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Serialize,
    Deserialize,
)]
#[repr(C)]
pub struct ExtensionStatistics {
    pub runs: u64,
    pub time: u64,
    pub longest: u64,
    pub overruns: u64,
    pub strikes: u64,
    pub skipped: u64,
    pub passed: u64,
    pub consumed: u64,
    pub replied: u64,
    pub delivered: u64,
    pub refused: u64,
    pub forwarded: u64,
    pub replaced: u64,
    pub copied: u64,
}

impl ExtensionStatistics {
    /// Adds what another processor counted.
    pub fn add(&mut self, other: &ExtensionStatistics) {
        self.runs += other.runs;
        self.time += other.time;
        self.longest = self.longest.max(other.longest);
        self.overruns += other.overruns;
        self.strikes = self.strikes.max(other.strikes);
        self.skipped += other.skipped;
        self.passed += other.passed;
        self.consumed += other.consumed;
        self.replied += other.replied;
        self.delivered += other.delivered;
        self.refused += other.refused;
        self.forwarded += other.forwarded;
        self.replaced += other.replaced;
        self.copied += other.copied;
    }
}

/// Where in the managers' memory the code around a handler writes: when it ended, what it decided,
/// and whether the predicate did not want the packet.
pub const RUN_ENDED: i16 = 0;
pub const RUN_VERDICT: i16 = 8;
pub const RUN_IS_SKIPPED: i16 = 12;

/// Of the table of managers: who shows packets to extensions, and who does what these have decided.
pub const MANAGER_RECEIVE: u32 = 0;
pub const MANAGER_APPLY: u32 = 1;
pub const MANAGER_SEND: u32 = 2;
pub const MANAGER_APPLY_SENT: u32 = 3;
/// Not of extensions: it answers floods of SYNs.
pub const MANAGER_SYN: u32 = 4;

const _: () = assert!(size_of::<GuardKey>() == 8);
const _: () = assert!(size_of::<Chain>() == 20);
const _: () = assert!(size_of::<ExtensionControl>() == 16);
const _: () = assert!(size_of::<ExtensionStatistics>() == 112);
