//! The list of scripts whose result on Portolan differs from Linux, and the verdict on a run.

use std::collections::BTreeMap;

/// Scripts that are known to fail on Portolan: `topic/name | reason`, or `topic/name v6 | reason`.
#[derive(Debug, Default)]
pub struct Deviations(BTreeMap<String, String>);

impl Deviations {
    /// Parses the list. The error is the first invalid line.
    pub fn parse(text: &str) -> Result<Deviations, String> {
        let mut list = BTreeMap::new();
        for line in text.lines() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            match line.split_once(" | ") {
                Some((name, reason)) if !reason.trim().is_empty() => {
                    list.insert(name.trim().to_owned(), reason.trim().to_owned());
                }
                _ => return Err(format!("no script and reason: {line}")),
            }
        }
        Ok(Deviations(list))
    }

    pub fn reason(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns entries for which no script exists.
    pub fn without_script<'a>(&'a self, names: &[String]) -> Vec<&'a str> {
        let unknown = self.0.keys().filter(|name| !names.contains(name));
        unknown.map(String::as_str).collect()
    }
}
