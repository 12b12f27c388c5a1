//! The program behind `portolan bench`, `report` and `demo`: beds of namespaces, and programs on both stacks.
#![forbid(unsafe_code)]

mod demo;
mod figures;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use portolan_bench_arguments::{Bench, Report, exit};

/// Errors and help name `portolan`, the command that executes this program.
#[derive(Parser)]
#[command(name = "portolan", bin_name = "portolan", version)]
struct Arguments {
    /// Of all commands of `portolan`; benchmarks start servers of their own.
    #[arg(long = "socket", global = true, hide = true)]
    _socket: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo,
    Bench(Bench),
    Report(Report),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Demo => demo::run(),
        Command::Bench(arguments) => figures::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_for_all_commands_are_accepted() {
        for line in [
            ["portolan", "--socket", "/s", "demo"],
            ["portolan", "demo", "--socket", "/s"],
        ] {
            assert!(Arguments::try_parse_from(line).is_ok(), "{line:?}");
        }
    }
}
