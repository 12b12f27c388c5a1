//! Memory cached by the C library's allocator.

/// Returns whole free pages to the kernel (`malloc_trim`). Takes milliseconds if there are many small free blocks;
/// threads that allocate meanwhile are blocked.
pub fn give_back_free() {
    #[cfg(target_env = "gnu")]
    // SAFETY: any thread may call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
