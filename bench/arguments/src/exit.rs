//! Exit codes of `portolan` and of the program that it executes; the end of `portolan --help` lists them.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

/// Why a command failed.
pub enum Failure {
    General(anyhow::Error),
    /// The failure is on the screen already.
    Shown,
    /// Nobody reads what is printed (`portolan ss | head`): a quiet end, on which test beds are taken down.
    Unread,
    /// The words of the command line mean nothing.
    Usage(anyhow::Error),
    NoServer(anyhow::Error),
    /// The server refused the request, with this reason.
    Refused(String),
    NotTried(anyhow::Error),
    NotExecutable(anyhow::Error),
    NotFound(anyhow::Error),
}

impl Failure {
    /// Prints the error and returns the exit code.
    pub fn report(self) -> ExitCode {
        let (code, error) = match self {
            Failure::General(error) => (1, error),
            Failure::Shown => return ExitCode::from(1),
            Failure::Unread => return ExitCode::SUCCESS,
            Failure::Usage(error) => (2, error),
            Failure::NoServer(error) => (3, error),
            Failure::Refused(reason) => (4, anyhow::anyhow!(reason)),
            Failure::NotTried(error) => (125, error),
            Failure::NotExecutable(error) => (126, error),
            Failure::NotFound(error) => (127, error),
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
