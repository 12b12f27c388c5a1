//! Calls that wait if they cannot complete at once.

use std::sync::Arc;
use std::time::Duration;

use portolan_stack::Wire;
use portolan_sys::clock;
use portolan_types::Instant;
use rustix::io::Errno;

use super::watching::Watching;
use crate::outcome::{CallError, Outcome};
use crate::process::{CoreGuard, Process};
use crate::runtime::Core;
use crate::socket::options::Options;
use crate::socket::{Socket, SocketPhase};
use crate::threads::sleep::{Sleep, Woken, deadline_after, restarts};

/// A data call on a socket whose session is here.
pub(super) struct Call<'a> {
    pub(super) process: &'static Process,
    pub(super) socket: &'a Arc<Socket>,
    /// As given by the application, including `MSG_DONTWAIT`.
    pub(super) flags: i32,
    /// Which of the socket's time-outs applies.
    pub(super) timeout: fn(&Options) -> Option<Duration>,
}

impl Call<'_> {
    pub(super) fn never_waits(&self) -> bool {
        self.socket.is_nonblocking() || self.flags & libc::MSG_DONTWAIT != 0
    }

    /// Locks for [`Call::complete`]. Fails if the call must not wait and would receive nothing.
    pub(super) fn lock_to_receive(&self) -> Outcome<CoreGuard<'static>> {
        let mut core = self.process.lock();
        if self.never_waits() && core.has_nothing_for(self.socket) {
            Err(Errno::AGAIN.into())
        } else {
            Ok(core)
        }
    }

    /// Makes attempts until one gives a result, the first after polling. If the call must not wait
    /// any longer, it returns what was done `so_far`, if anything.
    pub(super) fn complete<T>(
        &self,
        mut core: CoreGuard<'_>,
        mut attempt: impl FnMut(&mut Core, Instant) -> Option<Outcome<T>>,
        so_far: impl Fn() -> Option<T>,
    ) -> Outcome<T> {
        let mut attempt = |core: &mut Core, now: Instant| loop {
            let result = attempt(core, now);
            if result.is_none() {
                core.stack.settle_acknowledgements();
            }
            let was_full = core.channel.is_full();
            core.poll_tx(now);
            // If the session's transmit queue has got room since the attempt, nothing else would wake this thread.
            let Core { stack, channel, .. } = &mut *core;
            if result.is_some() || !was_full || !stack.has_room(self.socket.slot(), channel) {
                return result;
            }
        };
        let now = clock::now();
        if !core.is_local(self.socket.slot()) {
            core.poll_rx(now);
        }
        let first = attempt(&mut core, now);
        drop(core);
        if let Some(result) = first {
            return result;
        }
        if self.never_waits() {
            return so_far().ok_or(Errno::AGAIN.into());
        }
        let timeout = (self.timeout)(&self.socket.options());
        let deadline = deadline_after(timeout);
        let _watching = Watching::new(vec![self.socket]);
        let begins_again = || so_far().is_none();
        loop {
            let sleep = Sleep {
                begins_again: Some(&begins_again),
                ..Sleep::until(deadline)
            };
            return match self.process.wait(sleep, &mut attempt) {
                Ok(Woken::Ready(result)) => result,
                Ok(Woken::TimedOut | Woken::Kernel) => so_far().ok_or(Errno::AGAIN.into()),
                Err(Errno::INTR) if so_far().is_none() && restarts(deadline) => continue,
                Err(errno) => so_far().ok_or(errno.into()),
            };
        }
    }
}

/// Result of a call whose session has left this process: to be relayed by the server, or because it was closed.
pub(super) fn gone<T>(socket: &Socket) -> Outcome<T> {
    match socket.phase() {
        SocketPhase::Relayed => Err(CallError::NotOurs),
        SocketPhase::HeldElsewhere => Err(CallError::Moved),
        _ => Err(socket.take_error().unwrap_or(Errno::NOTCONN).into()),
    }
}
