//! Watching sockets: while a thread does, their events wake it, and they stay open.

use std::sync::Arc;

use super::lifecycle::drop_reference;
use crate::socket::Socket;
use crate::wait::waiter::Waiter;

/// While this lives, the calling thread watches sockets.
pub(super) struct Watching<'a> {
    sockets: Vec<&'a Arc<Socket>>,
    waiter: Arc<Waiter>,
}

impl<'a> Watching<'a> {
    pub(super) fn new(sockets: Vec<&'a Arc<Socket>>) -> Watching<'a> {
        let waiter = Waiter::mine();
        for socket in &sockets {
            // As in the kernel, a call in progress keeps the socket open.
            socket.add_reference();
            socket.watch(&waiter);
        }
        Watching { sockets, waiter }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        for socket in &self.sockets {
            socket.unwatch(&self.waiter);
            drop_reference(socket);
        }
    }
}
