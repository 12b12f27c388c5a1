//! Run time of a program, which the kernel counts while `kernel.bpf_stats_enabled` is set.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunTime {
    pub runs: u64,
    pub nanoseconds: u64,
}

impl RunTime {
    /// All zero if the kernel does not report it.
    pub(crate) fn of(program: BorrowedFd<'_>) -> RunTime {
        let path = format!("/proc/self/fdinfo/{}", program.as_raw_fd());
        RunTime::parse(&fs::read_to_string(path).unwrap_or_default())
    }

    fn parse(fdinfo: &str) -> RunTime {
        let field = |name| {
            fdinfo
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .and_then(|value| value.trim().parse().ok())
                .unwrap_or(0)
        };
        RunTime {
            runs: field("run_cnt:"),
            nanoseconds: field("run_time_ns:"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_program_are_found_among_others() {
        let fdinfo =
            "pos:\t0\nprog_type:\t3\nrun_time_ns:\t1234\nrun_cnt:\t56\nverified_insns:\t7\n";
        let expected = RunTime {
            runs: 56,
            nanoseconds: 1234,
        };
        assert_eq!(RunTime::parse(fdinfo), expected);
        assert_eq!(RunTime::parse("pos:\t0\n"), RunTime::default());
    }
}
