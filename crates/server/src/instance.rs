//! One server per network namespace, and one per control socket: a lock on a file beside the socket shows whether a
//! server runs, even if the last one was killed. The file records what a server has changed on the host, so that the
//! next server can undo it if this one cannot.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use portolan_sys::namespace::lock_path;
use portolan_sys::namespace_lock::{self, ClaimError, NamespaceLock};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use tracing::warn;

/// Why this server cannot run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InstanceError {
    #[error("a server is running already (pid {pid}, lock {path})")]
    Running { pid: String, path: PathBuf },
    #[error("a server runs already in this network namespace (pid {0})")]
    RunningHere(u32),
    #[error("cannot create {path}: {source}")]
    Create {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Name of the lock of a network namespace, independent of the sockets of servers.
const NAMESPACE: &str = "portolan/server";

/// Takes the namespace's lock; returns none if another user's process has taken it from servers, or the kernel does not
/// tell.
pub(crate) fn claim_namespace() -> Result<Option<NamespaceLock>, InstanceError> {
    match namespace_lock::claim(NAMESPACE) {
        Ok(lock) => Ok(Some(lock)),
        Err(ClaimError::Held(pid)) => Err(InstanceError::RunningHere(pid)),
        Err(error) => {
            warn!(%error, "a second server in this network namespace would not be noticed");
            Ok(None)
        }
    }
}

/// The locks of a running server.
#[derive(Debug)]
pub(crate) struct Instance {
    socket: PathBuf,
    lock_path: PathBuf,
    journal: Journal,
    /// Record of the previous server, if it died.
    leftover: Record,
    /// The socket's directory, if it was created by this server, or by one that died.
    folder: Option<PathBuf>,
    is_left: bool,
}

/// Identifies one run of a process or thread: its number, and its start time in clock ticks of the kernel.
pub(crate) type LifeRecord = (u32, u64);

/// A thread, and its scheduling before it was given CPU time, as `qos::cpu` records it.
pub(crate) type ThreadRecord = (LifeRecord, String);

/// The content of the lock file besides the server's number: one word and its value per line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Record {
    made_folder: bool,
    /// As recorded by `ReservedPorts`.
    ports: Option<String>,
    /// Devices with a scheduler, and what they had before, as recorded by `traffic::Before`.
    links: Vec<(String, String)>,
    /// Processes and threads with reserved CPU time.
    cpu: Vec<LifeRecord>,
    /// Those of their threads that are not to return to ordinary scheduling.
    threads: Vec<ThreadRecord>,
}

impl Record {
    /// Unknown lines are skipped: the file may be older than this program.
    fn parse(text: &str) -> Record {
        let mut record = Record::default();
        for line in text.lines() {
            match line.split_once(' ') {
                Some(("ports", ports)) => record.ports = Some(ports.to_owned()),
                Some(("link", link)) => {
                    let (device, before) = link.split_once(' ').unwrap_or((link, ""));
                    record.links.push((device.to_owned(), before.to_owned()));
                }
                Some(("cpu", life)) => record.cpu.extend(parse_life(life)),
                Some(("thread", thread)) => record.threads.extend(parse_thread(thread)),
                None if line == MADE_FOLDER => record.made_folder = true,
                _ => {}
            }
        }
        record
    }

    fn text(&self) -> String {
        let mut lines = vec![std::process::id().to_string()];
        if self.made_folder {
            lines.push(MADE_FOLDER.to_owned());
        }
        lines.extend(self.ports.iter().map(|ports| format!("ports {ports}")));
        let links = self.links.iter();
        lines.extend(links.map(|(device, before)| format!("link {device} {before}")));
        let lives = self.cpu.iter();
        lines.extend(lives.map(|(number, started)| format!("cpu {number} {started}")));
        let threads = self.threads.iter();
        lines.extend(threads.map(|((tid, started), had)| format!("thread {tid} {started} {had}")));
        lines.join("\n") + "\n"
    }
}

fn parse_life(text: &str) -> Option<LifeRecord> {
    let (number, started) = text.split_once(' ')?;
    Some((number.parse().ok()?, started.parse().ok()?))
}

fn parse_thread(text: &str) -> Option<ThreadRecord> {
    let at = text.match_indices(' ').nth(1)?.0;
    let (life, had) = text.split_at(at);
    Some((parse_life(life)?, had[1..].to_owned()))
}

const MADE_FOLDER: &str = "made-folder";

impl Instance {
    /// Takes the lock for `socket`. The holder of the lock may replace a socket file that was left there.
    pub(crate) fn claim(socket: &Path) -> Result<Instance, InstanceError> {
        let lock_path = lock_path(socket);
        let create = |source| InstanceError::Create {
            path: lock_path.clone(),
            source,
        };
        let folder = socket.parent();
        let is_missing = folder.is_some_and(|folder| !folder.exists());
        if let Some(folder) = folder.filter(|_| is_missing) {
            std::fs::create_dir_all(folder).map_err(create)?;
        }
        // In a directory that others can write to, the name may be a link of theirs, which must not be followed.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            // A process that could open the file could take the lock when this server ends.
            .mode(0o600)
            .custom_flags(flags.bits() as i32)
            .open(&lock_path)
            .map_err(create)?;
        if !lock.metadata().map_err(create)?.is_file() {
            return Err(create(std::io::Error::other("it is not a regular file")));
        }
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(InstanceError::Running {
                    pid: read(&mut lock).lines().next().unwrap_or("?").to_owned(),
                    path: lock_path,
                });
            }
            Err(errno) => return Err(create(errno.into())),
        }
        let leftover = Record::parse(&read(&mut lock));
        let made_folder = is_missing || leftover.made_folder;
        let journal = Journal::begin(lock, made_folder).map_err(create)?;
        Ok(Instance {
            socket: socket.to_owned(),
            lock_path,
            journal,
            leftover,
            folder: folder.filter(|_| made_folder).map(Path::to_owned),
            is_left: false,
        })
    }

    /// Leaves the lock file for the next server, which finds the ports still reserved; everything else was undone.
    pub(crate) fn leave(mut self) {
        self.is_left = true;
        let undone = self.journal.change(|record| {
            *record = Record {
                made_folder: record.made_folder,
                ports: record.ports.take(),
                ..Record::default()
            };
        });
        if let Err(error) = undone {
            warn!(%error, "the next server undoes what was undone");
        }
    }

    /// Returns the ports that a dead server has left reserved.
    pub(crate) fn leftover_ports(&self) -> Option<&str> {
        self.leftover.ports.as_deref()
    }

    /// Returns the devices that a dead server has left with a scheduler, and what they had before.
    pub(crate) fn leftover_links(&self) -> &[(String, String)] {
        &self.leftover.links
    }

    /// Returns the processes and threads that a dead server has left with CPU time.
    pub(crate) fn leftover_cpu(&self) -> &[LifeRecord] {
        &self.leftover.cpu
    }

    /// Returns those of their threads that had another scheduling before, or have a weaker form.
    pub(crate) fn leftover_threads(&self) -> &[ThreadRecord] {
        &self.leftover.threads
    }

    /// Returns the journal for changes made while the server runs.
    pub(crate) fn journal(&self) -> Journal {
        self.journal.clone()
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the socket's directory, if it is removed with the server.
    pub(crate) fn made_folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns the directory of the socket.
    pub(crate) fn directory(&self) -> &Path {
        match self.socket.parent() {
            Some(directory) if directory != Path::new("") => directory,
            _ => Path::new("."),
        }
    }
}

/// The record for the next server.
#[derive(Clone, Debug)]
pub(crate) struct Journal(Rc<RefCell<Written>>);

#[derive(Debug)]
struct Written {
    file: File,
    record: Record,
}

impl Journal {
    fn begin(file: File, made_folder: bool) -> std::io::Result<Journal> {
        let record = Record {
            made_folder,
            ..Record::default()
        };
        let journal = Journal(Rc::new(RefCell::new(Written { file, record })));
        journal.change(|_| {})?;
        Ok(journal)
    }

    pub(crate) fn record_ports(&self, ports: &str) -> std::io::Result<()> {
        self.change(|record| record.ports = Some(ports.to_owned()))
    }

    pub(crate) fn record_link(&self, device: &str, before: &str) -> std::io::Result<()> {
        self.change(|record| {
            record.links.retain(|(other, _)| other != device);
            record.links.push((device.to_owned(), before.to_owned()));
        })
    }

    /// Records all processes and threads with reserved CPU time.
    pub(crate) fn record_cpu(
        &self,
        lives: Vec<LifeRecord>,
        threads: Vec<ThreadRecord>,
    ) -> std::io::Result<()> {
        self.change(|record| (record.cpu, record.threads) = (lives, threads))
    }

    /// Written first and truncated afterwards: if the server dies in between, old lines remain, which claim too much
    /// rather than too little.
    fn change(&self, change: impl FnOnce(&mut Record)) -> std::io::Result<()> {
        let mut written = self.0.borrow_mut();
        change(&mut written.record);
        let text = written.record.text();
        written.file.write_all_at(text.as_bytes(), 0)?;
        written.file.set_len(text.len() as u64)
    }
}

impl Drop for Instance {
    /// Best effort: a file without a lock stops no server.
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        let _ = std::fs::remove_file(&self.lock_path);
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// An unreadable file counts as empty.
fn read(lock: &mut File) -> String {
    let mut text = String::new();
    lock.read_to_string(&mut text)
        .map_or_else(|_| String::new(), |_| text)
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
    fn what_others_put_in_the_locks_place_is_not_written() {
        let folder = folder("link");
        let socket = folder.join("control");
        let victim = folder.join("victim");
        std::fs::write(&victim, "kept").unwrap();
        std::os::unix::fs::symlink(&victim, lock_path(&socket)).unwrap();
        assert!(Instance::claim(&socket).is_err());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
        std::fs::remove_file(lock_path(&socket)).unwrap();
        std::fs::create_dir(lock_path(&socket)).unwrap();
        assert!(Instance::claim(&socket).is_err());
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

    #[test]
    fn what_a_dead_server_changed_is_known_to_the_next() {
        let folder = folder("record").join("made");
        let socket = folder.join("control");
        let dead = Instance::claim(&socket).unwrap();
        assert_eq!(dead.leftover_ports(), None);
        let journal = dead.journal();
        journal.record_cpu(vec![(7, 1), (8, 1)], vec![]).unwrap();
        journal.record_ports("20000-29999,40000").unwrap();
        let thread = ((10, 5), "0,0 -3 first /a group//b ".to_owned());
        journal
            .record_cpu(vec![(9, 123_456)], vec![thread.clone()])
            .unwrap();
        let text = std::fs::read_to_string(lock_path(&socket)).unwrap();
        drop(dead);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(lock_path(&socket), text).unwrap();
        let next = Instance::claim(&socket).unwrap();
        assert_eq!(next.leftover_ports(), Some("20000-29999,40000"));
        assert_eq!(next.leftover_cpu(), [(9, 123_456)]);
        assert_eq!(next.leftover_threads(), [thread]);
        drop(next);
        assert!(!folder.exists(), "the dead server had made it");
    }
}
