//! A thread that is woken when it should be, whatever else runs on the machine: a runner that is
//! late plays another script than the one that is written.

use std::fs;
use std::marker::PhantomData;

/// The best there is without real time.
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

/// While it lives, the thread that made it goes before all others that are not in real time. What it
/// starts meanwhile does not.
pub struct Prompt {
    is_prompt: bool,
    /// Of the thread that made it only.
    _thread: PhantomData<*const ()>,
}

impl Prompt {
    /// Without the right to real time the thread stays what it is.
    pub fn new() -> Prompt {
        Prompt {
            is_prompt: schedule(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1),
            _thread: PhantomData,
        }
    }
}

impl Default for Prompt {
    fn default() -> Prompt {
        Prompt::new()
    }
}

impl Drop for Prompt {
    fn drop(&mut self) {
        if self.is_prompt {
            schedule(libc::SCHED_OTHER, 0);
        }
    }
}

/// Has the kernel schedule the calling thread so. Its niceness stays.
fn schedule(policy: libc::c_int, priority: libc::c_int) -> bool {
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the call reads one sched_param; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: integers only.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn a_thread_is_prompt_for_as_long_as_it_says() {
        assert_eq!(policy(), libc::SCHED_OTHER);
        let prompt = Prompt::new();
        if prompt.is_prompt {
            assert_eq!(policy(), libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK);
            let inherited = std::thread::spawn(policy).join();
            assert_eq!(inherited.expect("it ends"), libc::SCHED_OTHER);
        }
        drop(prompt);
        let reset = libc::SCHED_RESET_ON_FORK;
        assert_eq!(policy() & !reset, libc::SCHED_OTHER);
    }
}
