//! Exit codes: the same as those of `portolan`, which executes this program.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

/// Why a command failed.
pub enum Failure {
    General(anyhow::Error),
    /// The failure is on the screen already.
    Shown,
    /// Standard output was closed (`portolan bench | head`): an end after which beds are still removed.
    Unread,
    /// The command line is not valid.
    Usage(anyhow::Error),
}

impl Failure {
    /// Prints the error and returns the exit code.
    pub fn report(self) -> ExitCode {
        let (code, error) = match self {
            Failure::General(error) => (1, error),
            Failure::Shown => return ExitCode::from(1),
            Failure::Unread => return ExitCode::SUCCESS,
            Failure::Usage(error) => (2, error),
        };
        eprintln!("portolan: {error:#}");
        ExitCode::from(code)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::General(error.into())
    }
}

/// Prints one line.
pub fn print(line: impl Display) -> Result<(), Failure> {
    match writeln!(io::stdout().lock(), "{line}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::Unread),
        other => Ok(other?),
    }
}
