//! Calls within the library go to its own definitions. Otherwise a library before it in `LD_PRELOAD` that
//! defines a symbol in terms of another one translated here would be called again by that.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rerun-if-changed=build.rs");
}
