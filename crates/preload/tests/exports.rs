//! The built library exports the symbols of its table, and no symbol of libc's that is not in it.

#[path = "../src/table.rs"]
#[allow(dead_code)]
mod table;

use std::{ffi::CString, path::PathBuf};

use table::{PASSED_ON, Symbol};

fn library() -> *mut libc::c_void {
    let test = std::env::current_exe().expect("a test has a path");
    let built: PathBuf = test
        .ancestors()
        .nth(2)
        .expect("<target>/deps/<test>")
        .join("libportolan_preload.so");
    let path =
        CString::new(built.into_os_string().into_encoded_bytes()).expect("a path has no NUL");
    // SAFETY: loading runs the library's start, which is meant to run in any program.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{path:?} does not load");
    library
}

/// Whether `library` itself, not a library it depends on, defines `name`.
fn defines(library: *mut libc::c_void, name: &std::ffi::CStr) -> bool {
    // SAFETY: the handle is open, the name a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: the default handle needs no opening.
    let libcs = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    !found.is_null() && found != libcs
}

#[test]
fn every_translated_symbol_is_exported() {
    let library = library();
    for name in Symbol::NAMES {
        assert!(defines(library, name), "{name:?}");
    }
}

#[test]
fn no_symbol_that_is_passed_on_is_exported() {
    let library = library();
    for (name, _) in PASSED_ON {
        let name = CString::new(*name).expect("a symbol has no NUL");
        assert!(!defines(library, &name), "{name:?}");
    }
}
