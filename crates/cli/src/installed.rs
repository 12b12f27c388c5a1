//! Finds the files that belong to `portolan`: beside it after `cargo build`, in `../lib/portolan` after `make install`.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::anyhow;

pub(crate) fn find(name: &str) -> anyhow::Result<PathBuf> {
    let program = env::current_exe()?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    ["", "../lib/portolan"]
        .iter()
        .map(|place| directory.join(place).join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            let directory = directory.display();
            anyhow!("{name} is neither in {directory} nor in {directory}/../lib/portolan")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_where_it_was_looked_for() {
        let error = find("portolan-no-such-program").unwrap_err().to_string();
        assert!(error.starts_with("portolan-no-such-program is neither in /"));
    }
}
