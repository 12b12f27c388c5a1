//! What the C library's allocator keeps for the next time.

/// Gives whole free pages back to the kernel (`malloc_trim`). Takes milliseconds where much is free in small pieces; other
/// threads wait when they allocate.
pub fn give_back_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called by any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
