//! Common parts of this library's own functions: they are declared in `include/portolan/`, and do not exist in libc.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::c_int;
use portolan::qos::Refused;
use rustix::io::Errno;

use crate::interpose::{CallError, FailureValue, end_if_cancelled, failed, shielded};

/// Exports functions with the contract of a header. Their bodies fail with an error that converts to a [`Fault`].
macro_rules! own {
    ($header:literal, $failure:ty;
     $($(#[$note:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => { $(
        $(#[$note])*
        ///
        /// # Safety
        #[doc = concat!("The contract of `<portolan/", $header, ">`.")]
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
            crate::own::settle(|| -> Result<$result, $failure> { $body })
        }
    )* };
}

/// The reason why a call fails.
pub(crate) enum Fault {
    Errno(Errno),
    /// With a text for [`portolan_refusal`].
    Refused(Refused),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault::Errno(errno)
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Fault {
        Fault::Refused(refused)
    }
}

/// Maximum length of a stored reason, including its NUL.
const REASON_MAX: usize = 512;

thread_local! {
    /// Needs no drop: a thread may call this until its very end.
    static REASON: UnsafeCell<[u8; REASON_MAX]> = const { UnsafeCell::new([0; REASON_MAX]) };
}

/// `const char *portolan_refusal(void)`
#[unsafe(no_mangle)]
pub(crate) extern "C" fn portolan_refusal() -> *const c_char {
    REASON.with(|reason| reason.get().cast())
}

fn note(text: &str) {
    let length = text.len().min(REASON_MAX - 1);
    REASON.with(|reason| {
        // SAFETY: the memory is this thread's own, and no reference into it lives.
        let reason = unsafe { &mut *reason.get() };
        reason[..length].copy_from_slice(&text.as_bytes()[..length]);
        reason[length] = 0;
    });
}

pub(crate) fn settle<T: FailureValue, F: Into<Fault>>(ask: impl FnOnce() -> Result<T, F>) -> T {
    let outcome = shielded(|| {
        ask().map_err(|failure| match failure.into() {
            Fault::Errno(errno) => {
                note("");
                CallError::Errno(errno)
            }
            Fault::Refused(refused) => {
                note(&refused.reason);
                CallError::Errno(refused.errno)
            }
        })
    });
    end_if_cancelled();
    match outcome {
        Ok(value) => value,
        Err(error) => failed(error.errno_or(Errno::NOSYS)),
    }
}

pub(crate) fn invalid(reason: &str) -> Refused {
    Refused::new(Errno::INVAL, reason)
}

/// Returns a string of the program; `None` if it is null.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn text(text: *const c_char) -> Result<Option<String>, Refused> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| invalid("a name is UTF-8"))?;
    Ok(Some(text.to_owned()))
}

/// An object, and the process that owns it.
struct Numbering<T> {
    owner: u32,
    thing: Arc<T>,
}

/// Objects that programs know by number. Free numbers are reused; a child of fork does not inherit its parent's
/// objects.
pub(crate) struct Numbered<T>(Mutex<Vec<Option<Numbering<T>>>>);

impl<T> Numbered<T> {
    pub(crate) const fn new() -> Numbered<T> {
        Numbered(Mutex::new(Vec::new()))
    }

    pub(crate) fn enter(&self, thing: T) -> Result<c_int, Errno> {
        let entry = Some(Numbering {
            owner: std::process::id(),
            thing: Arc::new(thing),
        });
        let mut all = self.lock();
        let free = all.iter().position(Option::is_none);
        let at = free.unwrap_or(all.len());
        let number = c_int::try_from(at).map_err(|_| Errno::MFILE)?;
        match free {
            Some(at) => all[at] = entry,
            None => all.push(entry),
        }
        Ok(number)
    }

    pub(crate) fn find(&self, number: c_int) -> Result<Arc<T>, Errno> {
        let mut all = self.lock();
        let kept = own(&mut all, number)?.as_ref().ok_or(Errno::BADF)?;
        Ok(Arc::clone(&kept.thing))
    }

    pub(crate) fn take(&self, number: c_int) -> Result<Arc<T>, Errno> {
        let mut all = self.lock();
        let kept = own(&mut all, number)?.take().ok_or(Errno::BADF)?;
        Ok(kept.thing)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Numbering<T>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the entry of an object of this process.
fn own<T>(
    all: &mut [Option<Numbering<T>>],
    number: c_int,
) -> Result<&mut Option<Numbering<T>>, Errno> {
    let at = usize::try_from(number).map_err(|_| Errno::BADF)?;
    let place = all.get_mut(at).ok_or(Errno::BADF)?;
    match place {
        Some(kept) if kept.owner == std::process::id() => Ok(place),
        _ => Err(Errno::BADF),
    }
}
