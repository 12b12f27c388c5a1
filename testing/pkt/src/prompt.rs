//! Raises the priority of the runner, since a late runner does not play the script as written.

use std::fs;

/// The highest useful priority without real-time scheduling. (Twenty real-time threads that sleep and poll
/// occasionally blocked Linux 6.18 for most of a second, which is worse.)
const NICENESS: i32 = -15;

/// Gives this process and its children priority over others. Niceness compares only the processes of one
/// session (sched(7), "The autogroup feature"), so the process starts a new session. This fails for the
/// leader of a process group, which a shell makes of it.
pub fn go_first() {
    // Without the permission, the run depends on how idle the machine is.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    if rustix::process::setsid().is_ok() {
        // The kernel may be built without autogroups.
        let _ = fs::write("/proc/self/autogroup", NICENESS.to_string());
    }
}
