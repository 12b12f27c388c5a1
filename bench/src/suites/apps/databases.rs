//! Databases with their own load generators. Their data is in memory, so that no disk is measured, and each run starts
//! with a new server and the same tables.

use super::case;
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::services::mariadb::{MariaDb, sysbench_options};
use crate::services::postgres::{self, Postgres};
use crate::suites::Case;
use crate::{Effort, MeasureError};

const MARIADB_PORT: u16 = 3306;

/// Connections of mysqlslap in one run. The client closes them, so that each keeps a port for a minute, and Portolan has
/// 10,000 ports unless configured otherwise: enough for nine runs.
const SHORT_CONNECTIONS: f64 = 1000.0;

/// 16 threads, each with a connection: ten point selects, four range selects and four writes for a transaction.
pub(super) fn sysbench(effort: Effort) -> Case {
    let programs = ["mariadbd", "mariadb-install-db", "mariadb", "sysbench"];
    let time = format!("--time={}", effort.scaled(3.0).ceil());
    case("app-mariadb-16", "tx/s", programs, move |bed, stack| {
        let mariadb = mariadb(bed)?;
        let _server = mariadb.serve(bed, stack)?;
        let sysbench = |stack, step| {
            let mut command = bed.command(Side::Client, stack, "sysbench");
            command
                .args(sysbench_options(bed, MARIADB_PORT))
                .args(["--tables=4", "--table-size=5000", "--threads=16", &time])
                .args(["oltp_read_write", step]);
            run(&mut command)
        };
        sysbench(Stack::Kernel, "cleanup")?;
        sysbench(Stack::Kernel, "prepare")?;
        let output = sysbench(stack, "run")?;
        transactions_per_second(&output).ok_or(MeasureError::Output {
            program: "sysbench",
            output,
        })
    })
}

/// Eight threads that open a connection for each query.
pub(super) fn mysqlslap(effort: Effort) -> Case {
    let programs = ["mariadbd", "mariadb-install-db", "mariadb", "mariadb-slap"];
    let count = effort.scaled(SHORT_CONNECTIONS);
    case("app-mysqlslap", "conn/s", programs, move |bed, stack| {
        let mariadb = mariadb(bed)?;
        let _server = mariadb.serve(bed, stack)?;
        let mut slap = mariadb.client(bed, stack, "mariadb-slap");
        slap.args(["--query=SELECT 1", "--concurrency=8", "--detach=1"])
            .arg(format!("--number-of-queries={count}"))
            .args(["--create-schema=sbtest", "--no-drop", "--csv"]);
        let output = run(&mut slap)?;
        match average_seconds(&output) {
            Some(seconds) => Ok(count / seconds),
            None => Err(MeasureError::Output {
                program: "mariadb-slap",
                output,
            }),
        }
    })
}

fn mariadb(bed: &Bed) -> Result<MariaDb, MeasureError> {
    MariaDb::new(bed.memory_file("mariadb"), MARIADB_PORT)
}

/// Eight connections of two threads, and a server process for each connection.
pub(super) fn pgbench(effort: Effort) -> Case {
    let programs = ["postgres", "initdb", "psql", "pgbench"].map(postgres::program);
    let seconds = effort.scaled(3.0).ceil().to_string();
    case("app-pgbench-8", "tx/s", programs, move |bed, stack| {
        let postgres = Postgres::new(bed, bed.memory_file("postgres"), "")?;
        let _server = postgres.serve(bed, stack)?;
        let pgbench = |stack, options: &[&str]| {
            let mut command = postgres.client(bed, stack, "pgbench");
            run(command.args(options).arg("postgres"))
        };
        pgbench(Stack::Kernel, &["-i", "-q"])?;
        let output = pgbench(stack, &["-n", "-S", "-c", "8", "-j", "2", "-T", &seconds])?;
        selects_per_second(&output).ok_or(MeasureError::Output {
            program: "pgbench",
            output,
        })
    })
}

/// Parses sysbench's line `transactions:  1234   (411.12 per sec.)`.
fn transactions_per_second(output: &str) -> Option<f64> {
    let line = output
        .lines()
        .find_map(|line| line.trim().strip_prefix("transactions:"))?;
    let (_, rate) = line.split_once('(')?;
    rate.split_whitespace().next()?.parse().ok()
}

/// Parses mysqlslap's line `,mixed,1.234,1.234,1.234,8,375`: the engine and the kind of load, then the average, the
/// minimum and the maximum of the seconds of a repetition.
fn average_seconds(csv: &str) -> Option<f64> {
    csv.lines().last()?.split(',').nth(2)?.parse().ok()
}

/// Parses pgbench's line `tps = 1234.5 (without initial connection time)`, unless a transaction failed.
fn selects_per_second(output: &str) -> Option<f64> {
    let field = |name| output.lines().find_map(|line| line.strip_prefix(name));
    let has_failed = !field("number of failed transactions: ")?.starts_with("0 ");
    let rate = field("tps = ")?.split_whitespace().next()?.parse().ok()?;
    (!has_failed).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_what_the_load_generators_print() {
        let sysbench = "SQL statistics:\n    transactions:                        1234   (411.12 per sec.)\n\
            \x20   queries:                             24680  (8222.40 per sec.)";
        assert_eq!(transactions_per_second(sysbench), Some(411.12));
        assert_eq!(average_seconds(",mixed,0.500,0.500,0.500,8,375"), Some(0.5));
        let pgbench = "number of failed transactions: 0 (0.000%)\nlatency average = 0.2 ms\n\
            tps = 1234.5 (without initial connection time)";
        assert_eq!(selects_per_second(pgbench), Some(1234.5));
    }

    #[test]
    fn an_error_is_no_rate() {
        assert_eq!(transactions_per_second("FATAL: unable to connect"), None);
        assert_eq!(average_seconds("mariadb-slap: Error"), None);
        let pgbench = "number of failed transactions: 3 (0.1%)\ntps = 1234.5 (without …)";
        assert_eq!(selects_per_second(pgbench), None);
    }
}
