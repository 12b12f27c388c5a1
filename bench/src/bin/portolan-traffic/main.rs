//! Traffic for the benchmarks: only plain blocking or spinning sockets of the standard library, so
//! that the same program runs unmodified on the kernel's stack and, under
//! `portolan run`, on Portolan. Servers run until they are killed; clients print one JSON object.
#![forbid(unsafe_code)]

mod bulk;
mod cinema;
mod connections;
mod crowd;
mod ends;
mod flows;
mod gauge;
mod pace;
mod phases;
mod pictures;
mod ping;
mod pour;
mod relay;
mod syns;
mod transfer;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use portolan_bench::film::Film;

#[derive(Parser)]
#[command(
    name = "portolan-traffic",
    version,
    about = "Socket traffic for benchmarks and tests"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answers every message of `ping` with the same bytes.
    Echo {
        protocol: Transport,
        address: SocketAddr,
        /// Bytes per message; TCP answers when that many have arrived.
        #[arg(long, default_value_t = 1)]
        size: usize,
        #[arg(long)]
        spin: bool,
    },
    /// Measures round trips against `echo`.
    Ping {
        protocol: Transport,
        address: SocketAddr,
        #[command(flatten)]
        plan: ping::Plan,
    },
    /// Joins each connection with a new one to another endpoint.
    Relay { address: SocketAddr, to: SocketAddr },
    /// Reads each connection to its end and answers with the number of bytes.
    Sink { address: SocketAddr },
    /// Writes to a `sink` as fast as possible.
    Bulk {
        address: SocketAddr,
        #[arg(long, default_value_t = 65_536)]
        size: usize,
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Receives `flows` and reports to each how much arrived within the window.
    Measure(Flows),
    /// Sends several flows at once to a `measure`.
    Flows(Flows),
    /// Sends to a `gauge` as fast as possible.
    Pour {
        protocol: Transport,
        address: SocketAddr,
        /// Identifies the sender to the receiver.
        #[arg(long)]
        tag: u16,
        /// Bytes per datagram.
        #[arg(long, default_value_t = 1472)]
        size: usize,
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        /// Starts to send at a line on the standard input, or at its end.
        #[arg(long)]
        gate: bool,
    },
    /// Receives from several `pour`s, and reports how much of each arrived in every window.
    Gauge {
        address: SocketAddr,
        /// Duration from the first byte on.
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        #[arg(long, default_value_t = 200)]
        window_ms: u64,
    },
    /// Sends datagrams at a steady rate.
    Pace {
        #[command(flatten)]
        target: pace::Target,
        /// Datagrams per second.
        #[arg(long)]
        rate: f64,
        #[arg(long, default_value_t = 1472)]
        size: usize,
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Receives the datagrams of a `pace` and reports their delays.
    Take {
        address: SocketAddr,
        /// Duration from the first datagram on.
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        /// CPU time spent on each datagram in every other half-second; in the others it is a fifth of that.
        #[arg(long, default_value_t = 0)]
        work_us: u64,
    },
    /// Shows a film to an `audience`.
    Screen {
        /// Endpoint of the first viewer.
        address: SocketAddr,
        #[command(flatten)]
        film: Film,
    },
    /// Receives a `screen` at the ports of its audience.
    Audience {
        address: SocketAddr,
        #[command(flatten)]
        film: Film,
    },
    /// Sends SYNs, or other segments without a connection, at a steady rate, and nothing else. Needs root.
    Syns {
        #[command(flatten)]
        target: pace::Target,
        /// The kind of segment.
        #[arg(long, value_enum, default_value = "syn")]
        segment: syns::Segment,
        /// Segments per second.
        #[arg(long)]
        rate: f64,
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Sends pictures to a `view`.
    Show {
        address: SocketAddr,
        /// Pictures per second.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
        rate: u32,
    },
    /// Receives the pictures of a `show` and decodes them.
    View {
        address: SocketAddr,
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
        /// CPU time of decoding a picture.
        #[arg(long, default_value_t = 9)]
        work_ms: u64,
    },
    /// Accepts connections, writes one byte to each, and closes it.
    Greet { address: SocketAddr },
    /// Opens connections to `greet`, one after the other.
    Connect {
        address: SocketAddr,
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
        /// Stop after this many connections, if that is earlier.
        #[arg(long)]
        count: Option<u64>,
    },
    /// Accepts every connection of a `crowd`, writes one byte and keeps it.
    Gather { address: SocketAddr },
    /// Opens COUNT connections to a `gather`, and keeps them until the standard input ends.
    Crowd {
        address: SocketAddr,
        #[arg(long)]
        count: usize,
    },
    /// Returns every byte to its sender, one connection after the other.
    Mirror { address: SocketAddr },
    /// Sends a file to a `mirror` and stores what comes back.
    Send {
        address: SocketAddr,
        file: PathBuf,
        copy: PathBuf,
    },
    /// Opens a connection, or accepts one with --listen, writes one byte, and holds it until killed.
    Hold {
        address: SocketAddr,
        #[arg(long)]
        listen: bool,
    },
    /// The peer of `hold`: writes from time to time and reports how the connection ends.
    Watch {
        address: SocketAddr,
        #[arg(long)]
        listen: bool,
    },
}

#[derive(clap::Args)]
struct Flows {
    /// Endpoint of the first flow; the ports of the others follow.
    address: SocketAddr,
    #[arg(long, default_value_t = 1)]
    count: u16,
    /// Seconds after the first byte that are not measured.
    #[arg(long, default_value_t = 0.0)]
    skip: f64,
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

impl Flows {
    fn window(&self) -> flows::Window {
        flows::Window {
            skip: Duration::from_secs_f64(self.skip),
            length: Duration::from_secs_f64(self.seconds),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Transport {
    Tcp,
    Udp,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("portolan-traffic: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> io::Result<()> {
    match command {
        Command::Echo {
            protocol: Transport::Tcp,
            address,
            size,
            spin,
        } => ping::echo_tcp(address, size, spin),
        Command::Echo {
            protocol: Transport::Udp,
            address,
            size,
            spin,
        } => ping::echo_udp(address, size, spin),
        Command::Ping {
            protocol: Transport::Tcp,
            address,
            plan,
        } => print(&ping::ping_tcp(address, plan)?),
        Command::Ping {
            protocol: Transport::Udp,
            address,
            plan,
        } => print(&ping::ping_udp(address, plan)?),
        Command::Relay { address, to } => relay::relay(address, to),
        Command::Sink { address } => bulk::sink(address),
        Command::Bulk {
            address,
            size,
            seconds,
        } => print(&bulk::send(
            address,
            size,
            Duration::from_secs_f64(seconds),
        )?),
        Command::Measure(flows) => flows::measure(flows.address, flows.count, flows.window()),
        Command::Flows(flows) => print(&flows::send(flows.address, flows.count, flows.window())?),
        Command::Pour {
            protocol,
            address,
            tag,
            size,
            seconds,
            gate,
        } => {
            let plan = pour::Plan {
                to: address,
                tag,
                duration: Duration::from_secs_f64(seconds),
                is_gated: gate,
            };
            print(&match protocol {
                Transport::Tcp => pour::stream(plan)?,
                Transport::Udp => pour::datagrams(plan, size)?,
            })
        }
        Command::Gauge {
            address,
            seconds,
            window_ms,
        } => print(&gauge::gauge(
            address,
            Duration::from_secs_f64(seconds),
            Duration::from_millis(window_ms.max(1)),
        )?),
        Command::Pace {
            target,
            rate,
            size,
            seconds,
        } => print(&pace::send(
            target,
            rate,
            size,
            Duration::from_secs_f64(seconds),
        )?),
        Command::Take {
            address,
            seconds,
            work_us,
        } => print(&pace::take(
            address,
            Duration::from_secs_f64(seconds),
            Duration::from_micros(work_us),
        )?),
        Command::Screen { address, film } => print(&cinema::show(address, &film)?),
        Command::Audience { address, film } => cinema::attend(address, &film),
        Command::Syns {
            target,
            segment,
            rate,
            seconds,
        } => print(&syns::flood(
            target,
            segment,
            rate,
            Duration::from_secs_f64(seconds),
        )?),
        Command::Show { address, rate } => pictures::show(address, rate),
        Command::View {
            address,
            seconds,
            work_ms,
        } => print(&pictures::view(
            address,
            Duration::from_secs_f64(seconds),
            Duration::from_millis(work_ms),
        )?),
        Command::Greet { address } => connections::greet(address),
        Command::Connect {
            address,
            seconds,
            count,
        } => print(&connections::open(
            address,
            Duration::from_secs_f64(seconds),
            count.unwrap_or(u64::MAX),
        )?),
        Command::Gather { address } => crowd::gather(address),
        Command::Crowd { address, count } => crowd::join(address, count),
        Command::Mirror { address } => transfer::mirror(address),
        Command::Send {
            address,
            file,
            copy,
        } => print(&transfer::send(address, &file, &copy)?),
        Command::Hold { address, listen } => ends::hold(address, listen),
        Command::Watch { address, listen } => print(&ends::watch(address, listen)?),
    }
}

fn print(result: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer(io::stdout().lock(), result)?;
    println!();
    Ok(())
}
