//! `portolan ps` and `portolan why`: lists processes on Portolan with their sockets on either stack, and explains why a
//! process or a program is not on Portolan.

mod reason;

use std::collections::BTreeMap;

use portolan_proto::report::{Holder, SessionReport};
use procfs::process::{FDTarget, Process, all_processes};
use schemars::JsonSchema;
use serde::Serialize;

pub(crate) use self::reason::Reason;
use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::table::{lines, printable};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Include processes without the socket proxy that have kernel sockets.
    #[arg(short, long)]
    all: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// A process with sockets.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProcessView {
    pub pid: u32,
    pub program: String,
    pub uid: u32,
    /// Number of sessions that it holds.
    pub sessions: usize,
    /// TCP and UDP sockets of the kernel's stack; null if the caller may not inspect the process.
    pub kernel_sockets: Option<usize>,
    pub stack: Reason,
}

#[derive(clap::Args)]
pub(crate) struct WhyArguments {
    #[command(flatten)]
    server: ServerAddress,
    /// A process, or the program of a file.
    #[arg(value_name = "PID|PROGRAM")]
    what: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let sessions = sessions_by_pid(&arguments.server.sessions()?);
    let inodes = network_sockets();
    let mut views: Vec<_> = all_processes()?
        .flatten()
        .filter_map(|process| view(&process, &sessions, &inodes))
        .filter(|view| arguments.wants(view))
        .collect();
    views.sort_by_key(|view| view.pid);
    if arguments.json {
        return print_json(&views);
    }
    for line in table(&views) {
        print(line)?;
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, view: &ProcessView) -> bool {
        let is_loaded = view.sessions > 0 || view.stack == Reason::Portolan;
        is_loaded || self.all && view.kernel_sockets.is_some_and(|count| count > 0)
    }
}

fn table(views: &[ProcessView]) -> Vec<String> {
    let row = |view: &ProcessView| {
        vec![
            view.pid.to_string(),
            view.uid.to_string(),
            printable(&view.program),
            view.sessions.to_string(),
            view.kernel_sockets
                .map_or_else(|| "?".to_owned(), |count| count.to_string()),
            view.stack.words().replace(": ", ", "),
        ]
    };
    let rows: Vec<_> = views.iter().map(row).collect();
    lines(
        &["PID", "UID", "Program", "Sessions", "Kernel", "Stack"],
        &rows,
    )
}

/// Prints why a process or a program is on Portolan or not, and what to do.
pub(crate) fn why(arguments: &WhyArguments) -> Result<(), Failure> {
    let Ok(pid) = arguments.what.parse::<i32>() else {
        return tell(&arguments.what, Reason::of_program(arguments.what.as_ref()));
    };
    let process = Process::new(pid).map_err(|error| anyhow::anyhow!(error))?;
    let sessions = sessions_by_pid(&arguments.server.sessions()?);
    let view = view(&process, &sessions, &network_sockets())
        .ok_or_else(|| anyhow::anyhow!("process {pid} has gone"))?;
    let kernel = view
        .kernel_sockets
        .map_or_else(|| "unknown".to_owned(), |count| count.to_string());
    print(format!(
        "{pid} {}: {} sessions of Portolan, {kernel} sockets of the kernel",
        printable(&view.program),
        view.sessions,
    ))?;
    tell(&pid.to_string(), view.stack)?;
    if view.stack == Reason::Portolan && view.kernel_sockets != Some(0) {
        print("sockets that became the kernel's, of all programs together:")?;
        for counter in arguments.server.counters()? {
            let reason = counter.name.strip_prefix("use_kernel_");
            if let (Some(reason), None, 1..) = (reason, &counter.holder, counter.value) {
                print(format!("  {reason:<28} {}", counter.value))?;
            }
        }
    }
    Ok(())
}

fn tell(name: &str, reason: Reason) -> Result<(), Failure> {
    print(format!("{}: {}", printable(name), reason.words()))?;
    match reason.advice() {
        Some(advice) => print(format!("  -> {advice}")),
        None => Ok(()),
    }
}

fn sessions_by_pid(sessions: &[SessionReport]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for session in sessions {
        if let Holder::Process { pid, .. } = session.holder {
            *counts.entry(pid).or_default() += 1;
        }
    }
    counts
}

/// Returns the inodes of the kernel's TCP and UDP sockets in this network namespace.
fn network_sockets() -> Vec<u64> {
    let tcp = [procfs::net::tcp(), procfs::net::tcp6()];
    let udp = [procfs::net::udp(), procfs::net::udp6()];
    let tcp = tcp.into_iter().flatten().flatten().map(|entry| entry.inode);
    let udp = udp.into_iter().flatten().flatten().map(|entry| entry.inode);
    let mut inodes: Vec<_> = tcp.chain(udp).collect();
    inodes.sort_unstable();
    inodes
}

/// Returns None if the process has ended.
fn view(process: &Process, sessions: &BTreeMap<u32, usize>, inodes: &[u64]) -> Option<ProcessView> {
    let pid = process.pid().unsigned_abs();
    let kernel_sockets = process.fd().ok().map(|descriptors| {
        let is_network = |target| match target {
            FDTarget::Socket(inode) => inodes.binary_search(&inode).is_ok(),
            _ => false,
        };
        descriptors
            .flatten()
            .filter(|one| is_network(one.target.clone()))
            .count()
    });
    Some(ProcessView {
        pid,
        program: process.stat().ok()?.comm,
        uid: process.uid().ok()?,
        sessions: sessions.get(&pid).copied().unwrap_or(0),
        kernel_sockets,
        stack: Reason::of_process(process),
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn sockets_of_either_stack_are_counted() {
        let _socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let pid = std::process::id();
        let sessions = BTreeMap::from([(pid, 3)]);
        let view = view(&Process::myself().unwrap(), &sessions, &network_sockets()).unwrap();
        assert_eq!(view.sessions, 3);
        assert!(view.kernel_sockets >= Some(1));
        assert_eq!(view.stack, Reason::NotLoaded);
    }
}
