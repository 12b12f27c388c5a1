//! Definition of libc symbols: `interpose!` defines the exported function, which returns the result of its body or
//! calls the next definition. Converts outcomes to `errno`, and stops panics; independent of particular calls.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::abort,
};

use libc::c_int;
use portolan::posix;
pub(crate) use portolan::posix::{CallError, Outcome};
use rustix::io::Errno;

/// Converts the outcome of a call that returns 0.
pub(crate) fn done(outcome: Outcome<()>) -> Outcome<c_int> {
    outcome.map(|()| 0)
}

/// Leaves the body at once if `fd` is not Portolan's: the fast negative path.
#[inline]
pub(crate) fn ours(fd: c_int) -> Outcome<()> {
    if posix::is_ours(fd) {
        Ok(())
    } else {
        Err(CallError::NotOurs)
    }
}

/// The value that a C function returns after setting `errno`.
pub(crate) trait FailureValue {
    const FAILED: Self;
}

impl FailureValue for c_int {
    const FAILED: Self = -1;
}

impl FailureValue for i64 {
    const FAILED: Self = -1;
}

impl FailureValue for isize {
    const FAILED: Self = -1;
}

/// A handler's address.
impl FailureValue for libc::sighandler_t {
    const FAILED: Self = libc::SIG_ERR;
}

impl<T> FailureValue for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

impl FailureValue for () {
    const FAILED: Self = ();
}

/// Sets `errno` and returns the value that announces it.
pub(crate) fn failed<T: FailureValue>(errno: Errno) -> T {
    // SAFETY: __errno_location returns the calling thread's errno, valid while the thread lives.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
    T::FAILED
}

/// Runs a body. A panic in it is a bug that leaves locks and state undefined: it aborts here, and never unwinds into a
/// C frame.
#[inline]
pub(crate) fn shielded<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let _inside = posix::enter();
    posix::hold();
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| abort())
}

/// Ends the calling thread if it was cancelled in a wait of the call that has just returned. Not
/// within a call of this library, whose frames must not be unwound.
#[inline]
pub(crate) fn end_if_cancelled() {
    unsafe extern "C-unwind" {
        fn pthread_testcancel();
    }
    if posix::take_end() {
        // SAFETY: nothing is held here.
        unsafe { pthread_testcancel() };
    }
}

/// Runs code after a call that libc has made. `errno` stays as the call left it.
pub(crate) fn heed(afterwards: impl FnOnce()) {
    // SAFETY: __errno_location returns the calling thread's errno, valid while the thread lives.
    let errno = unsafe { *libc::__errno_location() };
    let looked = || {
        afterwards();
        Ok(())
    };
    // It cannot fail.
    let _ = shielded(looked);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Defines libc symbols. Each body is an [`Outcome`]; on `NotOurs` the next definition is called with the
/// same arguments, and its result is passed to the block after `afterwards`, if there is one.
///
/// The ABI is `C-unwind` because libc cancels a thread (pthread_cancel) by unwinding through these frames.
macro_rules! interpose {
    ($(
        $(#[$note:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block
        $(afterwards($returned:ident) $afterwards:block)?
    )*) => { $(
        $(#[$note])*
        ///
        /// # Safety
        /// The contract of the C function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the caller keeps the C contract, so its pointers are valid for the lengths given; `next` is
            // null or the definition that the C declaration describes.
            unsafe {
                let outcome = $crate::interpose::shielded(|| -> $crate::interpose::Outcome<$result> { $body });
                $crate::interpose::end_if_cancelled();
                match outcome {
                    Ok(value) => value,
                    Err($crate::interpose::CallError::Errno(errno)) => $crate::interpose::failed(errno),
                    Err($crate::interpose::CallError::Moved) => $crate::interpose::failed(rustix::io::Errno::INTR),
                    Err($crate::interpose::CallError::NotOurs) => {
                        let next = $crate::table::next($crate::table::Symbol::$name);
                        if next.is_null() {
                            return $crate::interpose::failed(rustix::io::Errno::NOSYS);
                        }
                        let next: unsafe extern "C-unwind" fn($($type),*) -> $result = std::mem::transmute(next);
                        let returned = next($($argument),*);
                        $(
                            let $returned = returned;
                            $crate::interpose::heed(|| $afterwards);
                        )?
                        returned
                    }
                }
            }
        }
    )* };
}

/// Returns libc's definition of a symbol, as a function of the type in its C declaration; if there
/// is none, the call fails.
macro_rules! next {
    ($name:ident: fn($($type:ty),*) -> $result:ty) => {{
        let next = $crate::table::next($crate::table::Symbol::$name);
        if next.is_null() {
            return Err(rustix::io::Errno::NOSYS.into());
        }
        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C-unwind" fn($($type),*) -> $result>(next)
    }};
}
