//! A private directory of the server in which wake-up sockets have their names for a moment. Any user who may list a
//! directory can hold its lock indefinitely (`getdents64` into memory backed by a file system of its own), and the
//! server would wait for it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::instance::Instance;

#[derive(Debug)]
pub(crate) struct WakeDirectory(PathBuf);

impl WakeDirectory {
    /// Creates the directory, or reuses one that a dead server has left.
    pub(crate) fn make(instance: &Instance) -> io::Result<WakeDirectory> {
        const MODE: u32 = 0o700;
        let socket = instance.socket().file_name().unwrap_or_default();
        let name = format!(".{}.wake", socket.to_string_lossy());
        let path = instance.directory().join(name);
        match DirBuilder::new().mode(MODE).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        let found = fs::symlink_metadata(&path)?;
        let is_own = found.uid() == rustix::process::geteuid().as_raw();
        if !found.is_dir() || !is_own || found.permissions().mode() & 0o077 != 0 {
            let text = format!(
                "{} is not a directory of the server's alone",
                path.display()
            );
            return Err(io::Error::other(text));
        }
        Ok(WakeDirectory(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WakeDirectory {
    fn drop(&mut self) {
        // If this fails, the next server reuses it.
        let _ = fs::remove_dir(&self.0);
    }
}
