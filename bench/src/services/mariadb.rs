//! MariaDB on the server host, and its clients.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::fill_once;
use crate::MeasureError;
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};

/// The database that sysbench uses by default.
const CREATE_DATABASE: &str = "CREATE DATABASE IF NOT EXISTS sbtest";

/// A directory of data, and the port of the server that uses it.
pub struct MariaDb {
    data: PathBuf,
    port: u16,
}

impl MariaDb {
    /// Makes the system tables in a directory, unless it exists.
    pub fn new(data: PathBuf, port: u16) -> Result<MariaDb, MeasureError> {
        fill_once(&data, |data| {
            let mut install = Command::new("mariadb-install-db");
            install
                .args(["--no-defaults", "--user=root", "--skip-test-db"])
                .arg("--auth-root-authentication-method=normal")
                .arg(format!("--datadir={}", data.display()));
            run(&mut install)?;
            Ok(())
        })?;
        Ok(MariaDb { data, port })
    }

    /// Starts the server with an empty or older database `sbtest`.
    pub fn serve(&self, bed: &Bed, stack: Stack) -> Result<Background, MeasureError> {
        // It ignores SIGINT, by which a user ends a benchmark.
        let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
        command
            .args(["--pdeathsig", "TERM", "--"])
            .args(bed.words(stack, "mariadbd"))
            .args(["--no-defaults", "--user=root"])
            .args(["--skip-grant-tables", "--skip-name-resolve"])
            .args([
                format!("--datadir={}", self.data.display()),
                format!("--socket={}", bed.file("mariadb.sock").display()),
                format!("--port={}", self.port),
                format!("--bind-address={}", bed.server.address),
            ])
            .stdout(Stdio::null());
        let service = bed.serve_command(self.port, "mariadbd", &mut command)?;
        let mut mariadb = self.client(bed, Stack::Kernel, "mariadb");
        run(mariadb.args(["-e", CREATE_DATABASE]))?;
        Ok(service)
    }

    /// A client program of MariaDB on the client host.
    pub fn client(&self, bed: &Bed, stack: Stack, program: &str) -> Command {
        let mut command = bed.command(Side::Client, stack, program);
        command.args(["--no-defaults", "--protocol=tcp", "--user=root"]);
        command.args([
            format!("--host={}", bed.server.address),
            format!("--port={}", self.port),
        ]);
        command
    }
}

/// The options by which sysbench connects to a server.
pub fn sysbench_options(bed: &Bed, port: u16) -> [String; 3] {
    [
        format!("--mysql-host={}", bed.server.address),
        format!("--mysql-port={port}"),
        "--mysql-user=root".to_owned(),
    ]
}
