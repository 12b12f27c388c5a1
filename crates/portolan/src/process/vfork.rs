//! Children of vfork: they run in the memory of their parent, with descriptors of their own, until they execute
//! another program.

use std::sync::atomic::{AtomicI32, Ordering};

/// The process that owns this memory.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Marks this process as the owner, as opposed to a child of vfork.
pub(crate) fn own_memory() {
    OWNER.store(own_id(), Ordering::Relaxed);
}

/// Is this a child of vfork? It has its own descriptors, and the sockets in memory are its
/// parent's.
pub fn shares_memory() -> bool {
    ![0, own_id()].contains(&OWNER.load(Ordering::Relaxed))
}

fn own_id() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}
