//! One server per control socket: a lock on a file beside the socket says whether one runs, also
//! when the last one died without a word.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Why this server cannot be the one.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    #[error("a server is running already (pid {pid}, lock {path})")]
    Running { pid: String, path: PathBuf },
    #[error("cannot create {path}: {source}")]
    Create {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Held while the server runs.
#[derive(Debug)]
pub struct Instance {
    socket: PathBuf,
    lock_path: PathBuf,
    _lock: File,
    /// The socket's folder, if this server made it.
    folder: Option<PathBuf>,
}

impl Instance {
    /// Takes the lock for `socket`. Whoever holds it may replace a socket file that is left there.
    pub fn claim(socket: &Path) -> Result<Instance, InstanceError> {
        let lock_path = lock_path(socket);
        let create = |source| InstanceError::Create {
            path: lock_path.clone(),
            source,
        };
        let folder = socket.parent().filter(|folder| !folder.exists());
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(create)?;
        }
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(create)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                // The number is a help for the reader of the message; without it the message
                // still says what is wrong.
                let _ = lock.read_to_string(&mut pid);
                return Err(InstanceError::Running {
                    pid: pid.trim().to_owned(),
                    path: lock_path,
                });
            }
            Err(errno) => return Err(create(errno.into())),
        }
        write_pid(&mut lock).map_err(create)?;
        Ok(Instance {
            socket: socket.to_owned(),
            lock_path,
            _lock: lock,
            folder: folder.map(Path::to_owned),
        })
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Instance {
    /// Best effort: a file without a lock stops nobody.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.lock_path);
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

fn write_pid(lock: &mut File) -> std::io::Result<()> {
    lock.set_len(0)?;
    lock.rewind()?;
    writeln!(lock, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("portoland-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_second_server_is_refused_and_told_who_runs() {
        let folder = folder("twice");
        let socket = folder.join("control");
        let first = Instance::claim(&socket).unwrap();
        let error = Instance::claim(&socket).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        drop(first);
        drop(Instance::claim(&socket).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_left_by_a_dead_server_stops_nobody() {
        let folder = folder("stale");
        let socket = folder.join("control");
        std::fs::write(lock_path(&socket), "1\n").unwrap();
        drop(Instance::claim(&socket).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
