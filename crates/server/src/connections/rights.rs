//! Rights to low ports, which sockets of programs show. To ask such a socket where it is bound waits for its lock, and whoever
//! sends by it from memory of a file system of his own holds that for as long as he likes: threads ask, and close it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use portolan_control::{Budget, Charge, ClientId, Limit};
use portolan_sys::port_right;
use portolan_sys::wait::EventNotifier;
use rustix::io::Errno;

/// Sockets that are asked at a time, each by a thread.
const ASKED: Limit = Limit {
    total: 64,
    per_user: 4,
    reserve: 8,
};

/// What a connection has shown for the next port that is bound by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRight {
    Nothing,
    /// A thread asks.
    Asking,
    /// The right to this address and port.
    To(SocketAddr),
}

/// A connection, and its request.
type Asker = (ClientId, u32);

#[derive(Debug)]
pub struct PortRights {
    budget: Budget,
    asked: HashMap<u64, (Asker, Charge)>,
    next: u64,
    tell: Sender<(u64, Option<SocketAddr>)>,
    told: Receiver<(u64, Option<SocketAddr>)>,
    pub notifier: Arc<EventNotifier>,
}

impl PortRights {
    pub fn new() -> Result<PortRights, Errno> {
        let (tell, told) = mpsc::channel();
        Ok(PortRights {
            budget: Budget::new(ASKED),
            asked: HashMap::new(),
            next: 0,
            tell,
            told,
            notifier: Arc::new(EventNotifier::new()?),
        })
    }

    /// Has a thread ask the socket, and close it. Gives it back if too many of the user's are asked.
    pub fn ask(&mut self, asker: Asker, uid: u32, socket: OwnedFd) -> Result<(), OwnedFd> {
        let Ok(charge) = self.budget.charge(uid, 1) else {
            return Err(socket);
        };
        let number = self.next;
        let (tell, notifier) = (self.tell.clone(), Arc::clone(&self.notifier));
        self.next += 1;
        self.asked.insert(number, (asker, charge));
        let asks = move || {
            let shown = port_right::shown_address(&socket).ok().flatten();
            // So that the port is free.
            drop(socket);
            // Nobody is there any more if the server ends.
            let _ = tell.send((number, shown));
            notifier.notify();
        };
        // Where the kernel has no thread, the socket went with it, and shows nothing.
        if thread::Builder::new().spawn(asks).is_err() {
            let _ = self.tell.send((number, None));
            self.notifier.notify();
        }
        Ok(())
    }

    /// Whose sockets have answered, and what.
    pub fn answered(&mut self) -> Vec<(Asker, Option<SocketAddr>)> {
        self.notifier.drain();
        let told: Vec<_> = self.told.try_iter().collect();
        let of_asker = |(number, shown)| {
            let (asker, _charge) = self.asked.remove(&number)?;
            Some((asker, shown))
        };
        told.into_iter().filter_map(of_asker).collect()
    }
}
