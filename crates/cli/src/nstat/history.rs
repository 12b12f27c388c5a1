//! The values of the last call, in a file that the user owns.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};

use crate::exit::Failure;

/// Upper bound of the file's size; a larger file is not ours.
const LARGEST: u64 = 1 << 20;

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct History {
    /// Identifies the server: a different one counts from zero.
    server: String,
    /// Time of the last call in milliseconds since 1970; None if there was none.
    at: Option<u64>,
    counters: BTreeMap<String, u64>,
}

impl History {
    pub(super) fn of(server: String, counters: BTreeMap<String, u64>) -> History {
        History {
            server,
            at: Some(now()),
            counters,
        }
    }

    /// Reads the values of the last call. They are empty if there was none, or if it asked another server.
    pub(super) fn read(server: &str) -> History {
        let known = History::load(&path()).unwrap_or_default();
        if known.server == server {
            known
        } else {
            History::default()
        }
    }

    fn load(path: &Path) -> anyhow::Result<History> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(open(path, flags, Mode::empty())?);
        ensure_own(&file)?;
        let mut text = String::new();
        file.take(LARGEST).read_to_string(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Seconds since the last call.
    pub(super) fn age(&self) -> Option<f64> {
        Some(now().saturating_sub(self.at?) as f64 / 1e3)
    }

    pub(super) fn since(&self, now: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let since = |(name, value): (&String, &u64)| {
            let before = self.counters.get(name).copied().unwrap_or(0);
            (name.clone(), value.checked_sub(before).unwrap_or(*value))
        };
        now.iter().map(since).collect()
    }

    pub(super) fn write(&self) -> Result<(), Failure> {
        let path = path();
        self.store(&path)
            .with_context(|| path.display().to_string())?;
        Ok(())
    }

    fn store(&self, path: &Path) -> anyhow::Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let mut file = File::from(open(path, flags, Mode::RUSR | Mode::WUSR)?);
        ensure_own(&file)?;
        file.set_len(0)?;
        file.write_all(serde_json::to_string(self)?.as_bytes())?;
        Ok(())
    }
}

/// Refuses a file of another user, or one that is not a regular file.
fn ensure_own(file: &File) -> anyhow::Result<()> {
    let metadata = file.metadata()?;
    let is_own = metadata.is_file() && metadata.uid() == rustix::process::geteuid().as_raw();
    ensure!(is_own, "not a file of this user");
    Ok(())
}

fn path() -> PathBuf {
    if let Some(path) = std::env::var_os("PORTOLAN_NSTAT_HISTORY") {
        return path.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(directory) if fs::metadata(&directory).is_ok() => directory.join("portolan-nstat"),
        _ => {
            let user = rustix::process::geteuid().as_raw();
            format!("/tmp/.portolan-nstat.u{user}").into()
        }
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(value: u64) -> BTreeMap<String, u64> {
        BTreeMap::from([("TcpOutRsts".to_owned(), value)])
    }

    #[test]
    fn a_call_shows_what_happened_since_the_last_one() {
        let history = History::of("server".into(), counters(5));
        assert_eq!(history.since(&counters(8)), counters(3));
        assert_eq!(history.since(&counters(2)), counters(2), "it began anew");
        assert_eq!(History::default().since(&counters(8)), counters(8));
    }

    #[test]
    fn what_is_written_is_read_and_links_are_not_followed() {
        let directory =
            std::env::temp_dir().join(format!("portolan-history-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (path, link) = (directory.join("history"), directory.join("link"));
        let history = History::of("server".into(), counters(5));
        history.store(&path).unwrap();
        assert_eq!(History::load(&path).unwrap(), history);
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(history.store(&link).is_err());
        assert!(History::load(&link).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }
}
