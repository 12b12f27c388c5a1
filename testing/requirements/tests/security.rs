//! The proofs that `docs/security.md` names exist: each word in the last column of a table about tests is a test, a
//! file of tests or code, or a package.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use portolan_requirements::root;

/// Collects names of tests, of Rust files with and without their extension, and of packages.
fn known(directory: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() {
            if path.join("Cargo.toml").exists() {
                names.insert(format!("portolan-{name}"));
            }
            if name != "target" {
                names.insert(name);
                known(&path, names);
            }
        } else if let Some(stem) = name.strip_suffix(".rs") {
            names.insert(stem.to_owned());
            let text = fs::read_to_string(&path).unwrap();
            names.extend(tests_in(&text).map(str::to_owned));
            names.insert(name);
        }
    }
}

fn tests_in(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[test]").skip(1).filter_map(|after| {
        let rest = after.split_once("fn ")?.1;
        rest.split_once('(').map(|(name, _)| name)
    })
}

/// Returns the last cells of all rows of tables whose last heading is about tests.
fn last_cells(page: &str) -> Vec<&str> {
    let mut cells = Vec::new();
    let mut is_about_tests = None;
    for line in page.lines() {
        let Some(row) = line.strip_prefix('|') else {
            is_about_tests = None;
            continue;
        };
        let last = row
            .trim_end_matches('|')
            .rsplit('|')
            .next()
            .unwrap_or_default();
        match is_about_tests {
            None => is_about_tests = Some(last.trim().starts_with("test")),
            Some(true) => cells.push(last),
            Some(false) => {}
        }
    }
    cells
}

fn is_known(names: &BTreeSet<String>, word: &str) -> bool {
    match word.strip_suffix('…') {
        Some(beginning) => names.iter().any(|name| name.starts_with(beginning)),
        None => word.split(['/', ' ']).all(|part| names.contains(part)),
    }
}

#[test]
fn every_proof_on_the_page_of_security_exists() {
    let mut names = BTreeSet::new();
    for part in ["crates", "testing"] {
        known(&root().join(part), &mut names);
    }
    let page = fs::read_to_string(root().join("docs/security.md")).unwrap();
    let cells = last_cells(&page);
    let words: Vec<&str> = cells
        .iter()
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    assert!(words.len() > 60, "the tables have been found");
    let lost: Vec<&&str> = words
        .iter()
        .filter(|word| !is_known(&names, word))
        .collect();
    assert!(lost.is_empty(), "docs/security.md: {lost:#?}");
}

#[test]
fn a_name_that_is_nowhere_is_noticed() {
    let names = BTreeSet::from(["budgets".to_owned(), "idle_connections_keep".to_owned()]);
    let page = "| what | test |\n|---|---|\n| a | `budgets`: `idle_…` |\n| b | `idle_connections` |\n\n| x | y |\n| `z` | `q` |";
    let cells = last_cells(page);
    assert!(cells.iter().any(|cell| cell.contains("idle_…")));
    assert!(!cells.iter().any(|cell| cell.contains('q')));
    assert!(is_known(&names, "idle_…") && is_known(&names, "budgets"));
    assert!(!is_known(&names, "idle_connections"));
}
