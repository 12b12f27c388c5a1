//! `posix-check`: runs topics of socket behaviour in one of two roles and prints what was observed.
//!
//! Each topic runs in a separate process, so that one that hangs or crashes does not affect others.

mod side;
mod topics;

use std::{
    env,
    net::IpAddr,
    path::PathBuf,
    process::{Child, Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use portolan_posix_check::{call, show};
use side::{Role, Side};
use topics::{TOPICS, Topic};

const USAGE: &str = "\
usage: posix-check server|client --local ADDRESS --remote ADDRESS --meet DIRECTORY [--port PORT] [TOPIC…]
       posix-check both [--local ADDRESS] [--meet DIRECTORY] [--port PORT] [TOPIC…]
       posix-check topics";

/// Time limit of a topic.
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let Some(options) = Options::parse(arguments) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let well = match command.as_str() {
        "server" => run_all(Role::Server, &options),
        "client" => run_all(Role::Client, &options),
        "both" => run_both(&options),
        "one-server" => run_here(Role::Server, &options),
        "one-client" => run_here(Role::Client, &options),
        "topics" => {
            TOPICS.iter().for_each(|topic| println!("{}", topic.name));
            true
        }
        _ => {
            eprintln!("{USAGE}");
            false
        }
    };
    if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

struct Options {
    local: IpAddr,
    remote: IpAddr,
    meet: PathBuf,
    port: u16,
    topics: Vec<&'static Topic>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let mut options = Self {
            local: loopback,
            remote: loopback,
            meet: env::temp_dir(),
            port: 7200,
            topics: Vec::new(),
        };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--local" => options.local = arguments.next()?.parse().ok()?,
                "--remote" => options.remote = arguments.next()?.parse().ok()?,
                "--meet" => options.meet = arguments.next()?.into(),
                "--port" => options.port = arguments.next()?.parse().ok()?,
                name => options
                    .topics
                    .push(TOPICS.iter().find(|topic| topic.name == name)?),
            }
        }
        if options.topics.is_empty() {
            options.topics.extend(&TOPICS);
        }
        Some(options)
    }

    /// Returns the command that runs one topic in one role.
    fn command(&self, role: Role, topic: &Topic) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg(match role {
            Role::Server => "one-server",
            Role::Client => "one-client",
        });
        command.args([
            "--local",
            &self.local.to_string(),
            "--remote",
            &self.remote.to_string(),
        ]);
        command
            .arg("--meet")
            .arg(&self.meet)
            .args(["--port", &self.port.to_string(), topic.name]);
        command
    }
}

fn run_here(role: Role, options: &Options) -> bool {
    options
        .topics
        .iter()
        .all(|topic| match Side::meet_other(role, topic.name, options) {
            Ok(mut side) => {
                (topic.run)(&mut side);
                true
            }
            Err(error) => {
                println!("{}: no peer: {error}", topic.name);
                false
            }
        })
}

fn run_all(role: Role, options: &Options) -> bool {
    let well = options.topics.iter().map(|topic| {
        let child = options.command(role, topic).spawn();
        child.is_ok_and(|child| finish(child, topic))
    });
    well.fold(true, |all, one| all & one)
}

/// Runs both roles, and prints the server's lines before the client's, topic by topic.
fn run_both(options: &Options) -> bool {
    let well = options.topics.iter().map(|topic| {
        let server = options.command(Role::Server, topic).spawn();
        let client = options
            .command(Role::Client, topic)
            .stdout(std::process::Stdio::piped())
            .spawn();
        let (Ok(server), Ok(mut client)) = (server, client) else {
            return false;
        };
        let lines = client.stdout.take();
        let served = finish(server, topic);
        let asked = finish(client, topic);
        if let Some(mut lines) = lines {
            let _ = std::io::copy(&mut lines, &mut std::io::stdout());
        }
        served & asked
    });
    well.fold(true, |all, one| all & one)
}

/// Waits for a topic's end, and reports one that hangs or crashes.
fn finish(mut child: Child, topic: &Topic) -> bool {
    let started = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return true,
            Ok(Some(status)) => println!("{}: ended by {status}", topic.name),
            Ok(None) if started.elapsed() < TIMEOUT => {
                thread::sleep(Duration::from_millis(5));
                continue;
            }
            Ok(None) => println!("{}: hung", topic.name),
            Err(error) => println!("{}: lost: {error}", topic.name),
        }
        let _ = child.kill();
        let _ = child.wait();
        return false;
    }
}
