//! The bed of every measurement: two hosts, which are network namespaces, joined by one veth wire
//! with default offloads, a Portolan server on each, and one core for each side.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::process::{Background, ProcessError, run};
use crate::tools::{MissingTool, Tools};

/// How long a server may take to answer.
const READY_LIMIT_S: u32 = 10;

/// What the wire is called in both hosts.
pub const INTERFACE: &str = "wire0";

/// Beds this process has made, so that several can stand at a time.
static BEDS: AtomicU32 = AtomicU32::new(0);

/// Which stack a program's sockets are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Kernel,
    Portolan,
}

/// Which end of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// A bed that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    #[error(transparent)]
    Tool(#[from] MissingTool),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("cannot prepare {path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("portoland does not answer in {host}: {source}")]
    NotReady { host: String, source: ProcessError },
}

/// Two hosts and what runs on them; all of it is gone when the bed is dropped.
pub struct Bed {
    pub client: Host,
    pub server: Host,
    tools: Tools,
    directory: PathBuf,
}

/// One namespace.
pub struct Host {
    namespace: String,
    pub address: Ipv4Addr,
    /// The core that everything on this host is pinned to.
    core: usize,
    daemon: Option<Background>,
}

impl Bed {
    /// Makes the hosts and the wire, without servers.
    pub fn bare() -> Result<Bed, BedError> {
        let tools = Tools::locate()?;
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        let name = format!("portolan-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir_all(&directory).map_err(|source| BedError::File {
            path: directory.clone(),
            source,
        })?;
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let host = |side: &str, octet, core| Host {
            namespace: format!("{name}-{side}"),
            address: Ipv4Addr::new(10, 77, 0, octet),
            core: core % cores,
            daemon: None,
        };
        let bed = Bed {
            client: host("client", 1, 0),
            server: host("server", 2, 1),
            tools,
            directory,
        };
        bed.lay()?;
        Ok(bed)
    }

    /// Makes the hosts, the wire and a Portolan server on each host.
    pub fn new() -> Result<Bed, BedError> {
        let mut bed = Bed::bare()?;
        bed.start_daemon(Side::Client)?;
        bed.start_daemon(Side::Server)?;
        Ok(bed)
    }

    fn lay(&self) -> Result<(), ProcessError> {
        let (client, server) = (&self.client.namespace, &self.server.namespace);
        ip(&["netns", "add", client])?;
        ip(&["netns", "add", server])?;
        ip(&[
            "link", "add", INTERFACE, "netns", client, "type", "veth", "peer", "name", INTERFACE,
            "netns", server,
        ])?;
        for host in [&self.client, &self.server] {
            let name = &host.namespace;
            let address = format!("{}/24", host.address);
            ip(&["-n", name, "address", "add", &address, "dev", INTERFACE])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", INTERFACE, "up"])?;
        }
        Ok(())
    }

    /// Starts `portoland` on one host and waits until it answers.
    pub fn start_daemon(&mut self, side: Side) -> Result<(), BedError> {
        let config = self.file(&format!("{}.toml", self.host(side).namespace));
        fs::write(&config, format!("interfaces = [\"{INTERFACE}\"]\n")).map_err(|source| {
            BedError::File {
                path: config.clone(),
                source,
            }
        })?;
        let host = self.host(side);
        let mut command = host.command(&self.tools.portoland);
        let daemon = Background::start(command.arg("--config").arg(&config))?;
        let ready = format!(
            "for try in $(seq {}); do '{}' status >/dev/null 2>&1 && exit; sleep 0.1; done; \
             exec '{1}' status",
            READY_LIMIT_S * 10,
            self.tools.portolan.display(),
        );
        run(host.command(Path::new("sh")).args(["-c", &ready])).map_err(|source| {
            BedError::NotReady {
                host: host.namespace.clone(),
                source,
            }
        })?;
        self.host_mut(side).daemon = Some(daemon);
        Ok(())
    }

    /// The server on a host, to be asked about or killed.
    pub fn daemon(&mut self, side: Side) -> &mut Option<Background> {
        &mut self.host_mut(side).daemon
    }

    pub fn host(&self, side: Side) -> &Host {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    fn host_mut(&mut self, side: Side) -> &mut Host {
        match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        }
    }

    /// A path in a directory that goes away with the bed.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Where programs on the server host listen.
    pub fn endpoint(&self, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.server.address), port)
    }

    /// A program on one host, on its core, with its sockets on one stack.
    pub fn command(&self, side: Side, stack: Stack, program: &str) -> Command {
        let words = self.words(stack, program);
        let mut command = self.host(side).command(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// The words that start a program with its sockets on one stack, to be put after those of a
    /// tracer or of another user's shell.
    pub fn words(&self, stack: Stack, program: &str) -> Vec<PathBuf> {
        let program = match program {
            "portolan-traffic" => self.tools.traffic.clone(),
            other => other.into(),
        };
        match stack {
            Stack::Kernel => vec![program],
            Stack::Portolan => vec![
                self.tools.portolan.clone(),
                "run".into(),
                "--require".into(),
                "--".into(),
                program,
            ],
        }
    }

    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Portolan's own command on one host.
    pub fn portolan(&self, side: Side, arguments: &[&str]) -> Result<String, ProcessError> {
        run(self
            .host(side)
            .command(&self.tools.portolan)
            .args(arguments))
    }

    /// Starts a TCP service on the server host and waits until its port accepts.
    pub fn serve(
        &self,
        stack: Stack,
        port: u16,
        program: &str,
        arguments: &[&str],
    ) -> Result<Background, ProcessError> {
        let complaints = self.file("service.log");
        let mut command = self.command(Side::Server, stack, program);
        command.args(arguments);
        command.stderr(File::create(&complaints).map_or_else(|_| Stdio::null(), Stdio::from));
        let service = Background::start(&mut command)?;
        self.wait_for(port).map_err(|source| ProcessError::Silent {
            source: Box::new(source),
            complaints: fs::read_to_string(&complaints)
                .unwrap_or_default()
                .trim()
                .to_owned(),
        })?;
        Ok(service)
    }

    /// Waits, through the kernel's stack of the client host, until a port accepts.
    pub fn wait_for(&self, port: u16) -> Result<(), ProcessError> {
        let endpoint = self.endpoint(port).to_string();
        let limit = READY_LIMIT_S.to_string();
        run(self
            .command(Side::Client, Stack::Kernel, "portolan-traffic")
            .args(["wait", &endpoint, "--seconds", &limit]))?;
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for host in [&mut self.client, &mut self.server] {
            host.daemon = None;
            host.kill_all();
            // A bed that was never laid has no namespace to delete.
            let _ = ip(&["netns", "delete", &host.namespace]);
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Host {
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A program in this namespace, on this host's core.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args([
                "netns",
                "exec",
                &self.namespace,
                "taskset",
                "-c",
                &self.core.to_string(),
            ])
            .arg(program);
        command
    }

    /// Ends what was left behind in the namespace, so that it can be deleted.
    fn kill_all(&self) {
        let Ok(pids) = ip(&["netns", "pids", &self.namespace]) else {
            return;
        };
        for pid in pids.lines().filter_map(|line| line.parse().ok()) {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                // It may end by itself meanwhile.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

fn ip(arguments: &[&str]) -> Result<String, ProcessError> {
    run(Command::new("ip").args(arguments))
}
