//! Compiles the eBPF programs and turns `counters.def` into a Rust table.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    // Read at run time: the built script may come from another checkout.
    let manifest = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let sources = Path::new(&manifest).join("../../bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", sources.display());
    let sdk = sources.join("../include/portolan/extension.h");
    println!("cargo::rerun-if-changed={}", sdk.display());
    for program in [
        "packet_filter",
        "driver_filter",
        "transmit_filter",
        "extension_manager",
        "sending_manager",
        "syn_answer",
        "holders",
    ] {
        compile(&sources, program, &out);
    }
    let definitions = fs::read_to_string(sources.join("counters.def")).expect("is in the tree");
    fs::write(out.join("counters.rs"), counter_table(&definitions)).expect("OUT_DIR is ours");
}

fn compile(sources: &Path, program: &str, out: &Path) {
    // Debian's directory of asm/types.h, which clang does not search for target bpf.
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let multiarch = format!("-I/usr/include/{arch}-linux-gnu");
    // The header for extensions defines the views that the managers show them.
    let sdk = format!("-I{}", sources.join("../include").display());
    let result = SkeletonBuilder::new()
        .source(sources.join(program).with_extension("bpf.c"))
        .obj(out.join(program).with_extension("bpf.o"))
        // v3: atomic fetch-and-add, which is a full barrier, and 32-bit registers.
        .clang_args(["-mcpu=v3", "-Wall", "-Wextra", "-Werror", &multiarch, &sdk])
        .build();
    if let Err(error) = result {
        panic!("{error:#}");
    }
}

/// Generates one `(group, name, meaning)` per COUNTER line.
fn counter_table(definitions: &str) -> String {
    let mut table = String::from("&[\n");
    for line in definitions.lines() {
        let Some(arguments) = line
            .strip_prefix("COUNTER(")
            .and_then(|l| l.strip_suffix(')'))
        else {
            continue;
        };
        let [group, name, meaning] = arguments.splitn(3, ", ").collect::<Vec<_>>()[..] else {
            panic!("counters.def: {line}");
        };
        writeln!(table, "    ({group:?}, {name:?}, {meaning}),").expect("a string grows");
    }
    table + "]\n"
}
