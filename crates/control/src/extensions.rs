//! Protocol extensions (PX): which instructions are admitted, how a handler becomes a program of the
//! packet filter, and which handlers an endpoint has. Loads nothing; the kernel's verifier checks
//! the admitted code again.

mod check;
mod instruction;
mod link;
mod table;

pub use check::{Fault, check};
pub use instruction::Instruction;
pub use link::{Environment, link};
pub use table::{Full, Table, TableEntry};

#[cfg(test)]
mod tests;

/// A protection domain: what an extension may refer to, and its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Helper numbers of linux/bpf.h.
    pub helpers: &'static [u32],
    pub instructions: usize,
    pub maps: usize,
    pub entries: u32,
    pub key: u32,
    pub value: u32,
    /// Bytes of all maps together, including per-CPU copies.
    pub memory: u64,
    pub processors: u32,
}

impl Domain {
    /// Returns the domain of handlers on the packet path: own maps, time, random numbers, checksums.
    pub fn of_handlers(processors: u32) -> Domain {
        Domain {
            // map_lookup_elem, map_update_elem, map_delete_elem, ktime_get_ns, get_prandom_u32,
            // get_smp_processor_id, csum_diff, ringbuf_output.
            helpers: &[1, 2, 3, 5, 7, 8, 28, 130],
            instructions: 4096,
            maps: 8,
            entries: 1 << 16,
            key: 64,
            value: 4096,
            memory: 8 << 20,
            processors,
        }
    }
}
