//! Program memory passed by pointer, which may be invalid. A page is touched before use, by an instruction that may
//! fault: the handler of `SIGSEGV` and `SIGBUS` resumes such a thread ([`recover`]), and the touch reports that the
//! page is bad. Without that handler a bad pointer ends the program, as in any library.

use std::arch::global_asm;
use std::ffi::c_void;

use rustix::io::Errno;

/// The smallest page size of any architecture. Touching more often than needed is harmless.
const PAGE: usize = 4096;

// Only the first instruction of each function may fault. The functions use no stack, so that the refusal can return to
// the caller in their place.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.portolan_touch, \"ax\", @progbits",
    ".hidden portolan_touch_read",
    ".globl portolan_touch_read",
    ".type portolan_touch_read, @function",
    "portolan_touch_read:",
    ".cfi_startproc",
    "movzx eax, byte ptr [rdi]",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_read, . - portolan_touch_read",
    ".hidden portolan_touch_write",
    ".globl portolan_touch_write",
    ".type portolan_touch_write, @function",
    "portolan_touch_write:",
    ".cfi_startproc",
    "lock or byte ptr [rdi], 0",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_write, . - portolan_touch_write",
    ".hidden portolan_touch_refused",
    ".globl portolan_touch_refused",
    ".type portolan_touch_refused, @function",
    "portolan_touch_refused:",
    ".cfi_startproc",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_refused, . - portolan_touch_refused",
    ".popsection",
);

// An exclusive load leaves the thread's monitor open; the store may fail without it, and is retried.
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.portolan_touch, \"ax\", @progbits",
    ".hidden portolan_touch_read",
    ".globl portolan_touch_read",
    ".type portolan_touch_read, @function",
    "portolan_touch_read:",
    ".cfi_startproc",
    "ldrb w1, [x0]",
    "mov w0, #1",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_read, . - portolan_touch_read",
    ".hidden portolan_touch_write",
    ".globl portolan_touch_write",
    ".type portolan_touch_write, @function",
    "portolan_touch_write:",
    ".cfi_startproc",
    "ldxrb w1, [x0]",
    "stxrb w2, w1, [x0]",
    "cbnz w2, portolan_touch_write",
    "mov w0, #1",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_write, . - portolan_touch_write",
    ".hidden portolan_touch_refused",
    ".globl portolan_touch_refused",
    ".type portolan_touch_refused, @function",
    "portolan_touch_refused:",
    ".cfi_startproc",
    "mov w0, #0",
    "ret",
    ".cfi_endproc",
    ".size portolan_touch_refused, . - portolan_touch_refused",
    ".popsection",
);

unsafe extern "C" {
    /// Reads the byte; returns 1, or 0 if it cannot be read.
    safe fn portolan_touch_read(byte: usize) -> u32;
    /// Rewrites the byte unchanged, atomically; returns 1, or 0 if it cannot be written.
    safe fn portolan_touch_write(byte: usize) -> u32;
    safe fn portolan_touch_refused() -> u32;
}

/// Returns whether a fault, at the thread context `context`, was caused by a touch. If so, the touch reports failure
/// when the handler returns.
///
/// # Safety
/// `context` is the argument that the kernel passed to the calling handler, which was installed with `SA_SIGINFO`.
pub unsafe fn recover(context: *mut c_void) -> bool {
    // SAFETY: guaranteed by the caller.
    let at = unsafe { &mut *instruction(context) };
    let functions = [
        portolan_touch_read as *const () as u64,
        portolan_touch_write as *const () as u64,
    ];
    let is_touch = functions
        .iter()
        .any(|&start| (start..=start + LAST_FAULT).contains(at));
    if is_touch {
        *at = portolan_touch_refused as *const () as u64;
    }
    is_touch
}

/// Offset of the last instruction of a touch that may fault.
#[cfg(target_arch = "x86_64")]
const LAST_FAULT: u64 = 0;
#[cfg(target_arch = "aarch64")]
const LAST_FAULT: u64 = 4;

/// # Safety
/// As [`recover`].
#[cfg(target_arch = "x86_64")]
unsafe fn instruction(context: *mut c_void) -> *mut u64 {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: guaranteed by the caller.
    unsafe { (&raw mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize]).cast() }
}

/// # Safety
/// As [`recover`].
#[cfg(target_arch = "aarch64")]
unsafe fn instruction(context: *mut c_void) -> *mut u64 {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: guaranteed by the caller.
    unsafe { &raw mut (*context).uc_mcontext.pc }
}

/// Returns how many of the `length` bytes from `start` on can be read.
pub fn readable_at(start: usize, length: usize) -> usize {
    good(start, length, portolan_touch_read)
}

/// Returns how many of the `length` bytes from `start` on can be written. Their contents do not change.
pub fn writable_at(start: usize, length: usize) -> usize {
    good(start, length, portolan_touch_write)
}

/// The readable part of a buffer, from its start.
#[inline]
pub fn readable(bytes: &[u8]) -> &[u8] {
    &bytes[..readable_at(bytes.as_ptr().addr(), bytes.len())]
}

/// The writable part of a buffer, from its start.
#[inline]
pub fn writable(bytes: &mut [u8]) -> &mut [u8] {
    let good = writable_at(bytes.as_ptr().addr(), bytes.len());
    &mut bytes[..good]
}

#[inline]
fn good(start: usize, length: usize, touch: extern "C" fn(usize) -> u32) -> usize {
    let mut done = 0;
    while done < length {
        let at = start.wrapping_add(done);
        if at < start || touch(at) == 0 {
            return done;
        }
        done += PAGE - at % PAGE;
    }
    length
}

/// Reads an integer through a pointer that an application passed as a number (`ioctl`). Like the kernel, does not
/// require it to be aligned.
pub fn read_int(pointer: usize) -> Result<i32, Errno> {
    if readable_at(pointer, size_of::<i32>()) < size_of::<i32>() {
        return Err(Errno::FAULT);
    }
    let pointer = std::ptr::with_exposed_provenance::<i32>(pointer);
    // SAFETY: the bytes are readable, and the caller of `ioctl` permits reading them.
    Ok(unsafe { pointer.read_unaligned() })
}

/// Writes an integer; see [`read_int`].
pub fn write_int(pointer: usize, value: i32) -> Result<(), Errno> {
    if writable_at(pointer, size_of::<i32>()) < size_of::<i32>() {
        return Err(Errno::FAULT);
    }
    let pointer = std::ptr::with_exposed_provenance_mut::<i32>(pointer);
    // SAFETY: the bytes are writable, and the caller of `ioctl` permits writing them.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ptr::{null_mut, without_provenance_mut};

    use super::*;

    extern "C" fn handler(signal: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the arguments of a handler with SA_SIGINFO.
        if !unsafe { recover(context) } {
            // SAFETY: the fault occurs again, and ends the program.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }

    fn install() {
        // SAFETY: zeros are a valid `sigaction`; the handler has the signature of SA_SIGINFO.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let function: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = handler;
            action.sa_sigaction = function as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSEGV, &action, null_mut());
            libc::sigaction(libc::SIGBUS, &action, null_mut());
        }
    }

    /// Two pages, the second with the given protection.
    fn pages(second: i32) -> usize {
        // SAFETY: new memory; nobody uses its second page yet.
        unsafe {
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(null_mut(), 2 * PAGE, both, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            libc::mprotect(start.byte_add(PAGE), PAGE, second);
            start.expose_provenance()
        }
    }

    #[test]
    fn memory_ends_where_its_pages_do() {
        install();
        let (none, read) = (pages(libc::PROT_NONE), pages(libc::PROT_READ));
        assert_eq!(readable_at(none + 100, PAGE - 100), PAGE - 100);
        assert_eq!(readable_at(none + 100, 2 * PAGE - 100), PAGE - 100);
        assert_eq!(readable_at(none + PAGE, 1), 0);
        assert_eq!(readable_at(read, 2 * PAGE), 2 * PAGE);
        assert_eq!(writable_at(read, 2 * PAGE), PAGE);
        assert_eq!(writable_at(read + PAGE - 3, 4), 3);
    }

    #[test]
    fn null_and_what_is_beyond_all_memory_is_bad() {
        install();
        for bad in [0, 64, 1 << 63, usize::MAX - 64, usize::MAX] {
            assert_eq!(readable_at(bad, 4), 0, "{bad:x}");
            assert_eq!(writable_at(bad, 4), 0, "{bad:x}");
            assert_eq!(read_int(bad), Err(Errno::FAULT));
            assert_eq!(write_int(bad, 1), Err(Errno::FAULT));
            assert_eq!(readable_at(bad, 0), 0);
        }
    }

    #[test]
    fn what_is_touched_stays_as_it_is() {
        install();
        let mut bytes = vec![7; 3 * PAGE];
        assert_eq!(writable(&mut bytes).len(), 3 * PAGE);
        assert!(bytes.iter().all(|byte| *byte == 7));
        let mut value = 5;
        let place = (&raw mut value).expose_provenance();
        assert_eq!(read_int(place), Ok(5));
        assert_eq!(write_int(place, 9), Ok(()));
        assert_eq!(value, 9);
    }

    #[test]
    fn a_file_that_became_shorter_is_bad() {
        install();
        let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        // SAFETY: a new mapping of the file, at an address of the kernel's choice.
        let start = unsafe {
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(
                without_provenance_mut(0),
                2 * PAGE,
                both,
                libc::MAP_SHARED,
                raw,
                0,
            )
        };
        assert_eq!(readable_at(start.addr(), 2 * PAGE), PAGE);
    }
}
