//! The files that the server opens once it runs, by Landlock. What it has open already stays so; netlink, BPF and sockets that
//! it connects to are not Landlock's, and capabilities and the filter of system calls limit those.

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

/// What this program knows of: older kernels do as much of it as they can.
const KNOWN: ABI = ABI::V6;

/// What may be done with a file, or with all in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    path: PathBuf,
    access: BitFlags<AccessFs>,
}

pub(super) fn rule(path: impl AsRef<Path>, access: impl Into<BitFlags<AccessFs>>) -> Rule {
    Rule {
        path: path.as_ref().to_owned(),
        access: access.into(),
    }
}

pub fn rules(config: &Config, instance: &Instance) -> Vec<Rule> {
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let writes = reads | AccessFs::WriteFile | AccessFs::Truncate;
    let keeps = writes | AccessFs::MakeReg | AccessFs::RemoveFile;
    // Folders, too.
    let shapes = keeps | AccessFs::MakeDir | AccessFs::RemoveDir;
    let mut rules = vec![
        // Who processes are, and the parameters of the namespace.
        rule("/proc", reads),
        rule("/proc/sys/net", writes),
        rule("/dev/net/tun", writes | AccessFs::IoctlDev),
        // How many processors there are, and the kernel's types, for the filters.
        rule("/sys/devices/system/cpu", reads),
        rule("/sys/kernel/btf", reads),
        rule("/etc/passwd", AccessFs::ReadFile),
        rule("/etc/group", AccessFs::ReadFile),
        // The control socket, and sockets that wake the server.
        rule(instance.directory(), shapes | AccessFs::MakeSock),
    ];
    // It makes the folder itself when it needs it, and may not by then.
    let ledger = &config.qos.cpu_ledger;
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(ledger);
    rules.push(rule(ledger, keeps));
    // Control groups are told apart, and made for reservations of CPU time.
    rules.push(rule("/sys/fs/cgroup", reads));
    rules.extend(hierarchies().map(|path| rule(path, shapes)));
    // Removed with the last server in it.
    if let Some(parent) = instance.made_folder().and_then(Path::parent) {
        rules.push(rule(parent, AccessFs::RemoveDir));
    }
    // What a panic says of where it came from.
    rules.extend(std::env::current_exe().map(|own| rule(own, AccessFs::ReadFile)));
    rules
}

/// Of the calling thread, and of all that it starts: other files cannot be opened. A path that is not there is none of this host's.
pub fn restrict(rules: &[Rule]) -> Result<RulesetStatus, RulesetError> {
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
