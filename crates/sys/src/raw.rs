//! The system call instruction itself. The preload library replaces libc's `syscall`, which would
//! redirect Portolan's own calls to the library.

use std::arch::asm;

use rustix::io::Errno;

/// Makes system call `number`; arguments that it does not take are ignored.
///
/// # Safety
/// As required by the system call.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn syscall(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the x86-64 system call convention (syscall(2)); the caller guarantees the rest.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    decode(result)
}

/// Like the function for x86-64.
///
/// # Safety
/// As required by the system call.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn syscall(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the arm64 system call convention (syscall(2)); the caller guarantees the rest.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    decode(result)
}

/// The kernel returns errors as -4095 to -1.
fn decode(result: isize) -> Result<usize, Errno> {
    match result {
        -4095..=-1 => Err(Errno::from_raw_os_error(-(result as i32))),
        _ => Ok(result as usize),
    }
}
