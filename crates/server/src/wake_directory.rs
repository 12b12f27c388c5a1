//! Where sockets that receive wake-ups have their names for a moment: a directory of the server's alone. Whoever may list a
//! directory can hold its lock for as long as he likes (`getdents64` into memory that a file system of his own serves), and
//! the server would wait for it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::instance::Instance;

#[derive(Debug)]
pub struct WakeDirectory(PathBuf);

impl WakeDirectory {
    /// Makes it, or takes one that a server which died has left.
    pub fn make(instance: &Instance) -> io::Result<WakeDirectory> {
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

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WakeDirectory {
    fn drop(&mut self) {
        // The next server takes it as it is.
        let _ = fs::remove_dir(&self.0);
    }
}
