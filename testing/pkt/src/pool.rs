//! Plays scripts on several beds in parallel, since scripts mostly wait.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::bed::{Bed, Stack};
use crate::run::{Failure, Setting, play};
use crate::script::{Action, Family, LoadError, Script, load};

/// One script over one IP version.
#[derive(Clone, Debug)]
pub struct Job {
    /// `topic/name`, followed by ` v6` for the IPv6 run of a script that runs over both versions.
    pub name: String,
    pub script: Script,
    pub family: Family,
}

pub struct Played {
    pub name: String,
    pub took: Duration,
    pub result: Result<(), Box<Failure>>,
}

/// Returns the jobs of a script.
pub fn jobs(path: &Path) -> Result<Vec<Job>, LoadError> {
    let script = load(path)?;
    let topic = path.parent().and_then(Path::file_name).unwrap_or_default();
    let stem = path.file_stem().unwrap_or_default();
    let name = format!("{}/{}", topic.to_string_lossy(), stem.to_string_lossy());
    let job = |family: &Family| Job {
        name: match family {
            Family::V6 if script.families.len() > 1 => format!("{name} v6"),
            _ => name.clone(),
        },
        script: script.clone(),
        family: *family,
    };
    Ok(script.families.iter().map(job).collect())
}

/// Returns all scripts in a folder and its subfolders, in order.
pub fn scripts(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "pkt") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Plays all jobs on `beds` beds of one stack, the longest first.
pub fn play_all(mut jobs: Vec<Job>, stack: Stack, beds: usize) -> Vec<Played> {
    jobs.sort_by_key(|job| std::cmp::Reverse(least(&job.script)));
    let beds = beds.min(jobs.len()).max(1);
    let queue = Mutex::new(VecDeque::from(jobs));
    let played = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..beds {
            scope.spawn(|| {
                let bed = Bed::new(stack);
                let mut number = 0;
                // Not `while let`, which would keep the queue locked while the job is played.
                loop {
                    let next = locked(&queue).pop_front();
                    let Some(job) = next else {
                        break;
                    };
                    let one = play_one(&job, &bed, &mut number);
                    locked(&played).push(one);
                }
            });
        }
    });
    let mut played = played.into_inner().unwrap_or_else(PoisonError::into_inner);
    played.sort_by(|a: &Played, b| a.name.cmp(&b.name));
    played
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Plays one script once, without retries.
fn play_one(job: &Job, bed: &Bed, number: &mut u16) -> Played {
    let start = Instant::now();
    *number += 1;
    let setting = Setting {
        family: job.family,
        number: *number,
    };
    let result = play(&job.script, bed, setting);
    Played {
        name: job.name.clone(),
        took: start.elapsed(),
        result,
    }
}

/// Returns the minimum duration of a script.
fn least(script: &Script) -> Duration {
    let times = script.steps.iter().map(|step| match step.action {
        Action::Quiet(length) => length,
        _ => step.time.earliest,
    });
    times.sum()
}
