//! The files that the running server may open, by Landlock. Files already open stay so; netlink, BPF and connected
//! sockets are outside Landlock and limited by capabilities and the system call filter.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope,
};
use portolan_sys::sched::hierarchies;

use crate::config::Config;
use crate::instance::Instance;

/// The newest ABI that this program uses; older kernels apply what they support of it.
const KNOWN: ABI = ABI::V6;

/// Access to a file, or to everything in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    path: PathBuf,
    access: BitFlags<AccessFs>,
}

pub(super) fn rule(path: impl AsRef<Path>, access: impl Into<BitFlags<AccessFs>>) -> Rule {
    Rule {
        path: path.as_ref().to_owned(),
        access: access.into(),
    }
}

pub(super) fn rules(config: &Config, instance: &Instance) -> Vec<Rule> {
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let writes = reads | AccessFs::WriteFile | AccessFs::Truncate;
    let keeps = writes | AccessFs::MakeReg | AccessFs::RemoveFile;
    // Directories, too.
    let shapes = keeps | AccessFs::MakeDir | AccessFs::RemoveDir;
    let mut rules = vec![
        // Credentials of processes, and the parameters of the namespace.
        rule("/proc", reads),
        rule("/proc/sys/net", writes),
        rule("/dev/net/tun", writes | AccessFs::IoctlDev),
        // The number of processors, and the kernel's types for the filters.
        rule("/sys/devices/system/cpu", reads),
        rule("/sys/kernel/btf", reads),
        rule("/etc/passwd", AccessFs::ReadFile),
        rule("/etc/group", AccessFs::ReadFile),
        // The control socket, and sockets that wake the server.
        rule(instance.directory(), shapes | AccessFs::MakeSock),
    ];
    // Created now, since it could not be created on demand later.
    let ledger = &config.qos.cpu_ledger;
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(ledger);
    rules.push(rule(ledger, keeps));
    // Control groups are identified, and created for CPU reservations.
    rules.push(rule("/sys/fs/cgroup", reads));
    rules.extend(hierarchies().map(|path| rule(path, shapes)));
    // Removed with the last server in it.
    if let Some(parent) = instance.made_folder().and_then(Path::parent) {
        rules.push(rule(parent, AccessFs::RemoveDir));
    }
    // For the backtrace of a panic.
    rules.extend(std::env::current_exe().map(|own| rule(own, AccessFs::ReadFile)));
    rules
}

/// Confines the calling thread and all that it starts to these files. Paths that do not exist on this host are skipped.
pub(super) fn restrict(rules: &[Rule]) -> Result<RulesetStatus, RulesetError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .scope(Scope::Signal)?
        .create()?;
    for Rule { path, access } in rules {
        let Ok(opened) = PathFd::new(path) else {
            continue;
        };
        let access = if path.is_dir() {
            *access
        } else {
            *access & AccessFs::from_file(KNOWN)
        };
        ruleset = ruleset.add_rule(PathBeneath::new(opened, access))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}
