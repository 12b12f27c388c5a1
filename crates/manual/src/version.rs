//! The output of `--version`: the release, the commit that it was built from, and the protocol number that programs
//! and server must share.

/// The release and its commit, as `0.1.0 (1a2b3c4d5e6f)`. Only builds by `make` know the commit.
pub fn release() -> String {
    match option_env!("PORTOLAN_COMMIT").filter(|commit| !commit.is_empty()) {
        Some(commit) => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
        None => env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// The release with the number of the protocol between library and server.
pub fn version(protocol: u32) -> String {
    format!("{}, protocol {protocol:08x}", release())
}
