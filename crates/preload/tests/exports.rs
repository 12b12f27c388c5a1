//! The built library exports the symbols that `docs/reference/symbols.md` lists as translated, and no others of libc's.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    path::{Path, PathBuf},
    process::Command,
};

const PAGE: &str = include_str!("../../../docs/reference/symbols.md");
const BY_NUMBER: &str = include_str!("../src/number.rs");

const HEADERS: [&str; 5] = [
    include_str!("../../../include/portolan/buf.h"),
    include_str!("../../../include/portolan/install.h"),
    include_str!("../../../include/portolan/qos.h"),
    include_str!("../../../include/portolan/raw.h"),
    include_str!("../../../include/portolan/thread.h"),
];

/// Internal names of the library, which libc does not have.
const OWN: [&str; 1] = ["rust_eh_personality"];

/// Prefix of this library's own functions.
const PREFIX: &str = "portolan_";

#[test]
fn what_is_exported_is_what_is_documented_as_translated() {
    let exported: BTreeSet<_> = names_in(&built()).into_values().flatten().collect();
    let exported = exported
        .into_iter()
        .filter(|name| !OWN.contains(&name.as_str()) && !name.starts_with(PREFIX));
    let documented = quoted(section("Translated"));
    assert_eq!(exported.collect::<BTreeSet<_>>(), documented);
}

#[test]
fn the_headers_declare_what_is_the_library_s_own() {
    let exported: BTreeSet<_> = names_in(&built()).into_values().flatten().collect();
    let exported = exported.iter().filter(|name| name.starts_with(PREFIX));
    let declarations = HEADERS
        .into_iter()
        .flat_map(str::lines)
        .filter_map(|line| line.strip_prefix("PORTOLAN_WEAK "))
        .filter_map(|line| line.split('(').next()?.split([' ', '*']).next_back())
        .map(str::to_owned);
    assert_eq!(
        exported.cloned().collect::<BTreeSet<_>>(),
        declarations.collect()
    );
}

#[test]
fn what_is_passed_on_has_a_reason() {
    let rows = section("Passed on")
        .lines()
        .filter(|line| line.starts_with("| `"));
    for row in rows {
        let reason = row.split('|').nth(2).expect("a second column").trim();
        assert!(!reason.is_empty(), "{row}");
    }
    let both: Vec<_> = quoted(section("Translated"))
        .intersection(&quoted(section("Passed on")))
        .cloned()
        .collect();
    assert_eq!(both, Vec::<String>::new());
}

/// Calls by an alternative name of a function would bypass the library.
#[test]
fn every_name_that_libc_has_for_a_translated_function_is_on_the_page() {
    let translated = quoted(section("Translated"));
    let known: BTreeSet<_> = translated
        .union(&quoted(section("Passed on")))
        .cloned()
        .collect();
    let libc = names_in(&libc_path());
    assert!(libc.len() > 1000, "{}", libc.len());
    let forgotten: Vec<_> = libc
        .values()
        .filter(|names| !names.is_disjoint(&translated))
        .flat_map(|names| names.difference(&known))
        .collect();
    assert_eq!(forgotten, Vec::<&String>::new());
}

#[test]
fn the_numbers_of_the_page_are_those_of_the_code() {
    let code = BY_NUMBER
        .split("#[cfg(test)]\nmod tests")
        .next()
        .expect("a first part");
    let used = code.split("libc::").filter_map(|rest| {
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let name = rest.split(|letter| !is_part(letter)).next()?;
        name.starts_with("SYS_").then(|| name.to_owned())
    });
    let documented = quoted(section("By number"));
    let documented = documented
        .into_iter()
        .filter(|name| name.starts_with("SYS_"));
    assert_eq!(
        used.collect::<BTreeSet<_>>(),
        documented.collect::<BTreeSet<_>>()
    );
}

/// Returns the text under a heading.
fn section(heading: &str) -> &'static str {
    let start = format!("\n## {heading}\n");
    let rest = PAGE.split(&start).nth(1).expect("the page has the heading");
    rest.split("\n## ").next().expect("a first part")
}

/// Names in backquotes in the first column of tables, and everywhere outside of tables.
fn quoted(text: &'static str) -> BTreeSet<String> {
    let first_column = |line: &'static str| match line.strip_prefix('|') {
        Some(row) => row.split('|').next().unwrap_or_default(),
        None => line,
    };
    text.lines()
        .flat_map(|line| first_column(line).split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect()
}

fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let target = test.ancestors().nth(2).expect("<target>/deps/<test>");
    target.join("libportolan_preload.so")
}

fn libc_path() -> PathBuf {
    // SAFETY: zeros are a valid `Dl_info`; the address is one of libc's.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        let address = libc::dlsym(libc::RTLD_NEXT, c"read".as_ptr());
        assert!(libc::dladdr(address, &mut found) != 0);
        CStr::from_ptr(found.dli_fname)
            .to_str()
            .expect("a path")
            .into()
    }
}

/// Returns the functions that a library exports, by address. Private ones of libc are excluded.
fn names_in(library: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut nm = Command::new("nm");
    let listed = nm
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .expect("nm is there");
    assert!(listed.status.success(), "{library:?}: {listed:?}");
    let mut names = BTreeMap::<String, BTreeSet<String>>::new();
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let mut words = line.split(' ');
        let (Some(address), Some("T" | "W"), Some(name)) =
            (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if name.ends_with("@GLIBC_PRIVATE") {
            continue;
        }
        let name = name.split('@').next().unwrap_or(name);
        names
            .entry(address.to_owned())
            .or_default()
            .insert(name.to_owned());
    }
    names
}
