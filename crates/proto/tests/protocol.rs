//! `PROTOCOL` must be raised whenever the declarations that determine the layout of messages and shared memory, or the
//! capsule's version, change. Comments, function names and tests do not count.

use std::fs;
use std::path::{Path, PathBuf};

use portolan_proto::{OLDEST_PROTOCOL, PROTOCOL};

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

/// Not part of what they number.
const NUMBERS: [&str; 2] = ["pubconstPROTOCOL:", "pubconstOLDEST_PROTOCOL:"];

fn present() -> Vec<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut declared = Vec::new();
    for (path, counting) in SHAPING {
        for path in files(&crates.join(path)) {
            let text = fs::read_to_string(&path).expect("a source");
            declared.extend(declarations(&text, counting));
        }
    }
    let is_number = |declared: &String| NUMBERS.iter().any(|number| declared.starts_with(number));
    declared.retain(|declared| !is_number(declared));
    declared
}

#[test]
fn the_protocol_number_is_raised_with_what_it_stands_for() {
    let present = format!("{PROTOCOL} {:016x}", digest(&present().concat()));
    let recorded = RECORDED.lines().last().unwrap_or_default();
    assert_eq!(
        recorded, present,
        "raise PROTOCOL, and add this line to tests/protocol.txt"
    );
}

/// The declarations of each older version that this one speaks are in a file of its number.
#[test]
fn messages_of_older_versions_that_are_spoken_are_understood() {
    let present = present();
    for number in OLDEST_PROTOCOL..PROTOCOL {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/protocol-{number}.txt"));
        let recorded = fs::read_to_string(&path).expect("the declarations of that version");
        for former in recorded.lines() {
            assert!(
                present.iter().any(|declared| extends(declared, former)),
                "raise OLDEST_PROTOCOL, since this is no more: {former}"
            );
        }
    }
}

/// Does a declaration mean the same to those who know the former one? It may have more variants, after those of that.
fn extends(declared: &str, former: &str) -> bool {
    let with_variants = |declared: &'_ str| {
        let (head, body) = declared.split_once('{')?;
        let body = body.strip_suffix('}')?;
        head.contains("enum")
            .then(|| (head.to_owned(), variants(body)))
    };
    declared == former
        || match (with_variants(declared), with_variants(former)) {
            (Some((head, all)), Some((former, known))) => head == former && all.starts_with(&known),
            _ => false,
        }
}

/// Splits the body of an enum.
fn variants(body: &str) -> Vec<String> {
    let mut depth = 0;
    let parts = body.split(|c: char| {
        depth += i32::from("{([<".contains(c)) - i32::from("})]>".contains(c));
        depth == 0 && c == ','
    });
    let parts = parts.filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

#[test]
fn only_variants_at_the_end_are_added() {
    let known = "pubenumA{B,C{d:u8,e:Vec<(u8,u8)>},}";
    assert!(extends(known, known));
    assert!(extends("pubenumA{B,C{d:u8,e:Vec<(u8,u8)>},D(u8),}", known));
    for other in [
        "pubenumA{B,}",
        "pubenumA{D,B,C{d:u8,e:Vec<(u8,u8)>},}",
        "pubenumA{B,C{d:u8,e:Vec<(u8,u8)>,f:u8},}",
        "pubenumB{B,C{d:u8,e:Vec<(u8,u8)>},}",
        "#[repr(u8)]pubenumA{B,C{d:u8,e:Vec<(u8,u8)>},}",
    ] {
        assert!(!extends(other, known), "{other}");
    }
    assert!(!extends("pubstructA{b:u8,c:u8,}", "pubstructA{b:u8,}"));
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

/// The declarations that begin with a word of `counting`, each with its attributes for layout and encoding, without comments.
fn declarations(text: &str, counting: &[&str]) -> Vec<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let mut all = Vec::new();
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
        if is_inside && depth == 0 {
            all.push(std::mem::take(&mut found));
        }
        is_inside &= depth > 0;
    }
    all.extend(Some(found).filter(|rest| !rest.is_empty()));
    all
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
