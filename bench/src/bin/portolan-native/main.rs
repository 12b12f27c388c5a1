//! Traffic by Portolan's own interface: the socket calls and the shared buffers of `portolan::net`, on the same
//! sessions, without a preloaded library. Servers run until they are killed, and print a line of JSON for each
//! connection; clients print one.
#![deny(unsafe_code)]

mod bulk;
mod cases;
mod fork;
mod pattern;
mod ping;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use crate::bulk::{Plan, Work};
use crate::cases::Case;

#[derive(Parser)]
#[command(
    name = "portolan-native",
    version,
    about = "Traffic by Portolan's own interface, for benchmarks and tests"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The interface by which a program moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Interface {
    /// It reads into and writes from a buffer of its own.
    Socket,
    /// It uses the library's memory.
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Tcp,
    Udp,
}

#[derive(Subcommand)]
enum Command {
    /// Receives each connection to its end and answers with the number of bytes.
    Sink {
        address: SocketAddr,
        #[arg(long, value_enum, default_value = "shared")]
        by: Interface,
        #[arg(long, value_enum, default_value = "none")]
        work: Work,
    },
    /// Sends to the `sink` of this program or of `portolan-traffic`.
    Bulk {
        address: SocketAddr,
        #[arg(long, value_enum, default_value = "shared")]
        by: Interface,
        #[arg(long, value_enum, default_value = "none")]
        work: Work,
        #[arg(long, default_value_t = 65_536)]
        size: usize,
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Answers every message of `ping` with the same bytes.
    Echo {
        protocol: Transport,
        address: SocketAddr,
        #[arg(long, value_enum, default_value = "shared")]
        by: Interface,
        /// Bytes per message; TCP answers when that many have arrived.
        #[arg(long, default_value_t = 1)]
        size: usize,
    },
    /// Measures round trips.
    Ping {
        protocol: Transport,
        address: SocketAddr,
        #[arg(long, value_enum, default_value = "shared")]
        by: Interface,
        #[arg(long, default_value_t = 1)]
        size: usize,
        #[arg(long, default_value_t = 1000)]
        count: usize,
    },
    /// Listens, receives pattern bytes on a connection, and plays a case with them.
    Case { case: Case, address: SocketAddr },
}

fn main() -> ExitCode {
    match perform(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("portolan-native: {error}");
            ExitCode::FAILURE
        }
    }
}

fn perform(command: Command) -> io::Result<()> {
    match command {
        Command::Sink { address, by, work } => bulk::sink(address, by, work),
        Command::Bulk {
            address,
            by,
            work,
            size,
            seconds,
        } => print(&bulk::send(
            address,
            Plan {
                by,
                work,
                size,
                duration: Duration::from_secs_f64(seconds),
            },
        )?),
        Command::Echo {
            protocol,
            address,
            by,
            size,
        } => ping::echo((protocol, address), by, size),
        Command::Ping {
            protocol,
            address,
            by,
            size,
            count,
        } => print(&ping::ping((protocol, address), by, (size, count))?),
        Command::Case { case, address } => cases::play(case, address),
    }
}

fn print(report: &impl serde::Serialize) -> io::Result<()> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}
