//! Programs with two hosts of sockets in them: libc for the sockets, and system calls of their own for waiting (rustix,
//! and with it smol and async-io). The library does not see such a wait, and the kernel does not know of data for a
//! session that is here: the program would sleep forever.
//!
//! The background thread detects sockets with unread data that no thread waits for here. If an epoll set unknown to the
//! library contains the descriptor, or a thread sleeps in a `poll` or `select` of the program's own that names it, the
//! program waits there. From then on the server relays its streams, so that the kernel knows of their events, datagram
//! sockets and new sockets become the kernel's, and the program's standard error reports it once.

use std::collections::HashMap;
use std::fs;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use portolan_sys::{clock, descriptor, sleeps};
use portolan_types::{Instant, Protocol};

use crate::descriptors;
use crate::migration::before_lending;
use crate::migration::fallback::become_kernels;
use crate::process::Process;
use crate::runtime::Core;
use crate::socket::table;
use crate::socket::{Socket, SocketPhase};
use crate::wait::events::IN;

/// Delay of the first check for such waits, and minimum between two.
const SHORTEST: Duration = Duration::from_millis(20);
/// Maximum delay, for a program that was checked repeatedly without result.
const LONGEST: Duration = Duration::from_secs(30);

/// The schedule of checks.
pub(crate) struct Schedule {
    next: Instant,
    pause: Duration,
    /// A check is due, even if nothing else happens.
    is_due: bool,
}

impl Schedule {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.is_due.then_some(self.next)
    }
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule {
            next: Instant::ZERO,
            pause: SHORTEST,
            is_due: false,
        }
    }
}

/// A registration in an epoll set that is not ours.
#[derive(Clone, Copy)]
struct Registration {
    set: RawFd,
    event: libc::epoll_event,
}

impl Process {
    /// Called by the background thread from time to time: hands over sockets whose events the program awaits by such
    /// waits.
    pub(crate) fn check_for_unseen_waits(&'static self, schedule: &mut Schedule) {
        let now = clock::now();
        if now < schedule.next {
            schedule.is_due = true;
            return;
        }
        let neglected = self.lock().neglected();
        // A check before the program has registered the socket finds nothing.
        schedule.is_due = !neglected.is_empty();
        if neglected.is_empty() {
            return;
        }
        schedule.next = now + schedule.pause;
        schedule.pause = (schedule.pause * 2).min(LONGEST);
        let mut awaited = registered_elsewhere();
        for fd in sleeps::polled_past_library() {
            awaited.entry(fd).or_default();
        }
        if !neglected.iter().any(|(fd, _)| awaited.contains_key(fd)) {
            return;
        }
        if !Socket::note_unseen_waits() {
            say_so();
        }
        schedule.pause = SHORTEST;
        for (fd, socket) in table::sockets() {
            if let Some(registrations) = awaited.get(&fd) {
                hand_over(fd, &socket, registrations);
            }
        }
    }
}

fn hand_over(fd: RawFd, socket: &Arc<Socket>, registrations: &[Registration]) {
    before_lending(fd, Process::running);
    if socket.protocol == Protocol::Udp {
        become_kernels(fd, socket);
        // The number now refers to another file, which the sets do not know.
        for Registration { set, event } in registrations {
            // The program may have closed or changed the set.
            let _ = descriptor::epoll_control(*set, libc::EPOLL_CTL_ADD, fd, Some(*event));
        }
    }
}

impl Core {
    /// Returns sockets with unread data that no thread waits for here.
    fn neglected(&mut self) -> Vec<(RawFd, Arc<Socket>)> {
        let candidates: Vec<_> = self
            .sockets()
            .filter(|socket| socket.phase() == SocketPhase::Cached && !socket.is_watched())
            .cloned()
            .collect();
        let readable = |socket: &Arc<Socket>| self.readiness(socket) & IN != 0;
        let readable: Vec<_> = candidates.into_iter().filter(readable).collect();
        readable
            .into_iter()
            .filter_map(|socket| Some((*table::numbers_of(&socket).first()?, socket)))
            .collect()
    }
}

/// Returns the members of all epoll sets of the process that the library does not know.
fn registered_elsewhere() -> HashMap<RawFd, Vec<Registration>> {
    let mut registered: HashMap<RawFd, Vec<Registration>> = HashMap::new();
    for set in descriptor::all_open() {
        if descriptors::is_ours(set) || descriptors::is_internal(set) {
            continue;
        }
        let Ok(kind) = fs::read_link(format!("/proc/self/fd/{set}")) else {
            continue;
        };
        if kind.as_os_str() != "anon_inode:[eventpoll]" {
            continue;
        }
        let members = fs::read_to_string(format!("/proc/self/fdinfo/{set}")).unwrap_or_default();
        for (fd, event) in members.lines().filter_map(member) {
            let registration = Registration { set, event };
            registered.entry(fd).or_default().push(registration);
        }
    }
    registered
}

/// Parses a line like `tfd:       19 events:       1d data: 7f001  pos:0 ino:61ac sdev:9` (proc_pid_fdinfo(5)).
fn member(line: &str) -> Option<(RawFd, libc::epoll_event)> {
    let mut words = line.split_whitespace();
    let mut after = |name: &str| {
        words.find(|word| *word == name)?;
        words.next()
    };
    let fd = after("tfd:")?.parse().ok()?;
    let events = u32::from_str_radix(after("events:")?, 16).ok()?;
    let data = u64::from_str_radix(after("data:")?, 16).ok()?;
    Some((fd, libc::epoll_event { events, u64: data }))
}

fn say_so() {
    let line = "portolan: the program waits for sockets by system calls of its own: its connections \
                go through the server, and new sockets are the kernel's\n";
    // There is no place to report that the warning could not be written.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_as_the_kernel_writes_them() {
        let line = "tfd:       19 events: 4000001d data:     7f0013dc  pos:0 ino:61ac sdev:9";
        let (fd, event) = member(line).expect("a member");
        let (events, data) = (event.events, event.u64);
        assert_eq!((fd, events, data), (19, 0x4000_001d, 0x7f00_13dc));
        for line in [
            "pos:\t0",
            "",
            "tfd: x events: 1 data: 1",
            "tfd: 3 events: 1",
        ] {
            assert!(member(line).is_none(), "{line}");
        }
    }
}
