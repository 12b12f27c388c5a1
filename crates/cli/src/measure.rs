//! `portolan bench`, `portolan report` and `portolan demo`: execute `portolan-bench`, which parses the arguments.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::anyhow;
use portolan_bench_arguments::PROGRAM;

use crate::exit::Failure;
use crate::installed;

/// Returns only if the program could not be started.
pub(crate) fn run() -> Result<(), Failure> {
    let program = installed::find(PROGRAM)?;
    let error = Command::new(&program).args(env::args_os().skip(1)).exec();
    Err(anyhow!(error).context(program.display().to_string()).into())
}
