//! The file of standing guarantees: a line with the version, then one JSON object per line.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use portolan_sys::namespace::beside;
use rustix::fs::OFlags;
use tracing::warn;

use super::Granted;

/// The first line begins with this, and ends with the identity of the network namespace. Other versions are not read.
const VERSION: &str = "portolan guarantees 1 ";

/// More than all guarantees of a server take.
const LENGTH_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    /// The identity of the network namespace.
    namespace: String,
}

impl RecordFile {
    /// Of the server with this control socket, in this network namespace.
    pub(super) fn beside(socket: &Path, namespace: &str) -> RecordFile {
        RecordFile {
            path: beside(socket, ".guarantees"),
            namespace: namespace.to_owned(),
        }
    }

    /// Returns what it contains; nothing if there is none, or it was a server's whose namespace is gone. What this program
    /// does not understand is skipped: the file may be another version's.
    pub(super) fn read(&self) -> io::Result<Vec<Granted>> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits() as i32)
            .open(&self.path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        check_owner(&file)?;
        let mut text = String::new();
        file.take(LENGTH_MAX).read_to_string(&mut text)?;
        let mut lines = text.lines();
        match lines.next().and_then(|head| head.strip_prefix(VERSION)) {
            Some(namespace) if namespace == self.namespace => Ok(lines.filter_map(parse).collect()),
            Some(_) => Ok(Vec::new()),
            None => Err(io::Error::other("the record has another version")),
        }
    }

    /// Replaces the content, completely or not at all; removes the file if there is nothing to record.
    pub(super) fn write<'a>(&self, granted: impl Iterator<Item = &'a Granted>) -> io::Result<()> {
        let mut granted = granted.peekable();
        if granted.peek().is_none() {
            return remove(&self.path);
        }
        let new = beside(&self.path, ".new");
        remove(&new)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        let mut writer = BufWriter::new(file);
        writeln!(writer, "{VERSION}{}", self.namespace)?;
        for granted in granted {
            serde_json::to_writer(&mut writer, granted)?;
            writeln!(writer)?;
        }
        writer.flush()?;
        fs::rename(&new, &self.path)
    }
}

fn parse(line: &str) -> Option<Granted> {
    let parsed = serde_json::from_str(line);
    parsed
        .inspect_err(|error| warn!(%error, "a guarantee of the previous server is lost"))
        .ok()
}

/// In a directory that others can write to, somebody else may have put a file in its place.
fn check_owner(file: &File) -> io::Result<()> {
    let metadata = file.metadata()?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    if is_own && metadata.is_file() && metadata.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(io::Error::other("others could have written the record"))
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
