//! `exec`: prepares the descriptors that the next program inherits. If sockets are among them, the program gets this
//! library, too: programs that clean their children's environment (nginx's upgrade, systemd) do not mean to remove it.
//! The forms with variable arguments end in libc without passing any symbol, so they are gathered here.

use std::ffi::{c_char, c_int};
use std::ptr;

use portolan::posix;

use crate::environment;
use crate::interpose::CallError;

/// Arguments after the first that are passed in registers.
#[cfg(target_arch = "x86_64")]
const IN_REGISTERS: usize = 5;
#[cfg(target_arch = "aarch64")]
const IN_REGISTERS: usize = 7;

type Words = *const *const c_char;

unsafe extern "C" {
    static environ: Words;
}

interpose! {
    /// `int execve(const char *, char *const [], char *const [])`
    fn execve(path: *const c_char, arguments: Words, environment: Words) -> c_int {
        let Some(repaired) = prepare(environment) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(execve: fn(*const c_char, Words, Words) -> c_int);
        Ok(leaving(|| next(path, arguments, repaired.as_ptr())))
    }

    /// `int execv(const char *, char *const [])`
    fn execv(path: *const c_char, arguments: Words) -> c_int {
        let Some(repaired) = prepare(environ) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(execve: fn(*const c_char, Words, Words) -> c_int);
        Ok(leaving(|| next(path, arguments, repaired.as_ptr())))
    }

    /// `int execvp(const char *, char *const [])`
    fn execvp(file: *const c_char, arguments: Words) -> c_int {
        let Some(repaired) = prepare(environ) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(execvpe: fn(*const c_char, Words, Words) -> c_int);
        Ok(leaving(|| next(file, arguments, repaired.as_ptr())))
    }

    /// `int execvpe(const char *, char *const [], char *const [])`
    fn execvpe(file: *const c_char, arguments: Words, environment: Words) -> c_int {
        let Some(repaired) = prepare(environment) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(execvpe: fn(*const c_char, Words, Words) -> c_int);
        Ok(leaving(|| next(file, arguments, repaired.as_ptr())))
    }

    /// `int fexecve(int, char *const [], char *const [])`
    fn fexecve(fd: c_int, arguments: Words, environment: Words) -> c_int {
        let Some(repaired) = prepare(environment) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(fexecve: fn(c_int, Words, Words) -> c_int);
        Ok(leaving(|| next(fd, arguments, repaired.as_ptr())))
    }

    /// `int execveat(int, const char *, char *const [], char *const [], int)`
    fn execveat(
        directory: c_int,
        path: *const c_char,
        arguments: Words,
        environment: Words,
        flags: c_int,
    ) -> c_int {
        let Some(repaired) = prepare(environment) else {
            return Err(CallError::NotOurs);
        };
        let next = next!(execveat: fn(c_int, *const c_char, Words, Words, c_int) -> c_int);
        Ok(leaving(|| next(directory, path, arguments, repaired.as_ptr(), flags)))
    }
}

/// Calls `exec` outside the library: the next program inherits the signal mask, which must be the program's own.
fn leaving(replace: impl FnOnce() -> c_int) -> c_int {
    let _outside = posix::leave();
    replace()
}

/// Returns the environment for the next program, if it differs from the given one.
///
/// # Safety
/// `environment` is null or ends with a null pointer.
unsafe fn prepare(environment: Words) -> Option<Vec<*const c_char>> {
    if !posix::before_exec() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { environment::repaired(environment) }
}

/// Defines a symbol with variable arguments: they are stored in memory, those from registers first,
/// then one word that is not an argument, then those on the stack.
macro_rules! gather {
    ($($(#[$note:meta])* $name:ident => $gathered:ident;)*) => { $(
        $(#[$note])*
        ///
        /// # Safety
        /// The contract of the C function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "call {gathered}",
                "add rsp, 40",
                "ret",
                gathered = sym $gathered,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x1, x2, [sp, #16]",
                "stp x3, x4, [sp, #32]",
                "stp x5, x6, [sp, #48]",
                "str x7, [sp, #64]",
                "add x1, sp, #16",
                "bl {gathered}",
                "ldp x29, x30, [sp], #80",
                "ret",
                gathered = sym $gathered,
            );
        }
    )* };
}

gather! {
    /// `int execl(const char *, const char *, ...)`
    execl => gathered_execl;
    /// `int execlp(const char *, const char *, ...)`
    execlp => gathered_execlp;
    /// `int execle(const char *, const char *, ..., char *const [])`
    execle => gathered_execle;
}

unsafe extern "C" fn gathered_execl(path: *const c_char, laid_out: Words) -> c_int {
    // SAFETY: the caller of `execl` ends its arguments with a null pointer.
    let arguments = unsafe { Laid { laid_out }.arguments() };
    // SAFETY: the contract of `execl`.
    unsafe { execv(path, arguments.as_ptr()) }
}

unsafe extern "C" fn gathered_execlp(file: *const c_char, laid_out: Words) -> c_int {
    // SAFETY: as in `gathered_execl`.
    let arguments = unsafe { Laid { laid_out }.arguments() };
    // SAFETY: the contract of `execlp`.
    unsafe { execvp(file, arguments.as_ptr()) }
}

unsafe extern "C" fn gathered_execle(path: *const c_char, laid_out: Words) -> c_int {
    let laid = Laid { laid_out };
    // SAFETY: as in `gathered_execl`; the environment follows the null pointer.
    let (arguments, environment) = unsafe {
        let arguments = laid.arguments();
        let environment = laid.word(arguments.len());
        (arguments, environment)
    };
    // SAFETY: the contract of `execle`.
    unsafe { execve(path, arguments.as_ptr(), environment.cast()) }
}

/// Variable arguments in the layout of `gather!`.
struct Laid {
    laid_out: Words,
}

impl Laid {
    /// # Safety
    /// There are more than `index` arguments.
    unsafe fn word(&self, index: usize) -> *const c_char {
        let place = index + usize::from(index >= IN_REGISTERS);
        // SAFETY: the caller's promise.
        unsafe { *self.laid_out.add(place) }
    }

    /// Returns them with the terminating null pointer.
    ///
    /// # Safety
    /// They end with a null pointer.
    unsafe fn arguments(&self) -> Vec<*const c_char> {
        // SAFETY: nothing behind the null pointer is read.
        let given = (0..).map(|index| unsafe { self.word(index) });
        let mut arguments: Vec<_> = given.take_while(|argument| !argument.is_null()).collect();
        arguments.push(ptr::null());
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_in_their_order_whichever_way_they_came() {
        let words: Vec<*const c_char> = (1..=20).map(ptr::without_provenance).collect();
        let mut laid_out = words.clone();
        laid_out.insert(IN_REGISTERS, ptr::without_provenance(99));
        laid_out.push(ptr::null());
        let laid = Laid {
            laid_out: laid_out.as_ptr(),
        };
        // SAFETY: a null pointer ends them.
        let arguments = unsafe { laid.arguments() };
        assert_eq!(arguments[..20], words);
        assert!(arguments[20].is_null());
    }
}
