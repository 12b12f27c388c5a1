//! Finds Portolan's own programs beside the running one, where `cargo build` and `make install`
//! put them.

use std::env;
use std::path::{Path, PathBuf};

/// A program that is missing beside the running one.
#[derive(Debug, thiserror::Error)]
#[error("{name} is not beside {}; build it with `make build`", directory.display())]
pub struct MissingTool {
    name: &'static str,
    directory: PathBuf,
}

/// The programs that a bed starts.
#[derive(Clone, Debug)]
pub struct Tools {
    pub portolan: PathBuf,
    pub portoland: PathBuf,
    pub traffic: PathBuf,
    pub engine: PathBuf,
    pub owner: PathBuf,
    pub micro: PathBuf,
    pub native: PathBuf,
    pub preload: PathBuf,
}

impl Tools {
    /// Looks for all programs beside the running one.
    pub fn locate() -> Result<Tools, MissingTool> {
        let directory = own_directory();
        Ok(Tools {
            portolan: find(&directory, "portolan")?,
            portoland: find(&directory, "portoland")?,
            traffic: find(&directory, "portolan-traffic")?,
            engine: find(&directory, "portolan-engine")?,
            owner: find(&directory, "portolan-owner")?,
            micro: find(&directory, "portolan-micro")?,
            native: find(&directory, "portolan-native")?,
            preload: find(&directory, "libportolan_preload.so")?,
        })
    }

    /// Returns the path of another program of the same build.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.portolan.with_file_name(name)
    }
}

/// Returns true if a program that is not ours is installed: at its path, or by its name in a directory of `PATH`.
pub(crate) fn is_installed(program: &Path) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    // Joined to an absolute path, the directory has no effect.
    env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the directory of the running program; for a test, the directory of the tested programs.
fn own_directory() -> PathBuf {
    let program = env::current_exe().unwrap_or_default();
    let directory = program.parent().unwrap_or(Path::new(".")).to_owned();
    if directory.ends_with("deps") {
        directory.join("..")
    } else {
        directory
    }
}

/// `make install` puts `portoland` into `sbin`, `portolan` into `bin`, and the others, including this one, elsewhere.
fn find(directory: &Path, name: &'static str) -> Result<PathBuf, MissingTool> {
    ["", "../../sbin", "../../bin"]
        .iter()
        .map(|place| directory.join(place).join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| MissingTool {
            name,
            directory: directory.to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_its_name_and_by_its_path() {
        for (program, expected) in [
            ("sh", true),
            ("/bin/sh", true),
            ("portolan-none", false),
            ("/bin/portolan-none", false),
        ] {
            assert_eq!(is_installed(Path::new(program)), expected, "{program}");
        }
    }
}
