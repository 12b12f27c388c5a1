//! `docs/requirements`: one file for each RFC.

use std::path::Path;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rfc {
    #[serde(rename = "rfc")]
    pub number: u32,
    pub title: String,
    #[serde(rename = "requirement")]
    pub requirements: Vec<Requirement>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// The RFC's own identifier, or one of ours.
    pub id: String,
    pub section: String,
    pub text: String,
    /// Functions that implement it, as `path::name`; `path::*` is the whole file.
    #[serde(default)]
    pub code: Vec<String>,
    /// Tests that prove it.
    #[serde(default)]
    pub tests: Vec<String>,
    /// Why it is not met, or met in a different way.
    pub reason: Option<String>,
}

pub(crate) fn read(folder: &Path) -> Result<Vec<Rfc>, String> {
    let mut rfcs = Vec::new();
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{folder:?}: {error}"))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path:?}: {error}"))?;
        rfcs.push(toml::from_str(&text).map_err(|error| format!("{path:?}: {error}"))?);
    }
    // The RFC that the others amend comes first.
    rfcs.sort_by_key(|rfc: &Rfc| (rfc.number != crate::sources::NUMBERED, rfc.number));
    Ok(rfcs)
}
