//! Files that use each other in a circle can only be understood together. In the library and in the server no circle
//! has more than a few files, and the library's folders use each other in one direction only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fmt, fs};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree};

/// The most files of a circle.
const MOST: usize = 7;

/// Re-exports of re-exports that are followed: more than there are, so that a circle of them ends, too.
const REEXPORTS_MAX: usize = 8;

/// A path below the crate's root: of a module, or of something in one.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct ModulePath(Vec<String>);

impl fmt::Debug for ModulePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.join("::"))
    }
}

impl ModulePath {
    /// That of a file `src/…`.
    fn of_file(file: &Path) -> ModulePath {
        let file = file.with_extension("");
        let names = file.iter().map(|name| name.to_str().expect("UTF-8"));
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.pop_if(|last| matches!(last.as_str(), "lib" | "main" | "mod"));
        ModulePath(names)
    }

    fn child(&self, name: &str) -> ModulePath {
        self.join(&[name.to_owned()])
    }

    fn join(&self, names: &[String]) -> ModulePath {
        ModulePath([&self.0, names].concat())
    }

    fn parent(&self) -> ModulePath {
        let above = self.0.len().saturating_sub(1);
        ModulePath(self.0[..above].to_vec())
    }
}

/// What a file names.
#[derive(Debug, Default)]
struct Names {
    /// What is imported, by the name that it has in this file.
    imports: BTreeMap<String, Vec<String>>,
    paths: BTreeSet<Vec<String>>,
}

impl Names {
    fn of(text: &str) -> Names {
        let mut names = Names::default();
        names.visit_file(&syn::parse_file(text).expect("Rust"));
        names
    }

    fn import(&mut self, mut before: Vec<String>, tree: &UseTree) {
        let name = match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                return self.import(before, &path.tree);
            }
            UseTree::Group(group) => {
                return (group.items.iter()).for_each(|tree| self.import(before.clone(), tree));
            }
            UseTree::Name(name) if name.ident == "self" => before.last().cloned(),
            UseTree::Name(name) => {
                before.push(name.ident.to_string());
                Some(name.ident.to_string())
            }
            UseTree::Rename(rename) => {
                if rename.ident != "self" {
                    before.push(rename.ident.to_string());
                }
                Some(rename.rename.to_string())
            }
            UseTree::Glob(_) => None,
        };
        self.paths.insert(before.clone());
        if let Some(name) = name {
            self.imports.insert(name, before);
        }
    }

    /// Adds the paths in a macro's arguments.
    fn scan(&mut self, tokens: &str) {
        let tokens = tokens.replace(" :: ", "::");
        for word in tokens.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':') {
            let path: Vec<String> = word.split("::").map(str::to_owned).collect();
            if path.len() > 1 {
                self.paths.insert(path);
            }
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.import(Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        // A single name is imported, or a local variable's.
        if path.segments.len() > 1 {
            let names = path.segments.iter();
            self.paths
                .insert(names.map(|name| name.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.scan(&call.tokens.to_string());
        visit::visit_macro(self, call);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let condition = attribute.meta.require_list();
        condition.is_ok_and(|list| {
            list.path.is_ident("cfg")
                && ["test", "loom"].contains(&list.tokens.to_string().as_str())
        })
    })
}

/// The files of a crate.
struct Crate(BTreeMap<ModulePath, Names>);

impl Crate {
    fn read(src: &Path) -> Crate {
        let mut files = BTreeMap::new();
        let mut folders = vec![src.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = fs::read_to_string(&path).expect("text");
                    let file = path.strip_prefix(src).expect("it is below");
                    files.insert(ModulePath::of_file(file), Names::of(&text));
                }
            }
        }
        Crate(files)
    }

    /// Returns what a path in `module` means; none if it leaves the crate.
    fn resolve(&self, module: &ModulePath, path: &[String]) -> Option<ModulePath> {
        self.resolve_here(module, path).or_else(|| {
            let (first, rest) = path.split_first()?;
            let import = self.0.get(module)?.imports.get(first)?;
            Some(self.resolve_here(module, import)?.join(rest))
        })
    }

    /// As [`Crate::resolve`], without the module's imports.
    fn resolve_here(&self, module: &ModulePath, path: &[String]) -> Option<ModulePath> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(ModulePath(rest.to_vec())),
            "self" => Some(module.join(rest)),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let above = (0..ups).fold(module.clone(), |module, _| module.parent());
                Some(above.join(&path[ups..]))
            }
            first => (self.0.contains_key(&module.child(first))).then(|| module.join(path)),
        }
    }

    /// Returns the module that has what is at `path`, by way of its re-exports.
    fn home(&self, path: &ModulePath, reexports: usize) -> ModulePath {
        let mut module = ModulePath::default();
        for (index, name) in path.0.iter().enumerate() {
            let child = module.child(name);
            if self.0.contains_key(&child) {
                module = child;
                continue;
            }
            let import = self
                .0
                .get(&module)
                .and_then(|names| names.imports.get(name));
            let import = import.and_then(|import| self.resolve(&module, import));
            return match import {
                Some(import) if reexports < REEXPORTS_MAX => {
                    self.home(&import.join(&path.0[index + 1..]), reexports + 1)
                }
                _ => module,
            };
        }
        module
    }

    /// Returns the modules that a module uses.
    fn used_by(&self, module: &ModulePath) -> BTreeSet<ModulePath> {
        let paths = self.0[module].paths.iter();
        paths
            .filter_map(|path| self.resolve(module, path))
            .map(|path| self.home(&path, 0))
            .filter(|used| used != module)
            .collect()
    }

    fn uses(&self) -> Uses {
        let modules = self.0.keys();
        Uses(
            modules
                .map(|module| (module.clone(), self.used_by(module)))
                .collect(),
        )
    }
}

/// Which modules use which.
#[derive(Debug)]
struct Uses(BTreeMap<ModulePath, BTreeSet<ModulePath>>);

impl Uses {
    /// Each folder, with the file of that name, as one module; without the crate's root, which only names them.
    fn of_folders(&self) -> Uses {
        let folder = |module: &ModulePath| ModulePath(module.0.iter().take(1).cloned().collect());
        let mut uses: BTreeMap<ModulePath, BTreeSet<ModulePath>> = BTreeMap::new();
        for (module, used) in self.0.iter().filter(|(module, _)| !module.0.is_empty()) {
            let used = used.iter().map(folder);
            let used = used.filter(|used| *used != folder(module) && !used.0.is_empty());
            uses.entry(folder(module)).or_default().extend(used);
        }
        Uses(uses)
    }

    /// Returns the modules of the largest circle, each with those of them that it uses.
    fn largest_circle(&self) -> Uses {
        let modules = self.0.keys();
        let reached: BTreeMap<_, _> = modules
            .map(|module| (module, self.reached_from(module)))
            .collect();
        let circle_of = |module| -> BTreeSet<ModulePath> {
            let there = reached[module].iter();
            let is_back = |there: &&ModulePath| reached[there].contains(module);
            there.filter(is_back).cloned().collect()
        };
        let circles = self.0.keys().map(circle_of);
        let largest = circles.max_by_key(BTreeSet::len).unwrap_or_default();
        let modules = largest.iter();
        Uses(
            modules
                .map(|module| (module.clone(), &self.0[module] & &largest))
                .collect(),
        )
    }

    fn reached_from(&self, module: &ModulePath) -> BTreeSet<ModulePath> {
        let mut reached = BTreeSet::new();
        let mut next = vec![module];
        while let Some(module) = next.pop() {
            for used in &self.0[module] {
                if reached.insert(used.clone()) {
                    next.push(used);
                }
            }
        }
        reached
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().map(|module| module.0.join("::")).collect()
    }
}

fn uses_of(name: &str) -> Uses {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates"));
    Crate::read(&crates.join(name).join("src")).uses()
}

fn assert_circles_are_small(name: &str) {
    let circle = uses_of(name).largest_circle();
    let files = circle.0.len();
    assert!(
        files <= MOST,
        "{files} files of {name} use each other in a circle: {circle:#?}"
    );
}

#[test]
fn circles_of_the_librarys_files_are_small() {
    assert_circles_are_small("portolan");
}

#[test]
fn circles_of_the_servers_files_are_small() {
    assert_circles_are_small("server");
}

#[test]
fn the_librarys_folders_use_each_other_in_one_direction() {
    let circle = uses_of("portolan").of_folders().largest_circle();
    assert!(circle.0.is_empty(), "{circle:#?}");
}

fn uses_in(files: &[(&str, &str)]) -> Uses {
    let files = files.iter();
    let files = files.map(|(file, text)| (ModulePath::of_file(Path::new(file)), Names::of(text)));
    Crate(files.collect()).uses()
}

#[test]
fn a_circle_is_found_however_its_paths_are_written() {
    let uses = uses_in(&[
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "mod inner; pub use inner::Inner; use std::fmt;"),
        (
            "a/inner.rs",
            "pub struct Inner; use crate::{b::{self as other, B}, c};",
        ),
        ("b.rs", "pub struct B; fn f() { assert!(super::c::g()); }"),
        ("c.rs", "use super::a; fn g() -> a::Inner { a::new() }"),
    ]);
    assert_eq!(uses.largest_circle().names(), ["a", "a::inner", "b", "c"]);
    assert_eq!(uses.of_folders().largest_circle().names(), ["a", "b", "c"]);
}

#[test]
fn tests_and_modules_that_only_contain_others_make_no_circle() {
    let uses = uses_in(&[
        ("lib.rs", "mod a; mod b; pub use a::A;"),
        (
            "a.rs",
            "mod inner; pub struct A; #[cfg(test)] mod tests { use crate::b::B; }",
        ),
        ("a/inner.rs", "use super::A;"),
        ("b.rs", "use crate::a::A; pub struct B;"),
    ]);
    assert!(uses.largest_circle().names().is_empty());
    assert!(uses.of_folders().largest_circle().names().is_empty());
}
