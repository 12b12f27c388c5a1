//! Server logic, sans-IO: ports, processes and sessions, accept queues, admission. Knows no file
//! descriptor, clock or random source; time and randomness are arguments.
#![forbid(unsafe_code)]

pub mod budget;
pub mod errno;
pub mod extensions;
pub mod legality;
pub mod ports;
pub mod qos;
pub mod registry;
pub mod sharing;

pub use budget::{Budget, Charge, Exhausted, Limit, Slices};
pub use errno::Errno;
pub use legality::{Command, SessionPhase};
pub use ports::{ClaimId, PortClaim, PortTable};
pub use registry::{Holder, Limits, Opening, Process, Registry, Session};
