//! The topics, in the order in which they are run.

mod accept;
mod by_number;
mod cancel;
mod completions;
mod connect;
mod datagram_options;
mod datagram_paths;
mod descriptors;
mod duplicate;
mod endings;
mod epoll;
mod fast_open;
mod faults;
mod limits;
mod linger;
mod listeners;
mod loops;
mod names;
mod options;
mod order;
mod owners;
mod poll;
mod receive;
mod send;
mod shutdown;
mod signals;
mod splice;
mod started;
mod stdio;
mod stream_options;
mod tcp_options;
mod threads;
mod timeouts;
mod udp;
mod urgent;

use crate::side::Side;

/// One topic; both roles run it in step.
pub(crate) struct Topic {
    pub name: &'static str,
    pub run: fn(&mut Side),
}

pub(crate) static TOPICS: [Topic; 35] = [
    Topic {
        name: "connect",
        run: connect::run,
    },
    Topic {
        name: "accept",
        run: accept::run,
    },
    Topic {
        name: "receive",
        run: receive::run,
    },
    Topic {
        name: "send",
        run: send::run,
    },
    Topic {
        name: "shutdown",
        run: shutdown::run,
    },
    Topic {
        name: "names",
        run: names::run,
    },
    Topic {
        name: "options",
        run: options::run,
    },
    Topic {
        name: "descriptors",
        run: descriptors::run,
    },
    Topic {
        name: "duplicate",
        run: duplicate::run,
    },
    Topic {
        name: "poll",
        run: poll::run,
    },
    Topic {
        name: "epoll",
        run: epoll::run,
    },
    Topic {
        name: "signals",
        run: signals::run,
    },
    Topic {
        name: "timeouts",
        run: timeouts::run,
    },
    Topic {
        name: "linger",
        run: linger::run,
    },
    Topic {
        name: "threads",
        run: threads::run,
    },
    Topic {
        name: "udp",
        run: udp::run,
    },
    Topic {
        name: "datagram-options",
        run: datagram_options::run,
    },
    Topic {
        name: "by-number",
        run: by_number::run,
    },
    Topic {
        name: "faults",
        run: faults::run,
    },
    Topic {
        name: "urgent",
        run: urgent::run,
    },
    Topic {
        name: "stream-options",
        run: stream_options::run,
    },
    Topic {
        name: "tcp-options",
        run: tcp_options::run,
    },
    Topic {
        name: "fast-open",
        run: fast_open::run,
    },
    Topic {
        name: "datagram-paths",
        run: datagram_paths::run,
    },
    Topic {
        name: "stdio",
        run: stdio::run,
    },
    Topic {
        name: "splice",
        run: splice::run,
    },
    Topic {
        name: "started",
        run: started::run,
    },
    Topic {
        name: "owners",
        run: owners::run,
    },
    Topic {
        name: "loops",
        run: loops::run,
    },
    Topic {
        name: "cancel",
        run: cancel::run,
    },
    Topic {
        name: "limits",
        run: limits::run,
    },
    Topic {
        name: "endings",
        run: endings::run,
    },
    Topic {
        name: "listeners",
        run: listeners::run,
    },
    Topic {
        name: "order",
        run: order::run,
    },
    Topic {
        name: "completions",
        run: completions::run,
    },
];
