//! Calls within the library go to its own definitions. Otherwise a library before it in `LD_PRELOAD` that
//! defines a symbol in terms of another one translated here would be called again by that.
//!
//! Programs may also be linked with the library, as `-lportolan`. By the name in the file the loader recognises that and
//! the preloaded library as the same.

fn main() {
    for option in ["-Bsymbolic-functions", "-soname,libportolan.so.0"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{option}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
