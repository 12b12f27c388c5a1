//! Server logic, sans-IO: ports, processes and sessions, accept queues, admission. Knows no file
//! descriptor, clock or random source; time and randomness are arguments.
#![forbid(unsafe_code)]

pub mod budget;
pub mod control;
pub mod counters;
pub mod errno;
pub mod extensions;
pub mod legality;
pub mod listener;
mod orphans;
pub mod ports;
pub mod qos;
pub mod recall;
pub mod registry;
pub mod session;
pub mod sharing;
pub mod timer;

pub use budget::{Budget, Charge, Exhausted, Limit, Slices};
pub use control::{Control, ControlLimits, Effect, Effects, Input, Progress};
pub use errno::Errno;
pub use legality::{Command, SessionPhase};
pub use listener::{Delegate, Listener, Queueing};
pub use orphans::OrphanLimits;
pub use ports::{ClaimId, PortClaim, PortTable};
pub use recall::{ClientId, RequestedState, Requester};
pub use registry::{Limits, Process, Registry};
pub use session::{Closing, Holder, Life, Opening, Relay, SessionEntry};
pub use timer::{Deadline, Timer};
