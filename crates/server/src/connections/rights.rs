//! Rights to low ports, which programs show by their sockets. A query for the socket's address waits for its lock,
//! which a sender can hold indefinitely by sending from memory of its own file system: threads query the socket, and
//! close it.

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

/// Limits of concurrent queries, each by a thread.
const ASKED: Limit = Limit {
    total: 64,
    per_user: 4,
    reserve: 8,
};

/// The right that a connection has shown for its next bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRight {
    Nothing,
    /// A thread is querying.
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

    /// Starts a thread that queries the socket and closes it. Returns the socket if too many queries of the user are
    /// running.
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
            // Frees the port.
            drop(socket);
            // Fails only when the server ends.
            let _ = tell.send((number, shown));
            notifier.notify();
        };
        // If no thread could be started, the socket was closed with the closure, and shows nothing.
        if thread::Builder::new().spawn(asks).is_err() {
            let _ = self.tell.send((number, None));
            self.notifier.notify();
        }
        Ok(())
    }

    /// Returns the finished queries with their results.
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
