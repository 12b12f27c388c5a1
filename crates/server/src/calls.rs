//! Calls that may wait for what somebody else holds – the lock of a socket that a program has too, that of the network's
//! configuration – are made by threads of the user for whom they are made. The server goes on with what follows from a call
//! when it has been made, and answers then.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use portolan_control::{ClientId, Errno};
use portolan_sys::tap::{self, Tap};
use portolan_sys::wait::EventNotifier;
use tracing::warn;

use crate::requests::Answer;
use crate::server::Server;
use crate::user_threads::{UserThreads, WaitsFor};

/// Calls of a user that may wait for one of his threads, of each kind: more than a user has programs.
const WAITING_MAX: usize = 256;

/// What follows from a call. What it was about may be gone by now.
pub type Sequel = Box<dyn FnOnce(&mut Server) -> Result<Answer, Errno> + Send>;

/// A call that may wait.
pub struct Call {
    pub uid: u32,
    pub waits_for: WaitsFor,
    pub make: Box<dyn FnOnce() -> Sequel + Send>,
}

/// A connection, and the request that a call is made for.
pub type Asker = (ClientId, u32);

#[derive(Debug)]
pub struct Calls {
    threads: Arc<UserThreads>,
    tell: Sender<Made>,
    told: Receiver<Made>,
    pub notifier: Arc<EventNotifier>,
}

/// A call that has been made.
struct Made {
    asker: Option<Asker>,
    sequel: Sequel,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "for {:?}", self.asker)
    }
}

impl Calls {
    pub fn new(threads: Arc<UserThreads>) -> Result<Calls, rustix::io::Errno> {
        let (tell, told) = mpsc::channel();
        let notifier = Arc::new(EventNotifier::new()?);
        Ok(Calls {
            threads,
            tell,
            told,
            notifier,
        })
    }

    /// May the user have one more made?
    pub fn check(&self, uid: u32, waits_for: WaitsFor) -> Result<(), Errno> {
        if self.threads.waiting(Some(uid), waits_for) < WAITING_MAX {
            Ok(())
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// Has so many bytes wait in a tap at the most, soon and in the order of these calls.
    pub fn bound_tap(&self, tap: &Tap, bytes: u32) {
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

    pub fn begin(&self, asker: Option<Asker>, call: Call) {
        let Call {
            uid,
            waits_for,
            make,
        } = call;
        let (tell, notifier) = (self.tell.clone(), Arc::clone(&self.notifier));
        let job = move || {
            let sequel = make();
            // Nobody is there any more if the server ends.
            let _ = tell.send(Made { asker, sequel });
            notifier.notify();
        };
        self.threads.add(Some(uid), waits_for, Box::new(job));
    }
}

impl Server {
    /// Calls have been made.
    pub fn on_calls(&mut self) {
        self.calls.notifier.drain();
        let made: Vec<Made> = self.calls.told.try_iter().collect();
        for Made { asker, sequel } in made {
            let answer = sequel(self);
            match (asker, answer) {
                (Some(asker), answer) => self.answer(asker, answer),
                (None, Ok(Answer::Call(call))) => self.calls.begin(None, call),
                (None, _) => {}
            }
        }
    }
}
