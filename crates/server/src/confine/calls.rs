//! The system calls that the server makes. All others fail with EPERM and are counted: a call missing here costs one
//! function, not the server.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// Allowed with any arguments.
const MADE: &[i64] = &[
    // Files and descriptors.
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_write,
    libc::SYS_writev,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Sockets.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // The packet filters, and the verification of extensions.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // To watch for the exit of programs.
    libc::SYS_pidfd_open,
    // Threads, and signals to them.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    // Scheduling: reservations of CPU time, also for programs.
    libc::SYS_getpriority,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_setpriority,
    // Own identity, time, limits, random bytes. Capabilities can only be reduced.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_nanosleep,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// Old forms of some calls, which libc still makes.
#[cfg(target_arch = "x86_64")]
const MADE_BY_OLD_NAMES: &[i64] = &[
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_getrlimit,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rmdir,
    libc::SYS_setrlimit,
    libc::SYS_stat,
    libc::SYS_unlink,
    libc::SYS_rename,
];

#[cfg(not(target_arch = "x86_64"))]
const MADE_BY_OLD_NAMES: &[i64] = &[];

/// Address families in use.
const FAMILIES: [i32; 5] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
    libc::AF_PACKET,
];

/// Flags that create namespaces.
const NEW_NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Filters the calling thread and all that it starts. Sets no_new_privs.
pub(super) fn filter() -> Result<(), String> {
    for program in programs().map_err(|error| error.to_string())? {
        seccompiler::apply_filter(&program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The kernel evaluates all filters, and applies the most severe result.
fn programs() -> Result<[BpfProgram; 3], seccompiler::BackendError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let fails = |errno: i32| SeccompAction::Errno(errno.cast_unsigned());
    let filter = |rules, others, those| -> Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(rules, others, those, architecture)?.try_into()
    };
    // The flags are in memory, which no filter can read: libc falls back to `clone`.
    let newest = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok([
        filter(newest, SeccompAction::Allow, fails(libc::ENOSYS))?,
        // libc makes these with all signals blocked, and a trapped call would end the server.
        filter(processes()?, SeccompAction::Allow, fails(libc::EPERM))?,
        filter(made()?, SeccompAction::Trap, SeccompAction::Allow)?,
    ])
}

/// Calls that would make another process.
fn processes() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let thread = Op::MaskedEq(u64::from(libc::CLONE_THREAD.cast_unsigned()));
    let mut rules = BTreeMap::from([(libc::SYS_clone, vec![if_argument(0, thread, 0)?])]);
    #[cfg(target_arch = "x86_64")]
    rules.extend([(libc::SYS_fork, Vec::new()), (libc::SYS_vfork, Vec::new())]);
    Ok(rules)
}

fn made() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let all = MADE.iter().chain(MADE_BY_OLD_NAMES);
    let mut rules: BTreeMap<_, _> = all.map(|call| (*call, Vec::new())).collect();
    let families = FAMILIES
        .iter()
        .map(|family| if_argument(0, Op::Eq, *family));
    rules.insert(libc::SYS_socket, families.collect::<Result<_, _>>()?);
    // Filtered separately, by the filter of processes.
    rules.extend(processes()?.into_keys().map(|call| (call, Vec::new())));
    let namespaces = Op::MaskedEq(u64::from(NEW_NAMESPACES.cast_unsigned()));
    rules.insert(libc::SYS_clone, vec![if_argument(0, namespaces, 0)?]);
    // No executable memory is added to the program's.
    let executable = Op::MaskedEq(u64::from(libc::PROT_EXEC.cast_unsigned()));
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![if_argument(2, executable.clone(), 0)?]);
    }
    Ok(rules)
}

fn if_argument(number: u8, op: Op, value: i32) -> Result<SeccompRule, seccompiler::BackendError> {
    let value = u64::from(value.cast_unsigned());
    SeccompRule::new(vec![SeccompCondition::new(
        number,
        Length::Dword,
        op,
        value,
    )?])
}
