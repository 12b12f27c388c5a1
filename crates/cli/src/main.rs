//! The command `portolan`: runs programs on Portolan, shows what the server knows, says what is
//! wrong with a machine, and measures. It asks the server; it never touches a session.
#![forbid(unsafe_code)]

mod bench;
mod counters;
mod demo;
mod doctor;
mod exit;
mod ext;
mod linkage;
mod qos;
mod run;
mod server;
mod ss;
mod status;
mod table;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// User-level TCP/IP for unmodified programs.
#[derive(Parser)]
#[command(name = "portolan", version, after_help = exit::HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with its sockets on Portolan.
    Run(run::Arguments),
    /// List the sessions of this network namespace.
    Ss(ss::Arguments),
    /// Show what sessions, processes and guarantees do, again and again.
    Top(top::Arguments),
    /// Show every drop, fallback and event counter.
    Counters(counters::Arguments),
    /// Show the server of this network namespace.
    Status(status::Arguments),
    /// Guarantee rates, budgets and CPU time, and show what is guaranteed.
    Qos(qos::Arguments),
    /// Install protocol extensions in the packet filter, and show them.
    Ext(ext::Arguments),
    /// Check whether Portolan can run here, and say what to do.
    Doctor(doctor::Arguments),
    /// Show unmodified programs on Portolan between two namespaces of this machine. Needs root.
    Demo,
    /// Measure Portolan beside the kernel's stack. Needs root.
    Bench(bench::Arguments),
}

/// How to reach the server.
#[derive(clap::Args)]
struct ServerAddress {
    /// The server's control socket [default: that of this network namespace].
    #[arg(long, value_name = "PATH", env = "PORTOLAN_SOCKET", global = true)]
    socket: Option<PathBuf>,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run(arguments) => run::run(arguments),
        Command::Ss(arguments) => ss::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Counters(arguments) => counters::run(&arguments),
        Command::Status(arguments) => status::status(&arguments),
        Command::Qos(arguments) => qos::run(&arguments),
        Command::Ext(arguments) => ext::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Demo => demo::run(),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::Arguments;

    #[test]
    fn the_command_line_is_declared_without_contradiction() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn no_command_line_makes_the_parser_panic() {
        const WORDS: [&str; 38] = [
            "run", "ss", "counters", "status", "top", "bench", "--", "--socket", "--json", "-i",
            "-a", "-n", "--help", "-w", "1", "tcp", "qos", "set", "del", "group", "join", "pid",
            "user", "flow", "tx", "rx", "cpu", "--rate", "20mbit", "--slice", "4ms", "--adapt",
            "ext", "install", "list", "stats", "remove", "--udp",
        ];
        portolan_fuzz::check!(500)
            .with_type::<Vec<(u8, String)>>()
            .for_each(|words| {
                let line = words.iter().take(12).map(|(known, other)| {
                    WORDS
                        .get(usize::from(known % 48))
                        .map_or(other.as_str(), |word| *word)
                });
                let _ = Arguments::try_parse_from(["portolan"].into_iter().chain(line));
            });
    }
}
