//! Gives the build a number that changes with every source from which messages, capsules and
//! shared memory get their shape: two programs understand each other if it is the same.

use std::fs;
use std::path::{Path, PathBuf};

const SHAPING: [&str; 6] = ["types", "wire", "tcp", "stack", "proto", "local"];

fn main() {
    // Asked at run time: the built script may have come from another checkout.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let crates = Path::new(&manifest).join("..");
    let mut hash = Fnv::default();
    for name in SHAPING {
        let sources = crates.join(name).join("src");
        println!("cargo::rerun-if-changed={}", sources.display());
        for path in files_below(&sources)
            .into_iter()
            .filter(|path| !is_test(path))
        {
            let Ok(text) = fs::read(&path) else { continue };
            let name = path.strip_prefix(&crates).unwrap_or(&path);
            hash.add(name.as_os_str().as_encoded_bytes());
            hash.add(&text);
        }
    }
    println!("cargo::rustc-env=PORTOLAN_BUILD={}", hash.folded());
}

/// Tests shape nothing.
fn is_test(path: &Path) -> bool {
    path.iter()
        .any(|part| part == "tests" || part == "tests.rs")
}

/// In an order that does not depend on the file system.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
        .into_iter()
        .flat_map(|path| {
            if path.is_dir() {
                files_below(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// FNV-1a, 64 bits: the same with every compiler, unlike the standard library's hashers.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn folded(&self) -> u32 {
        (self.0 ^ (self.0 >> 32)) as u32
    }
}
