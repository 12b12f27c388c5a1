//! The bed of every measurement: two hosts, which are network namespaces, joined by one veth wire
//! with default offloads, a Portolan server on each, and one core for each side.

use std::fmt;
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use portolan_netns::{Impairment, Namespace};
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_proto::qos::{QosReply, QosRequest};
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_sys::namespace::control_path;
use portolan_sys::unix::Connection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{Background, ProcessError, run};
use crate::tools::{MissingTool, Tools};

/// How long a server or a service may take to come up.
const READY_LIMIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(50);

/// What the end of the wire is called on both hosts.
pub const INTERFACE: &str = portolan_netns::Bed::DEVICE;

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

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Client => "client",
            Side::Server => "server",
        })
    }
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
    #[error("portoland does not answer on the {side} host; it said: {said}")]
    NotReady { side: Side, said: String },
    #[error("portoland on the {side} host cannot be asked: {said}")]
    Unasked { side: Side, said: String },
    #[error("nothing is guaranteed: {0}")]
    Refused(String),
}

/// A service that did not come up.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("port {port} is not given up by its last listener")]
    Taken { port: u16 },
    #[error("{program} does not listen on port {port}; it said: {said}")]
    Silent {
        program: String,
        port: u16,
        said: String,
    },
}

/// Two hosts and what runs on them; all of it is gone when the bed is dropped.
pub struct Bed {
    pub client: Host,
    pub server: Host,
    wire: portolan_netns::Bed,
    /// Lines that both configuration files end with.
    settings: String,
    tools: Tools,
    directory: PathBuf,
}

/// One end of the wire.
pub struct Host {
    pub address: IpAddr,
    /// The core that everything on this host is pinned to.
    core: usize,
    daemon: Option<Background>,
}

impl Bed {
    /// Two hosts on a veth pair with a Portolan server on each.
    pub fn new() -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::veth())?.with_daemons()
    }

    /// Two hosts on a wire with faults, with a Portolan server on each.
    pub fn impaired(impairment: Impairment) -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::impaired(impairment))?.with_daemons()
    }

    /// Two hosts with two routers between them, whose link takes `mtu` bytes, with a Portolan
    /// server on each host.
    pub fn routed(mtu: u32) -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::routed(mtu))?.with_daemons()
    }

    /// Two hosts on a switch, with a Portolan server on each.
    pub fn switched() -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::switched())?.with_daemons()
    }

    /// One more host on the switch, without a Portolan server.
    pub fn guest(&self, number: u8) -> Namespace {
        self.wire.guest(number)
    }

    /// Makes the hosts known by their IPv6 addresses.
    #[must_use]
    pub fn over_ipv6(mut self) -> Bed {
        self.client.address = portolan_netns::Bed::A6;
        self.server.address = portolan_netns::Bed::B6;
        self
    }

    /// Two hosts without Portolan servers.
    pub fn bare(wire: portolan_netns::Bed) -> Result<Bed, BedError> {
        let tools = Tools::locate()?;
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        let name = format!("portolan-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).map_err(|source| BedError::File {
            path: directory.clone(),
            source,
        })?;
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let host = |address, core| Host {
            address,
            core: core % cores,
            daemon: None,
        };
        Ok(Bed {
            client: host(portolan_netns::Bed::A4, 0),
            server: host(portolan_netns::Bed::B4, 1),
            wire,
            settings: String::new(),
            tools,
            directory,
        })
    }

    /// Lines for the configuration of the servers that are started from now on.
    pub fn set_settings(&mut self, lines: &str) {
        self.settings = lines.to_owned();
    }

    /// What the wire did so far.
    pub fn counters(&self) -> portolan_netns::Counters {
        self.wire.counters()
    }

    /// Which congestion control the kernel's sockets have on this wire.
    pub fn set_kernel_congestion(&self, name: &str) {
        self.wire.set_kernel_congestion(name);
    }

    fn with_daemons(mut self) -> Result<Bed, BedError> {
        self.start_daemon(Side::Client)?;
        self.start_daemon(Side::Server)?;
        Ok(self)
    }

    /// Starts `portoland` on one host and waits until it answers.
    pub fn start_daemon(&mut self, side: Side) -> Result<(), BedError> {
        let config = self.file(&format!("{side}.toml"));
        let log = self.file(&format!("{side}.log"));
        let prepare = || {
            let settings = &self.settings;
            fs::write(
                &config,
                format!("interfaces = [\"{INTERFACE}\"]\n{settings}"),
            )?;
            File::options().create(true).append(true).open(&log)
        };
        let log = prepare().map_err(|source| BedError::File {
            path: log.clone(),
            source,
        })?;
        let mut command = self.exec(side, &self.tools.portoland);
        command.arg("--config").arg(&config).stderr(log);
        let daemon = Background::start(&mut command)?;
        self.await_daemon(side, daemon)
    }

    fn await_daemon(&mut self, side: Side, mut daemon: Background) -> Result<(), BedError> {
        let start = Instant::now();
        while self.portolan(side, &["status"]).is_err() {
            if start.elapsed() > READY_LIMIT || !daemon.is_running() {
                return Err(BedError::NotReady {
                    side,
                    said: self.daemon_log(side),
                });
            }
            std::thread::sleep(POLL);
        }
        self.host_mut(side).daemon = Some(daemon);
        Ok(())
    }

    /// What `portoland` on one host has logged.
    pub fn daemon_log(&self, side: Side) -> String {
        fs::read_to_string(self.file(&format!("{side}.log")))
            .unwrap_or_default()
            .trim()
            .to_owned()
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
        SocketAddr::new(self.server.address, port)
    }

    /// A program on one host, on its core, with its sockets on one stack.
    pub fn command(&self, side: Side, stack: Stack, program: &str) -> Command {
        let words = self.words(stack, program);
        let mut command = self.exec(side, &words[0]);
        command.args(&words[1..]);
        command
    }

    /// A program on the server host, on the other host's core: a client that needs no wire.
    pub fn neighbour(&self, stack: Stack, program: &str) -> Command {
        let words = self.words(stack, program);
        let mut command = self.exec_on(Side::Server, self.client.core, &words[0]);
        command.args(&words[1..]);
        command
    }

    /// A program in the host's namespace, on the host's core.
    fn exec(&self, side: Side, program: &Path) -> Command {
        self.exec_on(side, self.host(side).core, program)
    }

    fn exec_on(&self, side: Side, core: usize, program: &Path) -> Command {
        let mut command = self.namespace(side).exec("taskset");
        command.args(["-c", &core.to_string()]).arg(program);
        command
    }

    /// Has what comes to a host be processed on its own core, and not on that of who sent it.
    pub fn steer(&self, side: Side) -> Result<(), ProcessError> {
        let mask = 1_u64 << self.host(side).core;
        let line = format!(
            "mount -t sysfs sysfs /sys && for queue in /sys/class/net/{}/queues/rx-*; \
             do echo {mask:x} > $queue/rps_cpus; done",
            portolan_netns::Bed::DEVICE
        );
        // It sees its own namespace's devices.
        let mut shell = self.namespace(side).exec("unshare");
        run(shell.args(["-m", "sh", "-ec", &line])).map(drop)
    }

    pub fn namespace(&self, side: Side) -> &Namespace {
        match side {
            Side::Client => &self.wire.a,
            Side::Server => &self.wire.b,
        }
    }

    /// The words that start a program with its sockets on one stack, to be put after those of a
    /// tracer or of another user's shell.
    pub fn words(&self, stack: Stack, program: &str) -> Vec<PathBuf> {
        let program = match program {
            "portolan-traffic" => self.tools.traffic.clone(),
            "portolan-owner" => self.tools.owner.clone(),
            "portolan-native" => self.tools.native.clone(),
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

    /// Portolan's own command on one host, to be started.
    pub fn own_command(&self, side: Side) -> Command {
        self.exec(side, &self.tools.portolan)
    }

    /// A program that owns protocol extensions, on one host.
    pub fn owner_command(&self, side: Side) -> Command {
        self.exec(side, &self.tools.owner)
    }

    /// Portolan's own command on one host, run to its end.
    pub fn portolan(&self, side: Side, arguments: &[&str]) -> Result<String, ProcessError> {
        run(self.exec(side, &self.tools.portolan).args(arguments))
    }

    /// Changes or looks at guarantees on one host, as root.
    pub fn ask_qos(&self, side: Side, request: QosRequest) -> Result<QosReply, BedError> {
        let asked = self
            .namespace(side)
            .enter(|| ask(RequestBody::Qos(request)));
        match asked {
            Ok(ReplyBody::Qos(QosReply::Refused(refusal))) => {
                Err(BedError::Refused(refusal.reason))
            }
            Ok(ReplyBody::Qos(reply)) => Ok(reply),
            Ok(other) => Err(BedError::Unasked {
                side,
                said: format!("{other:?}"),
            }),
            Err(said) => Err(BedError::Unasked { side, said }),
        }
    }

    /// Starts a TCP service on the server host and waits until it listens. A port that its last
    /// listener has not given up yet is waited for first.
    pub fn serve(
        &self,
        stack: Stack,
        port: u16,
        program: &str,
        arguments: &[&str],
    ) -> Result<Background, ServeError> {
        let mut command = self.command(Side::Server, stack, program);
        command.args(arguments).stdout(Stdio::null());
        self.serve_command(port, program, &mut command)
    }

    /// As [`Bed::serve`] on Portolan, by a program that performs the handshakes of its port itself.
    pub fn serve_delegated(
        &self,
        port: u16,
        program: &str,
        arguments: &[&str],
    ) -> Result<Background, ServeError> {
        let mut command = self.command(Side::Server, Stack::Portolan, program);
        command.args(arguments).stdout(Stdio::null());
        command.env("PORTOLAN_DELEGATE", "1");
        self.serve_command(port, program, &mut command)
    }

    /// As [`Bed::serve`] on the kernel's stack, for our traffic program, whose output goes to a file. It runs
    /// ahead of everybody else, so that it sees what arrives when it arrives.
    pub fn observe(
        &self,
        port: u16,
        arguments: &[&str],
        output: File,
    ) -> Result<Background, ServeError> {
        let mut command = self.command(Side::Server, Stack::Kernel, "chrt");
        command.args(["--fifo", "1"]).arg(&self.tools.traffic);
        command.args(arguments).stdout(output);
        self.serve_command(port, "portolan-traffic", &mut command)
    }

    /// As [`Bed::serve`], with a command that is complete but for its input and errors.
    pub fn serve_command(
        &self,
        port: u16,
        program: &str,
        command: &mut Command,
    ) -> Result<Background, ServeError> {
        let start = Instant::now();
        while self.is_listening(port) {
            if start.elapsed() > READY_LIMIT {
                return Err(ServeError::Taken { port });
            }
            std::thread::sleep(POLL);
        }
        let log = self.file("service.log");
        command.stdin(Stdio::null());
        command.stderr(File::create(&log).map_or_else(|_| Stdio::null(), Stdio::from));
        let mut service = Background::start_with_output(command)?;
        while !self.is_listening(port) {
            if start.elapsed() > READY_LIMIT || !service.is_running() {
                let said = fs::read_to_string(&log)
                    .unwrap_or_default()
                    .trim()
                    .to_owned();
                return Err(ServeError::Silent {
                    program: program.to_owned(),
                    port,
                    said,
                });
            }
            std::thread::sleep(POLL);
        }
        Ok(service)
    }

    /// Whether some socket on the server host listens on a port. A Portolan listener has a kernel
    /// socket that keeps its port. Asking by a connection would disturb some services.
    pub fn is_listening(&self, port: u16) -> bool {
        const LISTEN: &str = "0A";
        let port = format!(":{port:04X}");
        let tables = self.namespace(Side::Server).enter(|| {
            ["tcp", "tcp6"]
                .map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")))
        });
        tables.into_iter().flatten().any(|table| {
            table.lines().skip(1).any(|line| {
                // Number, local address, remote address, state.
                let mut words = line.split_whitespace().skip(1);
                let local = words.next().is_some_and(|local| local.ends_with(&port));
                local && words.nth(1) == Some(LISTEN)
            })
        })
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for side in [Side::Client, Side::Server] {
            if std::thread::panicking() {
                eprintln!(
                    "portoland on the {side} host said:\n{}",
                    self.daemon_log(side)
                );
            }
            self.host_mut(side).daemon = None;
            kill_all(self.namespace(side));
        }
        // The system clears its temporary directory anyway.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// One request to the server of the calling thread's namespace, and its reply.
fn ask(body: RequestBody) -> Result<ReplyBody, String> {
    let exchange = || -> Result<ReplyBody, Box<dyn std::error::Error>> {
        let connection = Connection::connect(&control_path()?)?;
        connection.send(&encode(&Request { id: 1, body }), &[])?;
        let patience = Timespec::try_from(READY_LIMIT)?;
        poll(
            &mut [PollFd::new(&connection, PollFlags::IN)],
            Some(&patience),
        )?;
        let mut buffer = vec![0; MAX_MESSAGE];
        let received = connection.receive(&mut buffer)?;
        Ok(decode::<Reply>(&buffer[..received.length])?.body)
    };
    exchange().map_err(|error| error.to_string())
}

/// Ends what was left behind in a namespace, which lives as long as its last process.
fn kill_all(namespace: &Namespace) {
    let here = format!("net:[{}]", namespace.inode());
    let Ok(processes) = fs::read_dir("/proc") else {
        return;
    };
    for process in processes.flatten() {
        let inside = fs::read_link(process.path().join("ns/net"));
        if inside.is_ok_and(|there| there == Path::new(&here))
            && let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            && let Some(pid) = Pid::from_raw(pid)
        {
            // It may end by itself meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
