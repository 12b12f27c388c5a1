//! `portolan top`: live rates of sessions and processes, and the use of guarantees. Rates are differences of two
//! snapshots; all figures of sessions are as claimed by their holders.

mod show;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::QosReport;
use portolan_proto::report::{CounterReport, SessionReport};

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json_line;
use crate::server::unexpected;
pub use crate::top::view::View;

/// Cursor home, and erase below: a terminal shows the new screen in place of the old one.
const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Interval between two screens, from 0.1 to 3600.
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = delay)]
    delay: Duration,
    /// End after N screens.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Print the screens below each other and in full, for files and programs.
    #[arg(short, long)]
    batch: bool,
    /// Print a line of JSON for each screen.
    #[arg(long)]
    json: bool,
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
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let is_screen = std::io::stdout().is_terminal() && !arguments.batch && !arguments.json;
    let mut before = Look::take(&arguments.server)?;
    let mut left = arguments.iterations;
    while left != Some(0) {
        std::thread::sleep(arguments.delay);
        let now = Look::take(&arguments.server)?;
        let view = View::between(&before, &now);
        if arguments.json {
            print_json_line(&view)?;
        } else if is_screen {
            print(format!("{CLEAR}{}", show::screen(&view, rows()).join("\n")))?;
        } else {
            for line in show::screen(&view, usize::MAX) {
                print(line)?;
            }
            print("")?;
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// Returns the number of the terminal's lines, less the one with the cursor.
fn rows() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.map_or(24, |size| usize::from(size.ws_row)).max(2) - 1
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
        })
    }
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
