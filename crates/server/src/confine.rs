//! What the server gives up before it hears anybody: capabilities that it has no use for, and system calls that it never
//! makes. Whoever takes it over by a defect has no other program run, attaches to no process, and changes neither mounts,
//! users, modules nor the clock.

use std::collections::BTreeMap;

use portolan_sys::capability::Capability;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// What fails with EPERM from then on.
const NEVER_MADE: &[i64] = &[
    // Other programs, and what is in them.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    // Users.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    // Where files are.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_acct,
    // Namespaces: it stays in the one that it is started in.
    libc::SYS_setns,
    libc::SYS_unshare,
    // The kernel itself, and the machine.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_personality,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    // Of much use to attackers, of none here.
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_vmsplice,
];

/// Why the server stays as it was.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("cannot give up capabilities: {0}")]
    Capabilities(rustix::io::Errno),
    #[error("cannot filter system calls: {0}")]
    Filter(String),
}

/// Of the calling thread, and of all that it starts.
pub fn confine() -> Result<(), ConfineError> {
    Capability::renounce_others().map_err(ConfineError::Capabilities)?;
    let program = filter().map_err(ConfineError::Filter)?;
    // Sets no_new_privs.
    seccompiler::apply_filter(&program).map_err(|error| ConfineError::Filter(error.to_string()))
}

fn filter() -> Result<BpfProgram, String> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(|e| e.to_string())?;
    let always = Vec::new;
    let rules: BTreeMap<_, _> = NEVER_MADE.iter().map(|call| (*call, always())).collect();
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, architecture);
    BpfProgram::try_from(filter.map_err(|e| e.to_string())?).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn who_is_confined_runs_no_program_and_is_no_other_user() {
        std::thread::spawn(|| {
            Command::new("true").status().expect("it may at first");
            confine().unwrap();
            assert!(Command::new("true").status().is_err());
            let user = Some(rustix::process::Uid::from_raw(65_534));
            let changed = rustix::thread::set_thread_res_uid(user, user, user);
            assert_eq!(changed, Err(rustix::io::Errno::PERM));
            // And so is what it starts.
            let started = std::thread::spawn(|| Command::new("true").status().is_err());
            assert!(started.join().unwrap());
        })
        .join()
        .unwrap();
    }
}
