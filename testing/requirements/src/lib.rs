//! Requirements of RFCs, and where this tree meets them. Reads data and sources, and writes one page.
#![forbid(unsafe_code)]

mod data;
mod page;
mod sources;

use std::path::{Path, PathBuf};

pub use data::{Requirement, Rfc};
pub use sources::Place;

/// Path of the page, relative to the root of the tree.
pub const PAGE: &str = "docs/reference/requirements.md";

/// The data and the sources of the tree.
#[derive(Debug)]
pub struct Survey {
    pub rfcs: Vec<Rfc>,
    sources: sources::Sources,
}

/// One requirement with the code and the tests that cite it.
#[derive(Debug)]
pub struct Finding<'a> {
    pub rfc: u32,
    pub requirement: &'a Requirement,
    pub code: Vec<Place>,
    pub tests: Vec<Place>,
}

impl Survey {
    pub fn of(root: &Path) -> Result<Survey, String> {
        Ok(Survey {
            rfcs: data::read(&root.join("docs/requirements"))?,
            sources: sources::Sources::read(root)?,
        })
    }

    pub fn findings<'a>(&'a self, rfc: &'a Rfc) -> impl Iterator<Item = Finding<'a>> {
        rfc.requirements.iter().map(|requirement| {
            let (mut code, mut tests) = self.sources.citations(rfc.number, requirement);
            code.extend(self.named(&requirement.code));
            tests.extend(self.named(&requirement.tests));
            for places in [&mut code, &mut tests] {
                places.sort();
                places.dedup();
            }
            Finding {
                rfc: rfc.number,
                requirement,
                code,
                tests,
            }
        })
    }

    fn named(&self, names: &[String]) -> impl Iterator<Item = Place> {
        names.iter().filter_map(|name| self.sources.place(name))
    }

    /// Returns all errors: names and tags that do not exist, requirements without code, test or reason.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for rfc in &self.rfcs {
            for finding in self.findings(rfc) {
                let requirement = finding.requirement;
                for name in requirement.code.iter().chain(&requirement.tests) {
                    if self.sources.place(name).is_none() {
                        complaints.push(format!("{}: there is no {name}", requirement.id));
                    }
                }
                let answered = !finding.code.is_empty() && !finding.tests.is_empty();
                if !answered && requirement.reason.is_none() {
                    complaints.push(format!(
                        "RFC {} {}: neither code with a test nor a reason",
                        rfc.number, requirement.id
                    ));
                }
            }
        }
        let numbered = self.rfcs.iter().find(|rfc| rfc.number == sources::NUMBERED);
        for (tag, place) in self.sources.tags() {
            if !numbered.is_some_and(|rfc| rfc.requirements.iter().any(|r| r.id == tag)) {
                complaints.push(format!("{place:?} names [{tag}], which no RFC has"));
            }
        }
        complaints
    }

    pub fn page(&self) -> String {
        page::render(self)
    }
}

/// Returns the root of the tree that this crate was built in.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
