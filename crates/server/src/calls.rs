//! Calls that may block on a lock that others hold (that of a socket shared with a program, or rtnl). Threads of the
//! requesting user make them; the server continues with the result, and replies then.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use portolan_control::{ClientId, Errno};
use portolan_sys::tap::{self, Tap};
use portolan_sys::wait::EventNotifier;
use tracing::warn;

use crate::requests::Answer;
use crate::server::Server;
use crate::user_threads::{UserThreads, WaitsFor};

/// Maximum of queued calls of one user for each kind; more than a user may have programs.
const WAITING_MAX: usize = 256;

/// Continuation of a call, run by the main thread. The objects of the call may no longer exist.
pub(crate) type Sequel = Box<dyn FnOnce(&mut Server) -> Result<Answer, Errno> + Send>;

/// A call that may block.
pub(crate) struct Call {
    pub uid: u32,
    pub waits_for: WaitsFor,
    pub make: Box<dyn FnOnce() -> Sequel + Send>,
}

/// The control connection and the request that caused a call.
pub(crate) type RequestId = (ClientId, u32);

#[derive(Debug)]
pub(crate) struct Calls {
    threads: Arc<UserThreads>,
    tell: Sender<Made>,
    told: Receiver<Made>,
    pub notifier: Arc<EventNotifier>,
}

/// A completed call.
struct Made {
    request: Option<RequestId>,
    sequel: Sequel,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "for {:?}", self.request)
    }
}

impl Calls {
    pub(crate) fn new(threads: Arc<UserThreads>) -> Result<Calls, rustix::io::Errno> {
        let (tell, told) = mpsc::channel();
        let notifier = Arc::new(EventNotifier::new()?);
        Ok(Calls {
            threads,
            tell,
            told,
            notifier,
        })
    }

    /// Checks that the user may queue one more call.
    ///
    /// # Errors
    /// `EAGAIN` above the maximum.
    pub(crate) fn check(&self, uid: u32, waits_for: WaitsFor) -> Result<(), Errno> {
        if self.threads.waiting(Some(uid), waits_for) < WAITING_MAX {
            Ok(())
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// Limits the bytes queued in a tap; asynchronous, in the order of the calls.
    pub(crate) fn bound_tap(&self, tap: &Tap, bytes: u32) {
        let Ok(tap) = tap.fd.try_clone() else {
            return warn!("no descriptor is left to bound what waits in a tap");
        };
        let job = move || {
            if let Err(errno) = tap::set_send_buffer(tap, bytes) {
                warn!(%errno, "cannot bound what waits in a tap");
            }
        };
        self.threads.add(None, WaitsFor::Network, Box::new(job));
    }

    pub(crate) fn begin(&self, request: Option<RequestId>, call: Call) {
        let Call {
            uid,
            waits_for,
            make,
        } = call;
        let (tell, notifier) = (self.tell.clone(), Arc::clone(&self.notifier));
        let job = move || {
            // The client is told even if the call panics.
            let sequel = catch_unwind(AssertUnwindSafe(make))
                .unwrap_or_else(|_| Box::new(|_: &mut Server| Err(Errno::IO)));
            // Fails only when the server ends.
            let _ = tell.send(Made { request, sequel });
            notifier.notify();
        };
        self.threads.add(Some(uid), waits_for, Box::new(job));
    }
}

impl Server {
    /// Handles completed calls.
    pub(crate) fn on_calls(&mut self) {
        self.calls.notifier.drain();
        let made: Vec<Made> = self.calls.told.try_iter().collect();
        for Made { request, sequel } in made {
            let answer = sequel(self);
            match (request, answer) {
                (Some(request), answer) => self.answer(request, answer),
                (None, Ok(Answer::Call(call))) => self.calls.begin(None, call),
                (None, _) => {}
            }
        }
    }
}
