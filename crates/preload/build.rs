//! What the library calls of itself is its own definition. A library before it in `LD_PRELOAD` may define the same symbol in
//! terms of another that this one translates, and would be called again by that.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rerun-if-changed=build.rs");
}
