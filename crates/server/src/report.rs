//! Data for commands: counters, sessions, the state of the server.

#[cfg(test)]
mod counters_tests;
pub(crate) mod listings;
pub(crate) mod reports;

use portolan_control::Process;
use portolan_proto::report::Holder;

pub(crate) fn reported(process: &Process) -> Holder {
    Holder::Process {
        pid: process.pid,
        program: process.program.clone(),
    }
}
