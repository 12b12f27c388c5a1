//! System calls by number without libc. The preload library replaces libc's `syscall` along with
//! the socket calls: what is made here can never come back to Portolan as a call of the program.

use std::arch::asm;

use rustix::io::Errno;

/// Makes a system call.
///
/// # Safety
/// The contract of the call `number`.
pub(crate) unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let result = unsafe { enter(number as usize, arguments) };
    match result {
        -4095..0 => Err(Errno::from_raw_os_error(-result as i32)),
        _ => Ok(result as usize),
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn enter(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's calling convention; it overwrites no more than these registers.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn enter(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel's calling convention; it overwrites no more than these registers.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_returns_its_value() {
        // SAFETY: getpid has no arguments.
        let pid = unsafe { call(libc::SYS_getpid, [0; 6]) };
        assert_eq!(pid, Ok(std::process::id() as usize));
    }

    #[test]
    fn a_call_that_fails_says_why() {
        // SAFETY: no descriptor has this number.
        let closed = unsafe { call(libc::SYS_close, [usize::MAX, 0, 0, 0, 0, 0]) };
        assert_eq!(closed, Err(Errno::BADF));
    }
}
