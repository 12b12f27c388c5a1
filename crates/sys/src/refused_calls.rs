//! System calls refused by the process's own filter ([`seccomp(2)`], `SECCOMP_RET_TRAP`): they fail with `EPERM`, as if
//! the kernel had refused them, and are counted.
//!
//! [`seccomp(2)`]: https://man7.org/linux/man-pages/man2/seccomp.2.html

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::io::Errno;

static COUNT: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicI32 = AtomicI32::new(-1);

/// `si_code` of a call trapped by a filter.
const SYS_SECCOMP: i32 = 1;

/// `siginfo_t` of SIGSYS, for which libc has no accessors.
#[repr(C)]
struct TrappedCall {
    signal: i32,
    errno: i32,
    code: i32,
    _padding: i32,
    _address: *const c_void,
    call: i32,
    _architecture: u32,
}

const _: () = assert!(size_of::<TrappedCall>() <= size_of::<libc::siginfo_t>());

/// Makes trapped calls of all threads fail instead of ending the process.
pub fn handle() -> Result<(), Errno> {
    // SAFETY: zeros are a valid `sigaction`: an empty mask, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = refuse;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature of SA_SIGINFO, and is async-signal-safe.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// The number of refused calls, and the system call number of the last one.
pub fn so_far() -> (u64, i32) {
    (COUNT.load(Ordering::Relaxed), LAST.load(Ordering::Relaxed))
}

extern "C" fn refuse(_signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: valid while the handler runs; `TrappedCall` is the layout for this signal.
    let trapped = unsafe { &*info.cast::<TrappedCall>() };
    if trapped.code != SYS_SECCOMP {
        return;
    }
    LAST.store(trapped.call, Ordering::Relaxed);
    COUNT.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the kernel's context, which it restores when the handler returns.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    return_from_call(context, -libc::EPERM);
}

/// Sets the return value of the trapped call.
fn return_from_call(context: &mut libc::ucontext_t, value: i32) {
    #[cfg(target_arch = "x86_64")]
    {
        context.uc_mcontext.gregs[libc::REG_RAX as usize] = value.into();
    }
    #[cfg(target_arch = "aarch64")]
    {
        context.uc_mcontext.regs[0] = i64::from(value).cast_unsigned();
    }
}
