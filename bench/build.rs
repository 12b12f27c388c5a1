//! Compiles the extensions of the documentation, which benchmarks measure.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const EXTENSIONS: [&str; 6] = ["echo", "forward", "messages", "rally", "values", "video"];

fn main() {
    // Read at run time: the build script may have been compiled in another checkout.
    let root = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let root = Path::new(&root).join("..");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let sdk = root.join("include");
    println!(
        "cargo::rerun-if-changed={}",
        sdk.join("portolan/extension.h").display()
    );
    for name in EXTENSIONS {
        let source = root
            .join("docs/examples/extensions")
            .join(name)
            .with_extension("c");
        println!("cargo::rerun-if-changed={}", source.display());
        compile(&source, &sdk, &out.join(name).with_extension("o"));
    }
}

fn compile(source: &Path, sdk: &Path, object: &Path) {
    // Debian has asm/types.h here, where clang does not look when it targets bpf.
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let status = Command::new("clang")
        .args(["-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3"])
        .arg(format!("-I/usr/include/{arch}-linux-gnu"))
        .arg("-I")
        .arg(sdk)
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(object)
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "clang fails on {}",
        source.display()
    );
}
