//! Active opens in progress. The outcome of each arrives on the socket's descriptor (ADR 4), where
//! the leader of the sleeping threads waits for it, or the background thread while none sleeps: so
//! it is received, and acknowledged to the peer, whether or not the program asks for it.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::socket::table;
use crate::socket::{Socket, SocketPhase};

#[derive(Default)]
pub(crate) struct Openings(Vec<Opening>);

struct Opening {
    socket: Arc<Socket>,
    /// One of its descriptors, if the program has not closed that since.
    fd: RawFd,
    /// Number of threads that wait for this outcome alone, and receive it themselves.
    waiting: u32,
}

/// The receiver of an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taker {
    /// The connecting thread: it polls the descriptor itself until [`Openings::leave`].
    Caller,
    /// The leader.
    Leader,
}

impl Taker {
    pub(crate) fn if_it_waits(waits: bool) -> Taker {
        if waits { Taker::Caller } else { Taker::Leader }
    }
}

impl Openings {
    pub(crate) fn add(&mut self, socket: &Arc<Socket>, fd: RawFd, taker: Taker) {
        self.0.push(Opening {
            socket: Arc::clone(socket),
            fd,
            waiting: match taker {
                Taker::Caller => 1,
                Taker::Leader => 0,
            },
        });
    }

    /// Notes that the calling thread polls the descriptor itself until [`Openings::leave`].
    pub(crate) fn enter(&mut self, socket: &Arc<Socket>) {
        if let Some(opening) = self.find(socket) {
            opening.waiting += 1;
        }
    }

    /// Returns true if no thread polls the descriptor any more.
    pub(crate) fn leave(&mut self, socket: &Arc<Socket>) -> bool {
        self.retain_open();
        self.find(socket).is_some_and(|opening| {
            opening.waiting = opening.waiting.saturating_sub(1);
            opening.waiting == 0
        })
    }

    /// Returns the descriptors on which a leader waits for outcomes.
    pub(crate) fn poll_list(&mut self) -> Vec<(Arc<Socket>, RawFd)> {
        self.retain_open();
        let unattended = self.0.iter_mut().filter(|opening| opening.waiting == 0);
        unattended
            .filter_map(|opening| {
                opening.fd = table::number_of(&opening.socket, opening.fd)?;
                Some((Arc::clone(&opening.socket), opening.fd))
            })
            .collect()
    }

    /// Removes opens that have ended, in whatever way.
    fn retain_open(&mut self) {
        self.0
            .retain(|opening| opening.socket.phase() == SocketPhase::Connecting);
    }

    fn find(&mut self, socket: &Arc<Socket>) -> Option<&mut Opening> {
        self.0
            .iter_mut()
            .find(|opening| Arc::ptr_eq(&opening.socket, socket))
    }
}
