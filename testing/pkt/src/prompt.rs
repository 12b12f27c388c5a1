//! A runner that is late plays another script than the one that is written.

use std::fs;

/// The best there is without real time. (Twenty real-time threads that sleep and poll made a
/// Linux 6.18 stand still for most of a second now and then, which is worse.)
const NICENESS: i32 = -15;

/// This process and what it starts go before others. Niceness compares only the processes of one
/// session (sched(7), "The autogroup feature"), so it takes a session of its own, which it cannot if
/// a shell made it the leader of a group.
pub fn go_first() {
    // Without the right to it a run is as prompt as the machine is idle.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    if rustix::process::setsid().is_ok() {
        // The kernel may have no such groups.
        let _ = fs::write("/proc/self/autogroup", NICENESS.to_string());
    }
}
