//! Exit codes of `portolan` and of the program that it executes; the end of `portolan --help` lists them.

use std::fmt::{self, Display};
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
        let code = match self {
            Failure::General(_) => 1,
            Failure::Shown => return ExitCode::from(1),
            Failure::Unread => return ExitCode::SUCCESS,
            Failure::Usage(_) => 2,
            Failure::NoServer(_) => 3,
            Failure::Refused(_) => 4,
            Failure::NotTried(_) => 125,
            Failure::NotExecutable(_) => 126,
            Failure::NotFound(_) => 127,
        };
        eprintln!("portolan: {self}");
        ExitCode::from(code)
    }
}

/// Formats as the reason, with its causes; empty if there is nothing to say.
impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Shown | Failure::Unread => Ok(()),
            Failure::Refused(reason) => f.write_str(reason),
            Failure::General(error)
            | Failure::Usage(error)
            | Failure::NoServer(error)
            | Failure::NotTried(error)
            | Failure::NotExecutable(error)
            | Failure::NotFound(error) => write!(f, "{error:#}"),
        }
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
