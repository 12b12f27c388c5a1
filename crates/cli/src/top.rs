//! `portolan top`: live rates of sessions, processes, users and links, and the use of guarantees. Rates are differences
//! of two snapshots; all figures of sessions are as claimed by their holders.

mod app;
mod screen;
mod sheet;
mod tabs;
mod terminal;
mod view;

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::QosReport;
use portolan_proto::report::{CounterReport, SessionReport};

use self::app::App;
use self::sheet::Arrangement;
use self::tabs::Tab;
use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json_line;
use crate::server::unexpected;
pub(crate) use crate::top::view::View;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Interval between two screens, from 0.1 to 3600.
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = delay)]
    delay: Duration,
    /// End after N screens.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Print the screens below each other and in full, for files and programs.
    ///
    /// This is the default if standard output is not a terminal.
    #[arg(short, long)]
    batch: bool,
    /// The table to start with; with --batch, print it alone [default: processes; with --batch, all].
    #[arg(long, value_name = "TABLE")]
    view: Option<Tab>,
    /// Sort by the first column whose head begins with COLUMN [default: the busiest first].
    #[arg(short = 'o', long, value_name = "COLUMN")]
    sort: Option<String>,
    /// Reverse the order.
    #[arg(short, long)]
    reverse: bool,
    /// Show only rows that contain TEXT, in upper or lower case.
    #[arg(
        short,
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,
    /// Print a line of JSON for each screen.
    #[arg(long)]
    pub json: bool,
}

fn delay(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("between 0.1 and 3600".to_owned())
    }
}

/// A snapshot of all figures.
struct Look {
    at: Instant,
    sessions: Vec<SessionReport>,
    counters: Vec<CounterReport>,
    guarantees: QosReport,
    server: u32,
    /// CPU time of each process that holds a session, and of the server.
    cpu: Vec<(u32, Duration)>,
    /// All devices of this network namespace.
    devices: HashMap<String, DeviceBytes>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let first = Look::take(&arguments.server)?;
    let start = arguments.view.unwrap_or(Tab::Processes);
    let arrangement = arguments.arrangement(start);
    if arguments.sort.is_some() && arrangement.sorted_by.is_none() {
        let columns = start.heads().join(", ");
        return Err(Failure::Usage(anyhow!("--sort: the columns are {columns}")));
    }
    if arguments.json || arguments.batch || !has_screen() {
        print_all(arguments, first)
    } else {
        terminal::run(arguments, App::new(start, &arrangement), first)
    }
}

/// Returns whether screens can replace each other.
fn has_screen() -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|name| name == "dumb");
    std::io::stdout().is_terminal() && !is_dumb
}

fn print_all(arguments: &Arguments, mut before: Look) -> Result<(), Failure> {
    let mut left = arguments.iterations;
    while left != Some(0) {
        std::thread::sleep(arguments.delay);
        let now = Look::take(&arguments.server)?;
        let view = View::between(&before, &now);
        if arguments.json {
            print_json_line(&view)?;
        } else {
            arguments.print_batch(&view)?;
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

impl Arguments {
    /// Returns the order of a table; tables without the column have their own.
    fn arrangement(&self, tab: Tab) -> Arrangement {
        Arrangement {
            sorted_by: self.sort.as_ref().and_then(|column| tab.column(column)),
            is_reversed: self.reverse,
            filter: self.filter.clone(),
        }
    }

    /// Prints one table, or all that have rows. Processes and guarantees precede sessions, which are many.
    fn print_batch(&self, view: &View) -> Result<(), Failure> {
        const ORDER: [Tab; 5] = [
            Tab::Processes,
            Tab::Users,
            Tab::Links,
            Tab::Guarantees,
            Tab::Sessions,
        ];
        print(format!("portolan: {}", tabs::summary(view).join(", ")))?;
        let chosen = self.view.as_ref().map(std::slice::from_ref);
        for &tab in chosen.unwrap_or(&ORDER) {
            let sheet = tab.sheet(view, &self.arrangement(tab));
            if self.view.is_none() && sheet.rows.is_empty() {
                continue;
            }
            print("")?;
            for line in sheet.lines() {
                print(line)?;
            }
        }
        print("")
    }
}

/// Bytes that a device has received and sent.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceBytes {
    received: u64,
    sent: u64,
}

impl Look {
    fn take(server: &ServerAddress) -> Result<Look, Failure> {
        let ReplyBody::Status(status) = server.ask(RequestBody::ReadStatus)? else {
            return Err(unexpected());
        };
        let sessions = server.sessions()?;
        let mut pids: Vec<u32> = sessions.iter().filter_map(view::pid_of).collect();
        pids.push(status.pid);
        pids.sort_unstable();
        pids.dedup();
        let times = pids
            .into_iter()
            .filter_map(|pid| Some((pid, cpu_time(pid)?)));
        Ok(Look {
            at: Instant::now(),
            cpu: times.collect(),
            sessions,
            counters: server.counters()?,
            guarantees: server.guarantees()?,
            server: status.pid,
            devices: device_bytes(),
        })
    }
}

/// Empty if /proc is not mounted.
fn device_bytes() -> HashMap<String, DeviceBytes> {
    let devices = procfs::net::dev_status().unwrap_or_default();
    let bytes = |device: procfs::net::DeviceStatus| DeviceBytes {
        received: device.recv_bytes,
        sent: device.sent_bytes,
    };
    let named = devices.into_iter();
    named.map(|(name, device)| (name, bytes(device))).collect()
}

/// Returns the CPU time of all threads of a process. None if it has ended, or is in another PID namespace.
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    ticks(&stat).map(|ticks| Duration::from_secs(ticks) / TICKS_PER_SECOND)
}

/// `USER_HZ`, which is 100 on all present architectures.
const TICKS_PER_SECOND: u32 = 100;

/// Parses user and system time from proc_pid_stat(5), after the program's name, which may contain any characters.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user.saturating_add(system))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "42 (a) b (c) R 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(ticks("42"), None);
        assert_eq!(ticks("42 (x) R 1"), None);
    }

    #[test]
    fn this_process_has_used_some() {
        assert!(cpu_time(std::process::id()).is_some());
    }

    #[test]
    fn delays_have_limits() {
        assert_eq!(delay("0.5"), Ok(Duration::from_millis(500)));
        for senseless in ["0", "-1", "nan", "1e9", "x", ""] {
            assert!(delay(senseless).is_err(), "{senseless}");
        }
    }
}
