//! Descriptors that came from others are closed here, by a thread: the last close of a socket may wait for its peer
//! (`SO_LINGER`), and of a file for whoever serves its file system. So may the end of a UNIX socket in whose queue such
//! descriptors lie.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Sender};

use portolan_sys::unix;

#[derive(Debug)]
pub struct Sink {
    /// Gathered until the turn ends.
    doomed: Vec<OwnedFd>,
    /// Of what came with the last message.
    copies: Vec<OwnedFd>,
    thread: Sender<Vec<OwnedFd>>,
}

impl Sink {
    pub fn new() -> Sink {
        let (thread, doomed) = mpsc::channel();
        // Ends when the server does.
        std::thread::spawn(move || doomed.iter().for_each(close_all));
        Sink {
            doomed: Vec::new(),
            copies: Vec::new(),
            thread,
        }
    }

    /// Has a descriptor closed.
    pub fn close(&mut self, fd: impl Into<OwnedFd>) {
        self.doomed.push(fd.into());
    }

    /// Sorts out what came with a message: what no request carries is closed. Of the others copies are, so that the
    /// server's own close is never the last.
    pub fn screen(&mut self, fds: &mut Vec<OwnedFd>) {
        self.doomed.append(&mut self.copies);
        for fd in std::mem::take(fds) {
            if !unix::is_socket_or_memory(&fd) {
                self.close(fd);
                continue;
            }
            // Without a copy, for want of descriptors, the server's close may be the last.
            let copy = match unix::closes_at_once(&fd) {
                false => rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 0).ok(),
                true => None,
            };
            self.copies.extend(copy);
            fds.push(fd);
        }
    }

    /// Closes the copies of what came with the message at hand, which is counted now and is to be given to `close` later.
    pub fn drop_copies(&mut self) {
        self.copies.clear();
    }

    /// Called at the end of a turn, when the server has closed its own.
    pub fn flush(&mut self) {
        self.doomed.append(&mut self.copies);
        if !self.doomed.is_empty() {
            // The thread ends with the server only.
            let _ = self.thread.send(std::mem::take(&mut self.doomed));
        }
    }
}

/// One that has to wait keeps no other from being closed.
fn close_all(doomed: Vec<OwnedFd>) {
    for fd in doomed {
        match unix::may_wait_when_closed(&fd) {
            true => drop(std::thread::spawn(move || drop(fd))),
            false => drop(fd),
        }
    }
}
