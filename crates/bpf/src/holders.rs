//! Which processes have a descriptor, by the kernel's reference counts, what is at its other end, and what runs there.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::{Object, ProgramInput};
use portolan_proto::filter::{HOLDERS_MAX, Holders, PairEnds, RunningFile};
use zerocopy::IntoBytes;

use crate::error::LoadError;
use crate::objects::{Aligned, open, refused};

static PROGRAM: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/holders.bpf.o")));

/// Counts the references to open files.
pub struct HolderCount {
    object: Object,
}

impl HolderCount {
    pub fn load() -> Result<HolderCount, LoadError> {
        let object = open(PROGRAM).and_then(|object| object.load());
        Ok(HolderCount {
            object: object.map_err(refused("count of holders"))?,
        })
    }

    /// Whether the open file of `descriptor` is referenced only here, by this one descriptor, and in the
    /// processes at the other ends of `connections`. False if that cannot be determined.
    pub fn is_only_with(
        &mut self,
        connections: &[BorrowedFd<'_>],
        descriptor: BorrowedFd<'_>,
    ) -> bool {
        if connections.len() > HOLDERS_MAX {
            return false;
        }
        let mut request = Holders {
            descriptor: number(descriptor),
            // At most HOLDERS_MAX.
            count: connections.len() as u32,
            ..Holders::default()
        };
        for (place, connection) in request.connections.iter_mut().zip(connections) {
            *place = number(connection);
        }
        self.run("count_fd_refs", request.as_mut_bytes())
            && request.references == request.descriptors + 1
    }

    /// Whether two descriptors open here are UNIX sockets connected to each other. False if that cannot be determined.
    pub fn are_pair(&mut self, far: impl AsFd, near: impl AsFd) -> bool {
        let mut request = PairEnds {
            far: number(far),
            near: number(near),
            are_pair: 0,
        };
        self.run("are_pair", request.as_mut_bytes()) && request.are_pair == 1
    }

    /// Whether the process that made `connection` runs `file`. False if that cannot be determined.
    pub fn runs_file(&mut self, connection: BorrowedFd<'_>, file: BorrowedFd<'_>) -> bool {
        let mut request = RunningFile {
            connection: number(connection),
            file: number(file),
            is_running: 0,
        };
        self.run("runs_file", request.as_mut_bytes()) && request.is_running == 1
    }

    /// Runs a program on a request, which it answers in place.
    fn run(&mut self, name: &str, request: &mut [u8]) -> bool {
        let program = self
            .object
            .progs_mut()
            .find(|program| program.name() == name);
        let input = ProgramInput {
            context_in: Some(request),
            ..ProgramInput::default()
        };
        program.is_some_and(|program| program.test_run(input).is_ok())
    }
}

fn number(fd: impl AsFd) -> u32 {
    fd.as_fd().as_raw_fd().cast_unsigned()
}
