//! Loads scripts from files, with the files that they include.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::parse::{Line, about, line};
use super::{Family, ParseError, Script};

/// Maximum depth of nested includes.
const DEEPEST: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: {error}")]
    Parse { path: PathBuf, error: ParseError },
    #[error("{0}: files include each other too deeply")]
    Deep(PathBuf),
    #[error("{0} says nothing about what it proves")]
    NoComment(PathBuf),
}

/// Loads a script. The path of an included file is relative to the file that includes it.
pub fn load(path: &Path) -> Result<Script, LoadError> {
    let mut script = Script {
        about: about(&read(path)?),
        families: Vec::new(),
        sysctls: Vec::new(),
        steps: Vec::new(),
    };
    if script.about.is_empty() {
        return Err(LoadError::NoComment(path.to_owned()));
    }
    add(&mut script, path, 0)?;
    if script.families.is_empty() {
        script.families.push(Family::V4);
    }
    Ok(script)
}

fn add(script: &mut Script, path: &Path, depth: usize) -> Result<(), LoadError> {
    if depth > DEEPEST {
        return Err(LoadError::Deep(path.to_owned()));
    }
    let file: Arc<str> = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into();
    for (index, text) in read(path)?.lines().enumerate() {
        let line = line(&file, index + 1, text).map_err(|error| LoadError::Parse {
            path: path.to_owned(),
            error,
        })?;
        match line {
            Line::Empty => {}
            Line::Families(families) => script.families = families,
            Line::Sysctl(name, value) => script.sysctls.push((name, value)),
            Line::Step(step) => script.steps.push(*step),
            Line::Include(other) => add(script, &path.with_file_name(other), depth + 1)?,
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, LoadError> {
    fs::read_to_string(path).map_err(|source| LoadError::Read {
        path: path.to_owned(),
        source,
    })
}
