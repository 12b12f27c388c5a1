//! One server per control socket: a lock file beside the socket says whether one runs. A socket
//! file without a lock is left from a server that died, and is removed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

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

/// Held while the server runs; the socket file goes with it.
#[derive(Debug)]
pub struct Instance {
    socket: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Instance {
    /// Takes the lock for `socket` and clears the way for binding it.
    pub fn claim(socket: &Path) -> Result<Instance, InstanceError> {
        let lock_path = lock_path(socket);
        let create = |source| InstanceError::Create {
            path: lock_path.clone(),
            source,
        };
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder).map_err(create)?;
        }
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(create)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                // The number is a help for the reader of the message; without it the message
                // still says what is wrong.
                let _ = lock.read_to_string(&mut pid);
                return Err(InstanceError::Running {
                    pid: pid.trim().to_owned(),
                    path: lock_path,
                });
            }
            Err(TryLockError::Error(source)) => return Err(create(source)),
        }
        write_pid(&mut lock).map_err(create)?;
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(InstanceError::Create {
                    path: socket.to_owned(),
                    source: error,
                });
            }
            _ => {}
        }
        Ok(Instance {
            socket: socket.to_owned(),
            lock_path,
            _lock: lock,
        })
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Instance {
    /// Best effort: what stays is cleared by the next server.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let _ = std::fs::remove_file(&self.lock_path);
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
    fn a_socket_left_by_a_dead_server_is_removed() {
        let folder = folder("stale");
        let socket = folder.join("control");
        std::fs::write(&socket, "").unwrap();
        std::fs::write(lock_path(&socket), "1\n").unwrap();
        let instance = Instance::claim(&socket).unwrap();
        assert!(!instance.socket().exists());
        drop(instance);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
