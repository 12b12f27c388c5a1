//! What the server gives up before it serves anyone: unneeded capabilities, files not its own, and system calls that it
//! never makes. An attacker who takes it over cannot run another program, attach to a process, read files of others, or
//! change mounts, users, modules or the clock.

mod calls;
mod files;

use landlock::AccessFs;
use portolan_sys::capability::Capability;
use portolan_sys::refused_calls;
use tracing::{info, warn};

use crate::config::{Config, ConfigSource};
use crate::instance::Instance;

/// Why a part of the confinement failed.
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

/// Confines the calling thread and all threads that it starts. Parts that the kernel does not support are skipped with
/// a warning.
pub(crate) fn confine(config: &Config, source: &ConfigSource, instance: &Instance) {
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
    // Read again on SIGHUP. A file that replaces it is read by `portolan reload`.
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

/// Reports refused system calls: the server needs a call that is not listed, or was taken over.
#[derive(Debug, Default)]
pub(crate) struct RefusedCalls {
    told: u64,
}

impl RefusedCalls {
    /// Logs new refusals. Returns their total number.
    pub(crate) fn look(&mut self) -> u64 {
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
