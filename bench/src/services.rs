//! Services that need more than a command line: databases and a mail server, with the set-up of their data. Benchmarks and the program
//! tests start them on a [`Bed`](crate::bed::Bed).

pub mod dovecot;
pub mod mariadb;
pub mod postgres;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::MeasureError;

/// How long a service may take from its start to its first answer.
const READY_LIMIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(50);

/// Repeats `attempt` until it succeeds. Returns its last error if that takes too long.
fn retry<T, E>(mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(_) if start.elapsed() < READY_LIMIT => std::thread::sleep(POLL),
            outcome => return outcome,
        }
    }
}

/// Makes a directory of data by `fill`, unless it exists. One whose `fill` failed is removed.
pub(crate) fn fill_once(
    directory: &Path,
    fill: impl FnOnce(&Path) -> Result<(), MeasureError>,
) -> Result<(), MeasureError> {
    if directory.exists() {
        return Ok(());
    }
    let made = fs::create_dir_all(directory).map_err(|source| file_error(directory, source));
    let filled = made.and_then(|()| fill(directory));
    if filled.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(directory);
    }
    filled
}

pub(crate) fn file_error(path: &Path, source: std::io::Error) -> MeasureError {
    MeasureError::File {
        path: path.display().to_string(),
        source,
    }
}
