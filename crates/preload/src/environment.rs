//! The variables that put this library into a program and name its server. They are recorded at the
//! start, and added to environments that lack them.

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::{env, ptr};

const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Prefix of Portolan's own variables.
const OWN: &[u8] = b"PORTOLAN";
const LIBRARY: &str = "libportolan_preload.so";

static NOTED: OnceLock<Noted> = OnceLock::new();

struct Noted {
    /// Path of this library, if a variable names it.
    library: Option<Vec<u8>>,
    own: Vec<CString>,
}

/// Records the variables that the program was started with.
pub(crate) fn note() {
    NOTED.get_or_init(|| {
        let own = env::vars_os().filter_map(|(name, value)| {
            let entry = [name.as_bytes(), b"=", value.as_bytes()].concat();
            CString::new(entry).ok()
        });
        let preload = env::var_os("LD_PRELOAD").unwrap_or_default();
        Noted {
            library: libraries(preload.as_bytes())
                .find(|library| is_ours(library))
                .map(<[u8]>::to_vec),
            own: own
                .filter(|entry| entry.as_bytes().starts_with(OWN))
                .collect(),
        }
    });
}

/// Returns `environment` with the missing variables added; `None` if none is missing.
///
/// # Safety
/// `environment` is null or a list of strings that ends with a null pointer.
pub(crate) unsafe fn repaired(environment: *const *const c_char) -> Option<Vec<*const c_char>> {
    let noted = NOTED.get()?;
    let library = noted.library.as_ref()?;
    let mut entries: Vec<*const c_char> = Vec::new();
    // SAFETY: nothing behind the null pointer is read.
    unsafe {
        while !environment.is_null() && !(*environment.add(entries.len())).is_null() {
            entries.push(*environment.add(entries.len()));
        }
    }
    // SAFETY: the caller's promise.
    let text = |entry: *const c_char| unsafe { CStr::from_ptr(entry) }.to_bytes();
    let preload = entries
        .iter()
        .position(|&entry| text(entry).starts_with(PRELOAD));
    let others = preload.map_or(&[][..], |at| &text(entries[at])[PRELOAD.len()..]);
    if libraries(others).any(is_ours) {
        return None;
    }
    let mut line = [PRELOAD, library].concat();
    if !others.is_empty() {
        line.push(b':');
        line.extend_from_slice(others);
    }
    // The value was a C string. The memory is replaced together with this program.
    let line = CString::new(line).ok()?.into_raw().cast_const();
    match preload {
        Some(at) => entries[at] = line,
        None => entries.push(line),
    }
    for own in &noted.own {
        let name = own
            .as_bytes()
            .split_inclusive(|&byte| byte == b'=')
            .next()?;
        if !entries.iter().any(|&entry| text(entry).starts_with(name)) {
            entries.push(own.as_ptr());
        }
    }
    entries.push(ptr::null());
    Some(entries)
}

/// The paths in a value of `LD_PRELOAD` (ld.so(8)).
fn libraries(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value
        .split(|byte| matches!(byte, b':' | b' '))
        .filter(|path| !path.is_empty())
}

fn is_ours(library: &[u8]) -> bool {
    let path = Path::new(std::ffi::OsStr::from_bytes(library));
    path.file_name().is_some_and(|name| name == LIBRARY)
}
