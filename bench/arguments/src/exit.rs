//! Exit codes, which the end of `portolan --help` lists.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Why a command did not do what it was asked.
pub enum Failure {
    General(anyhow::Error),
    /// What went wrong is on the screen already.
    Shown,
    /// The words of the command line mean nothing.
    Usage(anyhow::Error),
    NoServer(anyhow::Error),
    /// The server's own words why.
    Refused(String),
    NotTried(anyhow::Error),
    NotExecutable(anyhow::Error),
    NotFound(anyhow::Error),
}

impl Failure {
    /// Tells the user, and the shell.
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

/// Prints one line; a reader that went away (`portolan ss | head`) ends the command quietly.
pub fn print(line: impl Display) -> Result<(), Failure> {
    use io::Write;
    match writeln!(io::stdout().lock(), "{line}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}
