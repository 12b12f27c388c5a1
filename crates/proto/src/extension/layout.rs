//! Layouts that the managers in the kernel and the server share, as in [`crate::filter`].

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Rows of the extension tables; number 0 is not used.
pub const EXTENSIONS: u16 = 256;

/// Maximum number of handlers per event and endpoint.
pub const CHAIN_MAX: usize = 8;

/// The endpoint that a guard names: a port; or the IP protocol alone; or, with protocol 0, an EtherType in place of the
/// port.
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

/// Extensions in calling order.
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

/// Statistics of an extension on one CPU, or on all. Times in nanoseconds.
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
    /// Adds the statistics of another CPU.
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

/// Offsets in the managers' memory of the results that the code around a handler writes: when it ended, its
/// verdict, and whether the predicate rejected the packet.
pub const RUN_ENDED: i16 = 0;
pub const RUN_VERDICT: i16 = 8;
pub const RUN_IS_SKIPPED: i16 = 12;

/// Indices in the table of managers: those that show packets to extensions, and those that apply their verdicts.
pub const MANAGER_RECEIVE: u32 = 0;
pub const MANAGER_APPLY: u32 = 1;
pub const MANAGER_SEND: u32 = 2;
pub const MANAGER_APPLY_SENT: u32 = 3;
/// Not for extensions: answers floods of SYNs.
pub const MANAGER_SYN: u32 = 4;

const _: () = assert!(size_of::<GuardKey>() == 8);
const _: () = assert!(size_of::<Chain>() == 20);
const _: () = assert!(size_of::<ExtensionControl>() == 16);
const _: () = assert!(size_of::<ExtensionStatistics>() == 112);
