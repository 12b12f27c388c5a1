//! Server logic, sans-IO: ports, processes and sessions, accept queues, admission. Uses no file
//! descriptor, clock or random source; time and randomness are arguments.
#![forbid(unsafe_code)]
#![deny(unreachable_pub, clippy::fn_params_excessive_bools, clippy::match_bool)]

mod accepting;
pub mod adoption;
pub mod budget;
pub mod control;
pub mod counters;
pub mod errno;
pub mod extensions;
mod flooding;
mod leasing;
pub mod legality;
pub mod listener;
mod listener_table;
mod listening;
pub mod opens;
mod orphans;
pub mod performers;
pub mod ports;
pub mod qos;
pub mod recall;
pub mod registry;
mod relay;
mod relaying;
pub mod session;
pub mod sharing;
pub mod timer;

pub use adoption::{Adopted, HeldBefore, Reach};
pub use budget::{Budget, Charge, Exhausted, Limit, Shares, Slices};
pub use control::{Control, ControlLimits, Effect, Effects, Input, Progress};
pub use errno::Errno;
pub use flooding::Answering;
pub use legality::{Command, SessionPhase};
pub use listener::{Delegate, Listener};
pub use listener_table::ListenerTable;
pub use opens::{Fallback, LocalPeer, Way};
pub use orphans::OrphanLimits;
pub use performers::{Performer, Performers};
pub use ports::{ClaimId, PortClaim, PortTable};
pub use recall::{ClientId, RequestedState, Requester};
pub use registry::{Limits, Process, Registry};
pub use relay::{Interest, Relay, RelayProgress, Start};
pub use session::{Closing, Holder, Life, Opening, SessionEntry};
pub use timer::{Deadline, Timer};
