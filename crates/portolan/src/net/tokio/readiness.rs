//! Calls that tasks repeat until they no longer block.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use crate::net::reactor::{Direction, Source, new_name};

/// Name of the one task per direction that uses the `poll_` functions.
const POLLING: u64 = 0;

/// Makes a call as `poll_` functions do: the last caller's task is woken.
pub(super) fn poll<T>(
    source: &Source,
    direction: Direction,
    context: &Context<'_>,
    call: impl FnMut() -> io::Result<T>,
) -> Poll<io::Result<T>> {
    source.poll(direction, (POLLING, context.waker()), call)
}

/// Repeats a call until it does not block. Any number of tasks may do so at once.
pub(super) async fn run<T>(
    source: &Source,
    direction: Direction,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let waiting = Waiting {
        source,
        name: new_name(),
    };
    poll_fn(|context| source.poll(direction, (waiting.name, context.waker()), &mut call)).await
}

/// A task that may wait. Dropping it, when it is cancelled, for example, removes the task.
struct Waiting<'a> {
    source: &'a Source,
    name: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.source.forget(self.name);
    }
}
