//! The command `portolan`: runs programs on Portolan, shows the state of the server, checks the machine, and
//! measures. It only sends requests to the server; it never holds a session.
#![forbid(unsafe_code)]

mod capture;
mod counters;
mod doctor;
mod enable;
mod ext;
mod installed;
mod json;
mod linkage;
mod manual;
mod measure;
mod metrics;
mod nstat;
mod ps;
mod qos;
mod reload;
mod run;
mod server;
mod ss;
mod status;
mod table;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use portolan_bench_arguments::{Bench, Report, exit};

/// User-level TCP/IP for unmodified programs.
///
/// Runs programs on Portolan, lists sessions and counters, reserves rates and CPU time, installs protocol
/// extensions, checks the machine, and measures.
#[derive(Parser)]
#[command(name = "portolan", version = version(), max_term_width = 100, after_long_help = manual::AFTER_OPTIONS)]
struct Arguments {
    // Accepted before the command, and by each command, too.
    #[command(flatten)]
    _server: ServerAddress,
    /// Print JSON, if the command does.
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

impl Arguments {
    /// Passes `--json` before the command on to the command, or refuses it.
    fn into_command(mut self) -> Result<Command, clap::Error> {
        if self.json {
            let Some(json) = self.command.json() else {
                return Err(Arguments::command().error(
                    ErrorKind::ArgumentConflict,
                    "the option '--json' is not one of this command",
                ));
            };
            *json = true;
        }
        Ok(self.command)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with its sockets on Portolan.
    ///
    /// Sets LD_PRELOAD to the socket proxy, libportolan_preload.so, and executes the program. Its TCP and UDP
    /// sockets are Portolan's where a server manages the device, and the kernel's everywhere else. No privilege is
    /// needed. Programs that are statically linked, linked to a C library other than glibc, or set-user-ID do not
    /// load the proxy, and Go programs call the kernel themselves; they keep the kernel's sockets, and the command
    /// reports this.
    ///
    /// The proxy reads its variables once, when it is loaded: the program may clear its environment. An invalid
    /// value is reported on standard error and ignored.
    #[command(after_long_help = manual::AFTER_RUN)]
    Run(run::Arguments),
    /// Put a systemd service on Portolan.
    ///
    /// Writes a drop-in below /etc/systemd/system that preloads the socket proxy; how the service is started stays
    /// as it is. Adds permissions that the service's confinement lacks (ExecPaths=, RestrictAddressFamilies=), and
    /// refuses services that cannot run on Portolan, with the reason. Takes effect when the service is restarted.
    Enable(enable::Arguments),
    /// Remove the drop-in that `enable` wrote.
    Disable(enable::DisableArguments),
    /// List the sessions of this network namespace.
    ///
    /// Takes the options and filters of ss(8), and prints its columns. Without -a, -l or a state, sessions that
    /// listen or have ended are left out. For a TCP listener, Recv-Q is the number of connections that wait to be
    /// accepted, and Send-Q the limit of that number.
    ///
    /// With -p, the column Process shows the process that holds the session and its program; `server` for a
    /// connection during set-up and tear-down; or `relayed` for a session whose data the server moves through the
    /// descriptor. A protocol that a program implements itself is in the state RAW, with what it owns (an EtherType,
    /// an IP protocol, a port) as its local address.
    Ss(ss::Arguments),
    /// Show live rates of processes, sessions, users, links and guarantees.
    ///
    /// Shows rates in and out, packets dropped by the packet filter, queues, the CPU time of each process, and
    /// the use of links and guarantees as bars, the busiest first. On a terminal each screen replaces the previous
    /// one, and keys choose the table, its order and its rows: h lists them. A narrow terminal shows fewer columns.
    /// Colours mark drops and retransmissions, unless NO_COLOR is set. If standard output is not a terminal, or with
    /// --batch, tables are printed below each other. No privilege is needed. CPU times and the traffic of links are
    /// read from /proc: processes of other PID namespaces have none.
    ///
    /// The CPU time of a session is that of protocol processing: input, output and their system calls, without
    /// the copies to and from the program. The library measures one in 61 operations and extrapolates; after
    /// 100,000 frames the figure is accurate to a few percent, and too high by up to 0.2 microseconds per frame.
    Top(top::Arguments),
    /// Capture what programs of this host send each other in shared memory.
    ///
    /// Writes local sessions as TCP segments to a pcap-ng file, which tcpdump, tshark and Wireshark read: sessions
    /// between two programs on Portolan on this host send no packets that tcpdump could see. Everyone may capture the
    /// sessions of his own programs, root those of all. A session whose two ends are relayed by the server is not
    /// captured.
    ///
    /// Programs never wait for the capture. What finds no room in a program's buffer is left out and counted, in the
    /// file, too (interface statistics); the gap shows in the sequence numbers. Handshakes and sequence numbers are
    /// made up, since a session in shared memory has none.
    Capture(capture::Arguments),
    /// Show every drop, fallback and event counter.
    ///
    /// Shows the counters of filters, server and libraries that are not zero. The reference of counters explains
    /// each of them.
    Counters(counters::Arguments),
    /// Print metrics, or serve them to Prometheus.
    ///
    /// Prints counters, sessions, programs and guarantees in the text format of OpenMetrics, once, or serves them by
    /// HTTP as /metrics. The reference of metrics lists them. No privilege is needed.
    Metrics(metrics::Arguments),
    /// Show counters since the last call, as nstat(8) does.
    ///
    /// Counters that the kernel has, too, have the kernel's names, so that its figures and Portolan's can be added.
    /// The names of all others are `Portolan` followed by the name in the reference of counters. The values of the
    /// last call are kept in $PORTOLAN_NSTAT_HISTORY, else in $XDG_RUNTIME_DIR, else in /tmp.
    Nstat(nstat::Arguments),
    /// List processes on Portolan, with the number of their sockets on either stack.
    Ps(ps::Arguments),
    /// Explain why a process or a program is on Portolan or not, and what to do.
    Why(ps::WhyArguments),
    /// Show the server of this network namespace.
    ///
    /// Shows its version, process, interfaces, processes and sessions, and the state of the packet filter; while
    /// the sysctl kernel.bpf_stats_enabled is 1, also the filter's mean time per packet. Faults are listed; if
    /// there are any, the exit status is 1.
    Status(status::Arguments),
    /// Have the server read its configuration file again. Needs root.
    ///
    /// The file is applied as a whole or not at all: if a change needs a restart, it is named with the reason, and
    /// the old configuration stays. Settings for programs apply to those that start afterwards.
    Reload(reload::Arguments),
    /// Reserve rates and CPU time, limit what is received, and show guarantees.
    ///
    /// The server admits or refuses each request; a refusal states the reason.
    Qos(qos::Arguments),
    /// Install protocol extensions in the packet filter, and show them.
    ///
    /// An extension is an ELF object that clang compiles for BPF. The server checks it, has the kernel verify
    /// it, and runs it for the packets of one port or protocol.
    Ext(ext::Arguments),
    /// Check whether Portolan can run here, and advise what to do.
    ///
    /// Checks kernel, privileges, devices and server. Each line that is not `ok` states a remedy. Nothing is
    /// changed.
    Doctor(doctor::Arguments),
    /// Show unmodified programs on Portolan between two namespaces of this machine. Needs root.
    ///
    /// Runs redis, nginx, curl and iperf3, and compares them with the kernel's stack.
    Demo,
    /// Compare Portolan's performance with the kernel stack's. Needs root.
    ///
    /// Runs each case on both stacks alternately, between two network namespaces that it creates.
    Bench(Bench),
    /// Measure every table and figure of the papers, and write a page. Needs root.
    ///
    /// Puts the papers' own numbers, the kernel's stack, server-based operation and Portolan's forms side by side, as
    /// index.html and report.json, with each plot as a file in plots/. An interrupted run continues where it stopped.
    Report(Report),
    /// Print the completion script of a shell.
    Completions(manual::Completions),
    /// Write the manual pages into a directory, or print the command reference.
    #[command(hide = true)]
    Manual(manual::Arguments),
}

impl Command {
    /// Its option `--json`, if it has one that takes no value.
    fn json(&mut self) -> Option<&mut bool> {
        match self {
            Command::Ss(arguments) => Some(&mut arguments.json),
            Command::Top(arguments) => Some(&mut arguments.json),
            Command::Counters(arguments) => Some(&mut arguments.json),
            Command::Nstat(arguments) => Some(&mut arguments.json),
            Command::Ps(arguments) => Some(&mut arguments.json),
            Command::Status(arguments) => Some(&mut arguments.json),
            Command::Qos(arguments) => Some(&mut arguments.json),
            Command::Ext(arguments) => Some(&mut arguments.json),
            Command::Doctor(arguments) => Some(&mut arguments.json),
            _ => None,
        }
    }
}

/// How to reach the server.
#[derive(Clone, clap::Args)]
struct ServerAddress {
    /// The server's control socket [default: that of this network namespace].
    #[arg(long, value_name = "PATH", env = "PORTOLAN_SOCKET", global = true)]
    socket: Option<PathBuf>,
}

/// Computed once: clap keeps a reference to it.
fn version() -> &'static str {
    static VERSION: LazyLock<String> =
        LazyLock::new(|| portolan_manual::version(portolan_proto::PROTOCOL));
    &VERSION
}

fn main() -> ExitCode {
    let command = Arguments::parse()
        .into_command()
        .unwrap_or_else(|error| error.exit());
    let outcome = match command {
        Command::Run(arguments) => run::run(arguments),
        Command::Enable(arguments) => enable::run(&arguments),
        Command::Disable(arguments) => enable::disable(&arguments),
        Command::Ss(arguments) => ss::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Capture(arguments) => capture::run(&arguments),
        Command::Counters(arguments) => counters::run(&arguments),
        Command::Metrics(arguments) => metrics::run(&arguments),
        Command::Nstat(arguments) => nstat::run(&arguments),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Why(arguments) => ps::why(&arguments),
        Command::Status(arguments) => status::status(&arguments),
        Command::Reload(arguments) => reload::run(&arguments),
        Command::Qos(arguments) => qos::run(&arguments),
        Command::Ext(arguments) => ext::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Demo | Command::Bench(_) | Command::Report(_) => measure::run(),
        Command::Completions(arguments) => manual::complete(&arguments, Arguments::command()),
        Command::Manual(arguments) => manual::run(&arguments, Arguments::command()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::{Arguments, Command};

    #[test]
    fn the_command_line_is_declared_without_contradiction() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn options_for_all_commands_stand_before_the_command_or_after_it() {
        for line in [
            ["portolan", "--socket", "/s", "status"],
            ["portolan", "status", "--socket", "/s"],
        ] {
            match Arguments::parse_from(line).command {
                Command::Status(status) => {
                    assert_eq!(status.server.socket, Some("/s".into()), "{line:?}")
                }
                _ => unreachable!("status was named"),
            }
        }
    }

    #[test]
    fn json_may_be_asked_for_before_a_command_that_prints_it() {
        let command = |line: &str| {
            Arguments::parse_from(line.split(' '))
                .into_command()
                .map(|mut command| command.json().is_some_and(|json| *json))
        };
        for line in ["portolan --json ss -a", "portolan ss -a --json"] {
            assert!(command(line).unwrap(), "{line}");
        }
        assert!(!command("portolan ss -a").unwrap());
        let refused = command("portolan --json run true").unwrap_err().to_string();
        assert!(refused.contains("'--json'"), "{refused}");
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
