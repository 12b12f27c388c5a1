//! BSD socket calls on descriptor numbers. Each fails with [`CallError::NotOurs`] if the kernel has
//! to make the call: for descriptors that are not Portolan's, and for sockets that the server
//! relays or that fell back.

mod addresses;
mod asking;
mod attach;
mod bind;
mod blocking;
mod buffers;
mod connect;
mod data;
mod datagram;
#[cfg(feature = "tokio")]
mod embedded;
mod find;
mod flags;
mod fork;
mod groups;
mod kernel_socket;
mod lifecycle;
mod listen;
mod message;
mod multiplex;
mod oob;
mod shared;
mod socket_options;
mod tcp_info;
mod watching;

pub use crate::descriptors::{is_internal, is_ours};
pub use crate::outcome::{CallError, Outcome};
pub use crate::process::cancel::{
    CancelDisabled, cancelled, disable_cancel, expect as expect_cancel, hold, take_end,
};
pub use crate::process::inside::{ExitGuard, LibraryGuard, defer, enter, is_inside, leave};
pub use crate::process::vfork::shares_memory;
pub use crate::threads::sleep::outside;
pub use crate::threads::start::has_one_thread;
use crate::threads::start::{here, start};
pub use addresses::{local_address, peer_address};
pub use attach::{attach, attach_inherited};
pub use bind::bind;
pub use connect::connect;
pub use data::{receive, send, send_message, send_space};
#[cfg(feature = "tokio")]
pub use embedded::{EmbeddedWait, epoll_wait_embedded, join_embedded, leave_embedded};
pub use flags::{fcntl, ioctl};
pub use fork::{
    after_fork_in_child, after_fork_in_parent, after_fork_to_namespace, before_chroot,
    before_confinement, before_exec, before_exit, before_fork, before_fork_to_namespace, freeze,
    give_away, while_moving, without_helper,
};
pub use lifecycle::{Duplicate, close, duplicate, forget, shutdown, socket};
pub use listen::{accept, listen};
pub use message::{Control, Destination, ExtendedError, Received, SendControl};
pub use multiplex::{epoll_control, epoll_create, epoll_wait, poll};
pub use portolan_sys::memory;
pub use portolan_sys::signals::{LAST as LAST_SIGNAL, SignalInfo, is_of_memory, may_be_defer};
pub use shared::{Chunk, Moved, Piece, Taken, moved, receive_shared, send_shared};
pub use socket_options::{get_option, set_option};

use std::os::fd::RawFd;
use std::time::Duration;

use crate::migration;
use crate::process::Process;
use crate::settings::settings;

/// Reads the settings from the environment, before the program can change it.
pub fn read_settings() {
    settings();
}

/// Does Portolan serve this process? Looks for a server if that was not done yet. Interfaces that
/// could bypass Portolan's sockets (io_uring) are closed then.
pub fn is_active() -> bool {
    start().is_ok()
}

/// Processor time that the threads of this process have spent looking for packets before they slept.
pub fn spun() -> Duration {
    Process::running().map_or(Duration::ZERO, |process| process.spinner.spun())
}

/// Called before the descriptor is used by calls that the library does not see. Returns whether that works.
pub fn before_lending(fd: RawFd) -> bool {
    migration::before_lending(fd, here)
}
