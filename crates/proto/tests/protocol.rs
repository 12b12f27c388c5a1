//! `PROTOCOL` must be raised whenever the declarations that determine the layout of messages and shared memory, or the
//! capsule's version, change. Comments, function names and tests do not count.

use std::fs;
use std::path::{Path, PathBuf};

use portolan_proto::PROTOCOL;

/// Declarations that determine messages and shared memory.
const TYPES: [&str; 3] = ["struct", "enum", "const"];
/// Declarations that determine capsules.
const LISTS: [&str; 2] = ["encoding::fields!", "encoding::variants!"];

/// Files and directories beside this crate, and which of their declarations count.
const SHAPING: [(&str, &[&str]); 6] = [
    ("types/src", &TYPES),
    ("proto/src", &TYPES),
    ("tcp/src/encoding.rs", &TYPES),
    ("tcp/src/config.rs", &TYPES),
    ("stack/src/passive/rules.rs", &TYPES),
    ("tcp/src", &LISTS),
];

/// `NUMBER DIGEST`, of which the last line is current.
const RECORDED: &str = include_str!("protocol.txt");

#[test]
fn the_protocol_number_is_raised_with_what_it_stands_for() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut declared = String::new();
    for (path, counting) in SHAPING {
        for path in files(&crates.join(path)) {
            let text = fs::read_to_string(&path).expect("a source");
            declared.push_str(&declarations(&text, counting));
        }
    }
    let present = format!("{PROTOCOL} {:016x}", digest(&declared));
    let recorded = RECORDED.lines().last().unwrap_or_default();
    assert_eq!(
        recorded, present,
        "raise PROTOCOL, and add this line to tests/protocol.txt"
    );
}

/// In an order independent of the file system.
fn files(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else {
        return vec![path.to_owned()];
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let is_test = |path: &PathBuf| {
        path.iter()
            .any(|part| part == "tests" || part == "tests.rs")
    };
    paths.retain(|path| !is_test(path));
    paths.iter().flat_map(|path| files(path)).collect()
}

/// The declarations that begin with a word of `counting`, and attributes for layout and encoding, without comments.
fn declarations(text: &str, counting: &[&str]) -> String {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let mut found = String::new();
    let mut depth = 0;
    let mut is_inside = false;
    for line in code.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        let word = line.trim_start_matches("pub ").split([' ', '(']).next();
        let begins = depth == 0 && word.is_some_and(|word| counting.contains(&word));
        let shapes = line.starts_with("#[repr") || line.starts_with("#[serde");
        is_inside |= begins;
        if (is_inside || shapes) && !line.is_empty() {
            found.extend(line.chars().filter(|c| !c.is_whitespace()));
        }
        let count = |of: &str| line.chars().filter(|c| of.contains(*c)).count();
        depth = (depth + count("{([")).saturating_sub(count("})]"));
        is_inside &= depth > 0;
    }
    found
}

/// FNV-1a, 64 bits: independent of the compiler.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn comments_and_functions_shape_nothing() {
    let plain = "pub struct A {\n    pub a: u8,\n}\n";
    let more = "/// Better.\npub struct A {\n    /// Said.\n    pub a: u8, // so\n}\n\nimpl A {\n    fn b() {\n        let a = 1;\n    }\n}\n";
    assert_eq!(declarations(plain, &TYPES), declarations(more, &TYPES));
    let other = plain.replace("u8", "u16");
    assert_ne!(declarations(plain, &TYPES), declarations(&other, &TYPES));
}

#[test]
fn the_order_of_a_capsules_fields_counts() {
    let lists = |order| declarations(&format!("encoding::fields!(A {{ {order} }});\n"), &LISTS);
    assert_ne!(lists("a, b"), lists("b, a"));
}
