//! Citations in the comments of the sources. An item is named by the function or type that the
//! comment is inside of or before.

use std::collections::BTreeMap;
use std::path::Path;

use crate::data::Requirement;

/// The RFC whose requirements have identifiers of their own.
pub(crate) const NUMBERED: u32 = 9293;

/// An item of a file, with the names that the page shows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub path: String,
    /// Empty for the file as a whole.
    pub item: String,
}

#[derive(Debug)]
struct Citation {
    place: Place,
    is_test: bool,
    /// `MUST-38`; None for an RFC and a section.
    tag: Option<String>,
    section: Option<(u32, String)>,
}

#[derive(Debug)]
pub(crate) struct Sources {
    /// The text of each file, by path.
    files: BTreeMap<String, String>,
    citations: Vec<Citation>,
}

const FOLDERS: [&str; 3] = ["crates", "bpf", "testing"];
const ENDINGS: [&str; 4] = ["rs", "c", "h", "pkt"];

impl Sources {
    pub(crate) fn read(root: &Path) -> Result<Sources, String> {
        let mut files = BTreeMap::new();
        for folder in FOLDERS {
            collect(root, &root.join(folder), &mut files)?;
        }
        let citations = files
            .iter()
            .filter(|(path, _)| !path.starts_with("testing/requirements"))
            .flat_map(|(path, text)| cite(path, text))
            .collect();
        Ok(Sources { files, citations })
    }

    /// Returns the places that cite `requirement`: code, then tests.
    pub(crate) fn citations(
        &self,
        rfc: u32,
        requirement: &Requirement,
    ) -> (Vec<Place>, Vec<Place>) {
        let (mut code, mut tests) = (Vec::new(), Vec::new());
        for citation in &self.citations {
            let by_tag = rfc == NUMBERED && citation.tag.as_deref() == Some(&requirement.id);
            let by_section = rfc != NUMBERED
                && citation.section.as_ref().is_some_and(|(cited, section)| {
                    *cited == rfc && *section == requirement.section
                });
            if by_tag || by_section {
                let places = if citation.is_test {
                    &mut tests
                } else {
                    &mut code
                };
                places.push(citation.place.clone());
            }
        }
        (code, tests)
    }

    /// Resolves `path::name`. An item that has moved is looked up in the rest of its crate.
    pub(crate) fn place(&self, name: &str) -> Option<Place> {
        let (path, item) = name.split_once("::").unwrap_or((name, "*"));
        if item == "*" {
            let place = |path: &str| Place {
                path: path.to_owned(),
                item: String::new(),
            };
            return self.files.contains_key(path).then(|| place(path));
        }
        let folder: Vec<&str> = path.split('/').take(2).collect();
        let folder = folder.join("/") + "/";
        let elsewhere = self
            .files
            .iter()
            .filter(|(other, _)| other.starts_with(&folder));
        let first = self.files.get_key_value(path);
        first
            .into_iter()
            .chain(elsewhere)
            .find(|(_, text)| text.lines().any(|line| item_of(line) == Some(item)))
            .map(|(path, _)| Place {
                path: path.clone(),
                item: item.to_owned(),
            })
    }

    /// Returns all tags.
    pub(crate) fn tags(&self) -> impl Iterator<Item = (&str, &Place)> {
        self.citations
            .iter()
            .filter_map(|citation| Some((citation.tag.as_deref()?, &citation.place)))
    }
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{folder:?}: {error}"))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(root, &path, files)?;
            continue;
        }
        let ending = path.extension().and_then(|ending| ending.to_str());
        let name = path.strip_prefix(root).ok().and_then(Path::to_str);
        if let (Some(name), Some(ending)) = (name, ending)
            && ENDINGS.contains(&ending)
            && let Ok(text) = std::fs::read_to_string(&path)
        {
            files.insert(name.to_owned(), text);
        }
    }
    Ok(())
}

fn cite(path: &str, text: &str) -> Vec<Citation> {
    let lines: Vec<&str> = text.lines().collect();
    let in_test_file = path.contains("/tests") || path.starts_with("testing/");
    let unit_tests = lines.iter().position(|line| line.trim() == "mod tests {");
    let mut citations = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some(comment) = comment_of(line, path.ends_with(".pkt")) else {
            continue;
        };
        let place = Place {
            path: path.to_owned(),
            item: item_at(&lines, number).unwrap_or_default().to_owned(),
        };
        let is_test = in_test_file || unit_tests.is_some_and(|start| number > start);
        let mut add = |tag, section| {
            citations.push(Citation {
                place: place.clone(),
                is_test,
                tag,
                section,
            });
        };
        tags_in(comment).for_each(|tag| add(Some(tag), None));
        sections_in(comment)
            .into_iter()
            .for_each(|section| add(None, Some(section)));
    }
    citations
}

fn comment_of(line: &str, script: bool) -> Option<&str> {
    let at = [line.find("//"), line.find("/*"), line.find("* ")];
    let hash = line.find('#').filter(|_| script);
    at.into_iter()
        .flatten()
        .chain(hash)
        .min()
        .map(|at| &line[at..])
}

/// Returns the item that a comment at line `number` belongs to: the next one if only comments and attributes
/// lie between, else the last one before.
fn item_at<'a>(lines: &[&'a str], number: usize) -> Option<&'a str> {
    if lines[number].trim_start().starts_with("//!") {
        return None;
    }
    let next = lines[number..].iter().find(|line| {
        let line = line.trim_start();
        !(line.starts_with("//") || line.starts_with('#') || line.starts_with('*'))
    });
    next.and_then(|line| item_of(line)).or_else(|| {
        lines[..number]
            .iter()
            .rev()
            .find_map(|line| item_of(line).filter(|_| !line.trim_start().starts_with("//")))
    })
}

/// Returns the name of the function or type whose definition begins on this line.
fn item_of(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    let keyword = words.by_ref().find(|word| {
        let modifier = word.starts_with("pub") || ["const", "unsafe", "async"].contains(word);
        !modifier
    })?;
    if !["fn", "struct", "enum", "trait", "macro_rules!"].contains(&keyword) {
        return None;
    }
    let name = words.next()?;
    let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    Some(&name[..end.unwrap_or(name.len())])
}

fn tags_in(comment: &str) -> impl Iterator<Item = String> {
    comment
        .split('[')
        .skip(1)
        .filter_map(|rest| rest.split_once(']'))
        .flat_map(|(tags, _)| tags.split(", "))
        .filter(|tag| {
            tag.split_once('-').is_some_and(|(level, number)| {
                ["MUST", "SHLD", "MAY", "REC"].contains(&level) && number.parse::<u32>().is_ok()
            })
        })
        .map(str::to_owned)
}

/// Returns an RFC and its sections, as in `RFC 5681 §3.1, §4.2`.
fn sections_in(comment: &str) -> Vec<(u32, String)> {
    let mut sections = Vec::new();
    for rest in comment.split("RFC ").skip(1) {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let Ok(rfc) = rest[..digits].parse() else {
            continue;
        };
        for section in rest.split('§').skip(1) {
            let end = section.find(|c: char| !(c.is_ascii_digit() || c == '.'));
            let section = section[..end.unwrap_or(section.len())].trim_end_matches('.');
            sections.push((rfc, section.to_owned()));
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_sections_are_found_in_comments() {
        let comment = "/// RFC 9293 §3.8.6.2.1 [MUST-38, SHLD-7]; RFC 5681 §3.1, §4.2.";
        assert_eq!(tags_in(comment).collect::<Vec<_>>(), ["MUST-38", "SHLD-7"]);
        let sections = sections_in(comment);
        assert!(sections.contains(&(5681, "3.1".into())));
        assert!(sections.contains(&(5681, "4.2".into())));
        assert_eq!(tags_in("[u8; 4] and [MUST-x]").count(), 0);
    }

    #[test]
    fn a_comment_belongs_to_the_item_it_stands_before_or_in() {
        let text =
            "//! RFC 1 §1\n/// RFC 1 §2\n#[test]\npub(crate) fn before() {\n // RFC 1 §3\n x();\n}";
        let found: Vec<_> = cite("crates/x/src/a.rs", text)
            .into_iter()
            .map(|citation| citation.place.item)
            .collect();
        assert_eq!(found, ["", "before", "before"]);
    }
}
