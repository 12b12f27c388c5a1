//! What the server gives up before it hears anybody: capabilities that it has no use for, files that are not its own, and
//! system calls that it never makes. Whoever takes it over by a defect has no other program run, attaches to no process, reads
//! no file of others, and changes neither mounts, users, modules nor the clock.

mod calls;
mod files;

use landlock::AccessFs;
use portolan_sys::capability::Capability;
use portolan_sys::refused_calls;
use tracing::{info, warn};

use crate::config::{Config, ConfigSource};
use crate::instance::Instance;

/// Why the server stays as it was in a part.
#[derive(Debug, thiserror::Error)]
enum ConfineError {
    #[error("cannot give up capabilities: {0}")]
    Capabilities(rustix::io::Errno),
    #[error("cannot restrict files: {0}")]
    Files(#[from] landlock::RulesetError),
    #[error("cannot handle refused system calls: {0}")]
    Handler(rustix::io::Errno),
    #[error("cannot filter system calls: {0}")]
    Filter(String),
}

/// Of the calling thread, and of all that it starts. What the kernel does not have is missing, and said.
pub fn confine(config: &Config, source: &ConfigSource, instance: &Instance) {
    let parts = [
        Capability::renounce_others().map_err(ConfineError::Capabilities),
        restrict_files(config, source, instance),
        filter_calls(),
    ];
    for error in parts.into_iter().filter_map(Result::err) {
        warn!(%error, "the server is not confined");
    }
}

fn restrict_files(
    config: &Config,
    source: &ConfigSource,
    instance: &Instance,
) -> Result<(), ConfineError> {
    let mut rules = files::rules(config, instance);
    // Read again by SIGHUP. One that takes its place is read by `portolan reload`.
    let file = source.file.iter();
    rules.extend(file.map(|file| files::rule(file, AccessFs::ReadFile)));
    match files::restrict(&rules)? {
        landlock::RulesetStatus::FullyEnforced => {}
        status => info!(?status, "files are not restricted in full"),
    }
    Ok(())
}

fn filter_calls() -> Result<(), ConfineError> {
    refused_calls::handle().map_err(ConfineError::Handler)?;
    calls::filter().map_err(ConfineError::Filter)
}

/// Tells of calls that were refused since: a part of the server lacks them, or somebody has taken it over.
#[derive(Debug, Default)]
pub struct RefusedCalls {
    told: u64,
}

impl RefusedCalls {
    /// How many there were.
    pub fn look(&mut self) -> u64 {
        let (count, last) = refused_calls::so_far();
        if count > self.told {
            self.told = count;
            warn!(
                count,
                call = last,
                "system calls of the server were refused"
            );
        }
        count
    }
}

#[cfg(test)]
mod tests;
