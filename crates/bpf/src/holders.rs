//! Who has a descriptor, as the kernel counts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::{Object, ProgramInput};
use portolan_proto::filter::{HOLDERS_MAX, Holders};
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

    /// Is what `descriptor` refers to open here, under this one number, and in the processes at the
    /// other ends of `connections`, and nowhere else? No if that cannot be told.
    pub fn is_only_with(
        &mut self,
        connections: &[BorrowedFd<'_>],
        descriptor: BorrowedFd<'_>,
    ) -> bool {
        if connections.len() > HOLDERS_MAX {
            return false;
        }
        let number = |fd: &BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
        let mut request = Holders {
            descriptor: number(&descriptor),
            // At most HOLDERS_MAX.
            count: connections.len() as u32,
            ..Holders::default()
        };
        for (place, connection) in request.connections.iter_mut().zip(connections) {
            *place = number(&connection.as_fd());
        }
        let Some(program) = self.object.progs_mut().next() else {
            return false;
        };
        let input = ProgramInput {
            context_in: Some(request.as_mut_bytes()),
            ..ProgramInput::default()
        };
        program.test_run(input).is_ok() && request.references == request.descriptors + 1
    }
}
