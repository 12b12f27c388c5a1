//! Exit codes, as listed at the end of `portolan --help`.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Why a command failed.
pub enum Failure {
    General(anyhow::Error),
    /// The failure is on the screen already.
    Shown,
    /// The command line is not valid.
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

/// Prints one line. If the reader has closed the pipe (`portolan ss | head`), ends the process without an error.
pub fn print(line: impl Display) -> Result<(), Failure> {
    use io::Write;
    match writeln!(io::stdout().lock(), "{line}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}
