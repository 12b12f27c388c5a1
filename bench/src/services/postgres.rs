//! PostgreSQL on the server host, and its clients. It refuses to run as root: Debian's user `postgres` runs it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{file_error, fill_once, retry};
use crate::MeasureError;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};

const PORT: u16 = 5432;

/// Debian's programs, a directory for each version.
const VERSIONS: &str = "/usr/lib/postgresql";

const AS_POSTGRES: [&str; 5] = [
    "setpriv",
    "--reuid=postgres",
    "--regid=postgres",
    "--clear-groups",
    "--",
];

/// A database cluster.
pub struct Postgres {
    data: PathBuf,
    /// The program `portolan`, where every user may execute it.
    portolan: PathBuf,
}

impl Postgres {
    /// Makes a cluster in a directory, unless it exists. `settings` are lines for its configuration.
    pub fn new(bed: &Bed, data: PathBuf, settings: &str) -> Result<Postgres, MeasureError> {
        let portolan = bed.public_programs()?.join("portolan");
        fill_once(&data, |data| create_cluster(bed, data, settings))?;
        Ok(Postgres { data, portolan })
    }

    /// Starts the server and waits until it accepts statements.
    pub fn serve(&self, bed: &Bed, stack: Stack) -> Result<Background, MeasureError> {
        let mut command = as_postgres(bed);
        if stack == Stack::Portolan {
            command.arg(&self.portolan);
            command.args(["run", "--require", "--"]);
        }
        command.arg(program("postgres")).arg("-D").arg(&self.data);
        let service = bed.serve_command(PORT, "postgres", command.stdout(Stdio::null()))?;
        // It listens before it accepts statements.
        let statement = ["-X", "-c", "select 1"];
        retry(|| run(self.client(bed, Stack::Kernel, "psql").args(statement)))?;
        Ok(service)
    }

    /// A client program on the client host.
    pub fn client(&self, bed: &Bed, stack: Stack, name: &str) -> Command {
        let address = bed.server.address.to_string();
        let mut command = bed.command(Side::Client, stack, &program(name).display().to_string());
        command.args(["-h", &address, "-U", "postgres"]);
        command
    }
}

/// Returns the path of a program of the newest version, or its name alone if no version is installed.
pub fn program(name: &str) -> PathBuf {
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let newest = versions.map(|version| version.path()).max();
    newest.map_or_else(|| name.into(), |newest| newest.join("bin").join(name))
}

fn create_cluster(bed: &Bed, data: &Path, settings: &str) -> Result<(), MeasureError> {
    let number = |flag| -> Result<Option<u32>, MeasureError> {
        let id = run(Command::new("id").args([flag, "postgres"]))?;
        Ok(id.parse().ok())
    };
    chown(data, number("-u")?, number("-g")?).map_err(|source| file_error(data, source))?;
    let mut initdb = as_postgres(bed);
    initdb.arg(program("initdb"));
    initdb.args(["--no-sync", "-N", "-A", "trust", "-U", "postgres", "-D"]);
    run(initdb.arg(data))?;
    let address = bed.server.address;
    let settings = format!(
        "listen_addresses = '{address}'\nunix_socket_directories = ''\nfsync = off\n{settings}"
    );
    for (name, lines) in [
        ("pg_hba.conf", "host all all all trust\n"),
        ("postgresql.conf", &settings),
    ] {
        let path = data.join(name);
        append(&path, lines).map_err(|source| file_error(&path, source))?;
    }
    Ok(())
}

fn as_postgres(bed: &Bed) -> Command {
    let mut command = bed.command(Side::Server, Stack::Kernel, AS_POSTGRES[0]);
    command.args(&AS_POSTGRES[1..]).current_dir("/");
    command
}

fn append(path: &Path, lines: &str) -> io::Result<()> {
    File::options()
        .append(true)
        .open(path)?
        .write_all(lines.as_bytes())
}
