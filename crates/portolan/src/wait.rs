//! The parts of waiting: what wakes a thread, who watches the channel, how long to spin, epoll sets. The threads that
//! wait are in `threads`.

pub(crate) mod epoll;
pub(crate) mod events;
mod signals;
pub(crate) mod spin;
pub(crate) mod turns;
pub(crate) mod waiter;
pub(crate) mod watch;
