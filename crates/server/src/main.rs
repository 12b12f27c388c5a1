//! `portoland`: command line, logging, exit codes.
#![forbid(unsafe_code)]

mod adoption;
mod calls;
mod captures;
mod channels;
mod config;
mod confine;
mod connections;
mod control_socket;
mod extensions;
mod handles;
mod instance;
mod leaving;
mod listeners;
mod local_ends;
mod locals;
mod log_limit;
mod migration;
mod packets;
mod perform;
mod poll;
mod priorities;
mod qos;
mod random;
mod raw;
mod reload;
mod report;
mod requests;
mod reservation;
mod server;
mod supervisor;
mod udp;
mod user_threads;
mod wake_directory;
mod watch;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::{CommandFactory, Parser, ValueEnum};
use portolan_sys::device::{self, DeviceError};
use portolan_sys::{accounts, capability::Capability, namespace, wake_cost};
use tracing::error;
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Config, ConfigError, ConfigSource};
use crate::confine::confine;
use crate::instance::{Instance, InstanceError, claim_namespace};
use crate::log_limit::LogLimit;
use crate::server::{
    Departure, Server, StartError, raise_descriptor_limit, widen_descriptor_table,
};

/// The network server of Portolan.
///
/// Owns what the programs of one network namespace share: ports, the set-up and tear-down of connections, the
/// packet filters, and sessions that no program holds. It attaches a packet filter to each interface; packets
/// that do not belong to Portolan continue to the kernel's stack. There is one server per network namespace; a
/// second one is refused. SIGTERM stops it: connections that programs hold go on, with the filter, until the next
/// server takes them over, and a service manager with a descriptor store keeps those that the server itself holds;
/// if no program uses it, it detaches the filter. SIGINT stops it for good: it resets all connections and detaches
/// the filter.
#[derive(Debug, Parser)]
#[command(name = "portoland", version = version(), max_term_width = 100, after_long_help = AFTER_OPTIONS)]
struct Args {
    /// Configuration file, see portoland.toml(5)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check configuration and command line, and that the devices and the group are there, then exit
    #[arg(long)]
    check: bool,
    /// Device to manage; may be repeated; replaces the list of the configuration file
    #[arg(long = "interface", value_name = "NAME")]
    interfaces: Vec<String>,
    /// Control socket [default: $PORTOLAN_SOCKET, else /run/portolan/<namespace>/control]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Format of log lines
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// Write the manual page into a directory, then exit
    #[arg(long, value_name = "DIRECTORY", hide = true)]
    manual: Option<PathBuf>,
    /// Print the command reference in Markdown, then exit
    #[arg(long, hide = true)]
    markdown: bool,
}

/// Made once: the parser keeps a reference.
fn version() -> &'static str {
    static VERSION: LazyLock<String> =
        LazyLock::new(|| portolan_manual::version(portolan_proto::PROTOCOL));
    &VERSION
}

/// Upper bound of the default spin time, whatever a sleep costs.
const LONGEST_SPIN_US: u32 = 50;

/// The end of `--help`, and of portoland(8).
const AFTER_OPTIONS: &str = "Privileges:
    CAP_NET_ADMIN, CAP_NET_RAW  interfaces, taps, routes and raw sockets
    CAP_BPF, CAP_PERFMON  packet filters
    CAP_SYS_NICE  reservations of CPU time

Environment:
    PORTOLAN_LOG  log level: error, warn, info, debug or trace, also by module
    PORTOLAN_SOCKET  as --socket

Files:
    /run/portolan/<namespace>/control  control socket, by the inode of the network namespace

Exit status:
    0  stopped by a signal, or the configuration is valid
    1  failure
    2  wrong usage or configuration
    3  another server runs in this network namespace
    4  privileges are missing";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
    /// To the system's journal, with priorities and fields; text where there is none.
    Journal,
}

/// The exit status. 2 is also clap's for a wrong command line.
#[derive(Clone, Copy, Debug)]
enum Exit {
    Success = 0,
    Failure = 1,
    Configuration = 2,
    AlreadyRunning = 3,
    Privileges = 4,
}

/// Why the server did not run, or stopped.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("`interfaces`: {0}")]
    Device(#[from] DeviceError),
    #[error("`socket_group`: no group is named {0:?}")]
    Group(String),
    #[error(transparent)]
    Instance(#[from] InstanceError),
    #[error("missing {0}: run as root, or grant it with `setcap` or systemd's AmbientCapabilities")]
    Privileges(String),
    #[error("cannot tell the network namespace: {0}")]
    Namespace(rustix::io::Errno),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("the event loop failed: {0}")]
    Loop(rustix::io::Errno),
}

impl Failure {
    fn exit(&self) -> Exit {
        match self {
            Failure::Config(_) | Failure::Device(_) | Failure::Group(_) => Exit::Configuration,
            Failure::Instance(InstanceError::Running { .. } | InstanceError::RunningHere(_)) => {
                Exit::AlreadyRunning
            }
            Failure::Privileges(_) => Exit::Privileges,
            _ => Exit::Failure,
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(printed) = print_manual(&args) {
        return printed;
    }
    start_logging(args.log_format);
    let exit = match run(args) {
        Ok(()) => Exit::Success,
        Err(failure) => {
            error!("{failure}");
            failure.exit()
        }
    };
    ExitCode::from(exit as u8)
}

/// Writes or prints the manual, if requested.
fn print_manual(args: &Args) -> Option<ExitCode> {
    if args.markdown {
        print!("{}", portolan_manual::markdown(&Args::command()));
        return Some(ExitCode::SUCCESS);
    }
    let directory = args.manual.as_ref()?;
    let see_also = [("portolan", 1), ("portoland.toml", 5), ("tc-bpf", 8)];
    Some(
        match portolan_manual::write_pages(Args::command(), 8, &see_also, directory) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("portoland: {}: {error}", directory.display());
                ExitCode::FAILURE
            }
        },
    )
}

fn run(args: Args) -> Result<(), Failure> {
    let source = configuration(&args);
    let mut config = source.read()?;
    check_host(&config)?;
    if args.check {
        println!("configuration is sound");
        return Ok(());
    }
    check_privileges()?;
    let socket = match &config.socket {
        Some(path) => path.clone(),
        None => namespace::control_path().map_err(Failure::Namespace)?,
    };
    let instance = Instance::claim(&socket)?;
    let _namespace = claim_namespace()?;
    config.spin_us.get_or_insert_with(longest_spin);
    raise_descriptor_limit();
    widen_descriptor_table();
    confine(&config, &source, &instance);
    let mut server = Server::start(config, source, &instance)?;
    server.run().map_err(Failure::Loop)?;
    match server.stop() {
        Departure::ForGood => {}
        Departure::ForSuccessor => instance.leave(),
    }
    Ok(())
}

/// Attempts at measuring the cost of a wake-up.
const MEASUREMENTS: usize = 3;

/// Returns how many microseconds a sleep and a wake-up cost here, for both processors: a longer spin does not pay.
fn longest_spin() -> u32 {
    // A machine that is busy for a moment must not turn spinning off for good.
    let measured = (0..MEASUREMENTS).find_map(|_| wake_cost::measure().ok());
    let wake_up = measured.unwrap_or_default();
    let both = u32::try_from((2 * wake_up).as_micros()).unwrap_or(LONGEST_SPIN_US);
    both.min(LONGEST_SPIN_US)
}

/// Returns the sources of the configuration: the file, then the command line.
fn configuration(args: &Args) -> ConfigSource {
    let from_environment = || std::env::var_os("PORTOLAN_SOCKET").map(PathBuf::from);
    ConfigSource {
        file: args.config.clone(),
        interfaces: args.interfaces.clone(),
        socket: args.socket.clone().or_else(from_environment),
    }
}

/// Checks that what the configuration names exists and is usable.
fn check_host(config: &Config) -> Result<(), Failure> {
    for name in &config.interfaces {
        device::by_name(name)?;
    }
    match &config.socket_group {
        Some(group) if accounts::gid_of(group).is_none() => Err(Failure::Group(group.clone())),
        _ => Ok(()),
    }
}

fn check_privileges() -> Result<(), Failure> {
    let missing: Vec<&str> = Capability::missing().map(Capability::name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Failure::Privileges(missing.join(", ")))
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_env("PORTOLAN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    if let LogFormat::Journal = format
        && let Ok(journal) = tracing_journald::layer()
    {
        let journal = journal
            .with_field_prefix(Some("PORTOLAN".to_owned()))
            .with_priority_mappings(PriorityMappings {
                info: Priority::Informational,
                ..PriorityMappings::new()
            });
        return tracing_subscriber::registry()
            .with(filter)
            .with(LogLimit::default())
            .with(journal)
            .init();
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Json => builder.json().finish().with(LogLimit::default()).init(),
        LogFormat::Text | LogFormat::Journal => {
            builder.finish().with(LogLimit::default()).init();
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Args;

    #[test]
    fn the_command_reference_is_up_to_date() {
        let page = include_str!("../../../docs/reference/portoland.md");
        let made = portolan_manual::markdown(&Args::command());
        assert!(page.ends_with(&made), "`make doc` writes it anew");
    }
}
