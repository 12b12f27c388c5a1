//! `portolan run`: preloads the socket proxy and executes the program.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow};
use portolan_proto::control::Delivery;

use crate::ServerAddress;
use crate::exit::Failure;
use crate::installed;
use crate::ps::Reason;

pub(crate) const PRELOAD: &str = "libportolan_preload.so";

/// Overrides the path of the proxy, for installations with other directories.
const PRELOAD_VARIABLE: &str = "PORTOLAN_PRELOAD";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Poll the ring for at most this many microseconds before a waiting thread sleeps; 0: sleep at once.
    #[arg(long, value_name = "US")]
    spin: Option<u32>,
    /// Perform the handshakes of listeners in the program itself.
    ///
    /// A flood of SYNs to such a listener then takes no CPU time from other programs.
    #[arg(long)]
    delegate: bool,
    /// Give each session a ring of its own, as long as the server has rings left for the program.
    #[arg(long)]
    direct: bool,
    /// How packets reach the program: shm, ipc, server or shm-ipf.
    ///
    /// shm: a ring in shared memory. ipc: a read of the tap for each packet. server: the server runs TCP and
    /// relays the data. shm-ipf: the ring, filled by a filter in the device's driver, where the server has one.
    #[arg(long, value_name = "FORM", value_parser = delivery)]
    delivery: Option<&'static str>,
    /// Fail, instead of using the kernel's sockets, if there is no server or the program cannot load the socket
    /// proxy.
    ///
    /// The program is not started then, and the exit status is 125. If the server ends later, new sockets
    /// fail.
    #[arg(long)]
    require: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Returns only if the program could not be started.
pub(crate) fn run(arguments: Arguments) -> Result<(), Failure> {
    let preload = find_preload().map_err(Failure::NotTried)?;
    let is_required =
        arguments.require || env::var_os("PORTOLAN").is_some_and(|mode| mode == "require");
    if is_required {
        let server = arguments.server.check_in_time();
        server.map_err(Failure::NotTried)?;
    }
    // Clap requires at least one word.
    let (program, rest) = arguments.command.split_first().expect("a program is named");
    let mut command = Command::new(program);
    command.args(rest);
    match without_proxy(program) {
        None => {
            command.env("LD_PRELOAD", prepend(&preload, env::var_os("LD_PRELOAD")));
        }
        Some((reason, advice)) if is_required => {
            let name = program.to_string_lossy();
            let advice = advice.map_or_else(String::new, |advice| format!("; {advice}"));
            return Err(Failure::NotTried(anyhow!("{name} {reason}{advice}")));
        }
        Some((reason, advice)) => {
            let name = program.to_string_lossy();
            eprintln!("portolan: {name} {reason}; using the kernel's sockets");
            if let Some(advice) = advice {
                eprintln!("portolan: {advice}");
            }
        }
    }
    if let Some(socket) = &arguments.server.socket {
        // The program may change its working directory.
        let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.clone());
        command.env("PORTOLAN_SOCKET", socket);
    }
    if let Some(spin) = arguments.spin {
        command.env("PORTOLAN_SPIN", spin.to_string());
    }
    if arguments.delegate {
        command.env("PORTOLAN_DELEGATE", "1");
    }
    if let Some(form) = arguments.delivery {
        command.env("PORTOLAN_DELIVERY", form);
    }
    if arguments.direct {
        command.env("PORTOLAN_DIRECT", "1");
    }
    if arguments.require {
        command.env("PORTOLAN", "require");
    }
    let error = command.exec();
    let kind = error.kind();
    let error = anyhow!(error).context(program.to_string_lossy().into_owned());
    Err(match kind {
        ErrorKind::NotFound => Failure::NotFound(error),
        _ => Failure::NotExecutable(error),
    })
}

fn delivery(name: &str) -> Result<&'static str, String> {
    let names = Delivery::ALL.map(Delivery::name);
    let known = Delivery::from_name(name).map(Delivery::name);
    known.ok_or_else(|| format!("there are {}", names.join(", ")))
}

/// Returns why the program cannot load the proxy, and what to do about it; None if it can.
fn without_proxy(program: &OsStr) -> Option<(&'static str, Option<&'static str>)> {
    let reason = Reason::of_program(program);
    let words = reason.words().strip_prefix("kernel: ")?;
    Some((words, reason.advice()))
}

pub(crate) fn find_preload() -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(PRELOAD_VARIABLE) {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(anyhow!(
                "{PRELOAD_VARIABLE}: {} is not a file",
                path.display()
            ))
        };
    }
    installed::find(PRELOAD).with_context(|| format!("set {PRELOAD_VARIABLE}"))
}

/// Puts our proxy first, so that other preloaded libraries see the calls that it passes on.
fn prepend(preload: &Path, others: Option<OsString>) -> OsString {
    let mut value = preload.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        value.push(OsStr::new(":"));
        value.push(others);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxy_goes_before_other_preloaded_libraries() {
        let preload = Path::new("/lib/p.so");
        assert_eq!(prepend(preload, None), "/lib/p.so");
        assert_eq!(prepend(preload, Some("".into())), "/lib/p.so");
        assert_eq!(prepend(preload, Some("/x.so".into())), "/lib/p.so:/x.so");
    }
}
