//! The bed of every measurement: two hosts, which are network namespaces, joined by a veth link
//! with default offloads, a Portolan server on each, and one core for each side.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use portolan_netns::{Impairment, Namespace};
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_proto::qos::{QosReply, QosRequest};
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_sys::namespace::control_path;
use portolan_sys::unix::Connection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::statvfs;
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{Background, ProcessError, run};
use crate::tools::{MissingTool, Tools};

/// How long a server or a service may take to start.
const READY_LIMIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(50);
/// Likewise where it costs little.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The name of each bed's directories begins with it; the number of its process follows, and its own.
const DIRECTORY: &str = "portolan-";

/// The file system in memory that Linux has for programs.
const MEMORY: &str = "/dev/shm";

/// Bytes that must be free in it.
const ROOM: u64 = 2 << 30;

/// The name of the link's end on both hosts.
pub const INTERFACE: &str = portolan_netns::Bed::DEVICE;

/// Number of beds that this process has made, so that several can exist at a time.
static BEDS: AtomicU32 = AtomicU32::new(0);

/// The stack of a program's sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Kernel,
    Portolan,
}

/// An end of the link.
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

/// Why a bed could not be made.
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

/// Why a service did not start.
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

/// Two hosts and their programs. Dropping the bed removes all of them.
pub struct Bed {
    pub client: Host,
    pub server: Host,
    wire: portolan_netns::Bed,
    /// The devices of both servers.
    interfaces: Vec<String>,
    /// Lines that are appended to both configuration files.
    settings: String,
    tools: Tools,
    directory: PathBuf,
    /// A directory in memory, if the machine has room for one; made when it is first used.
    memory: OnceLock<Option<PathBuf>>,
}

/// One end of the link.
pub struct Host {
    pub address: IpAddr,
    /// The core that every program of this host is pinned to.
    core: usize,
    daemon: Option<Background>,
}

impl Bed {
    /// Makes two hosts on a veth pair with a Portolan server on each.
    pub fn new() -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::veth())?.with_daemons()
    }

    /// Makes two hosts on an impaired link, with a Portolan server on each.
    pub fn impaired(impairment: Impairment) -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::impaired(impairment))?.with_daemons()
    }

    /// Makes two hosts with two routers between them, whose link has an MTU of `mtu` bytes, with a
    /// Portolan server on each host.
    pub fn routed(mtu: u32) -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::routed(mtu))?.with_daemons()
    }

    /// Makes two hosts on a switch, with a Portolan server on each.
    pub fn switched() -> Result<Bed, BedError> {
        Bed::bare(portolan_netns::Bed::switched())?.with_daemons()
    }

    /// Adds another host to the switch, without a Portolan server.
    pub fn guest(&self, number: u8) -> Namespace {
        self.wire.guest(number)
    }

    /// Sets the hosts' addresses to their IPv6 addresses.
    #[must_use]
    pub fn over_ipv6(mut self) -> Bed {
        self.client.address = portolan_netns::Bed::A6;
        self.server.address = portolan_netns::Bed::B6;
        self
    }

    /// Makes two hosts without Portolan servers.
    pub fn bare(wire: portolan_netns::Bed) -> Result<Bed, BedError> {
        let tools = Tools::locate()?;
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        let name = format!("{DIRECTORY}{}-{number}", std::process::id());
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
            interfaces: vec![INTERFACE.to_owned()],
            settings: String::new(),
            tools,
            directory,
            memory: OnceLock::new(),
        })
    }

    /// Sets lines for the configuration of servers that are started afterwards.
    pub fn set_settings(&mut self, lines: &str) {
        self.settings = lines.to_owned();
    }

    /// Has servers that are started afterwards manage a further device.
    pub fn manage(&mut self, interface: &str) {
        self.interfaces.push(interface.to_owned());
    }

    /// Returns the counters of the link.
    pub fn counters(&self) -> portolan_netns::Counters {
        self.wire.counters()
    }

    /// Sets the congestion control of the kernel's sockets on this link.
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
        let program = self.tools.portoland.clone();
        self.start_daemon_of(side, &program)
    }

    /// Starts a `portoland` of another build.
    pub fn start_daemon_of(&mut self, side: Side, program: &Path) -> Result<(), BedError> {
        let config = self.file(&format!("{side}.toml"));
        let log = self.file(&format!("{side}.log"));
        let prepare = || {
            let (interfaces, settings) = (&self.interfaces, &self.settings);
            fs::write(&config, format!("interfaces = {interfaces:?}\n{settings}"))?;
            File::options().create(true).append(true).open(&log)
        };
        let log = prepare().map_err(|source| BedError::File {
            path: log.clone(),
            source,
        })?;
        let mut command = self.exec(side, program);
        command.arg("--config").arg(&config).stderr(log);
        let daemon = Background::start(&mut command)?;
        self.await_daemon(side, daemon)
    }

    fn await_daemon(&mut self, side: Side, mut daemon: Background) -> Result<(), BedError> {
        let start = Instant::now();
        // No program is started for it, which would take time from the server.
        while self
            .namespace(side)
            .enter(|| ask(RequestBody::ReadStatus))
            .is_err()
        {
            if start.elapsed() > READY_LIMIT || !daemon.is_running() {
                return Err(BedError::NotReady {
                    side,
                    said: self.daemon_log(side),
                });
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.host_mut(side).daemon = Some(daemon);
        Ok(())
    }

    /// Returns the log of `portoland` on one host.
    pub fn daemon_log(&self, side: Side) -> String {
        fs::read_to_string(self.file(&format!("{side}.log")))
            .unwrap_or_default()
            .trim()
            .to_owned()
    }

    /// The server on a host, to inspect or kill.
    pub fn daemon(&mut self, side: Side) -> &mut Option<Background> {
        &mut self.host_mut(side).daemon
    }

    /// Returns the process of the server on a host, if it runs.
    pub fn daemon_pid(&self, side: Side) -> Option<u32> {
        self.host(side).daemon.as_ref().map(Background::pid)
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

    /// Returns a path in a directory that is removed with the bed.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns a path in memory, where the machine has room for it, that is removed with the bed. Every user may
    /// enter its directory.
    pub fn memory_file(&self, name: &str) -> PathBuf {
        let memory = self.memory.get_or_init(|| {
            remove_abandoned(MEMORY);
            let directory = Path::new(MEMORY).join(self.directory.file_name()?);
            let make = || {
                fs::create_dir_all(&directory)?;
                fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))
            };
            (has_room(MEMORY) && make().is_ok()).then_some(directory)
        });
        memory.as_ref().unwrap_or(&self.directory).join(name)
    }

    /// Copies the programs that other users start to where each may execute them: the build directory may not be
    /// accessible. Returns their directory.
    pub fn public_programs(&self) -> Result<PathBuf, BedError> {
        let directory = self.file("bin");
        if directory.exists() {
            return Ok(directory);
        }
        let copy = || -> io::Result<()> {
            fs::create_dir_all(&directory)?;
            let Tools {
                portolan,
                traffic,
                preload,
                ..
            } = &self.tools;
            for path in [portolan, traffic, preload] {
                fs::copy(path, directory.join(path.file_name().unwrap_or_default()))?;
            }
            for path in [&self.directory, &directory] {
                fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
            }
            Ok(())
        };
        match copy() {
            Ok(()) => Ok(directory),
            Err(source) => Err(BedError::File {
                path: directory,
                source,
            }),
        }
    }

    /// The endpoint at which programs on the server host listen.
    pub fn endpoint(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.server.address, port)
    }

    /// The same, by the server host's IPv6 address.
    pub fn endpoint_ipv6(&self, port: u16) -> SocketAddr {
        SocketAddr::new(portolan_netns::Bed::B6, port)
    }

    /// A program on one host, on its core, with its sockets on one stack.
    pub fn command(&self, side: Side, stack: Stack, program: &str) -> Command {
        let words = self.words(stack, program);
        let mut command = self.exec(side, &words[0]);
        command.args(&words[1..]);
        command
    }

    /// A program on the server host, on the other host's core: a client that does not use the link.
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

    /// Has packets to a host be processed on the host's own core instead of the sender's.
    pub fn steer(&self, side: Side) -> Result<(), ProcessError> {
        let mask = 1_u64 << self.host(side).core;
        let line = format!(
            "mount -t sysfs sysfs /sys && for queue in /sys/class/net/{}/queues/rx-*; \
             do echo {mask:x} > $queue/rps_cpus; done",
            portolan_netns::Bed::DEVICE
        );
        // The mounted sysfs shows the devices of the shell's network namespace.
        let mut shell = self.namespace(side).exec("unshare");
        run(shell.args(["-m", "sh", "-ec", &line])).map(drop)
    }

    pub fn namespace(&self, side: Side) -> &Namespace {
        match side {
            Side::Client => &self.wire.a,
            Side::Server => &self.wire.b,
        }
    }

    /// Returns the command line of a program with its sockets on one stack, for use as arguments of
    /// a tracer or of a shell of another user.
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

    /// The command `portolan` on one host, to be started.
    pub fn own_command(&self, side: Side) -> Command {
        self.exec(side, &self.tools.portolan)
    }

    /// A program that owns protocol extensions, on one host.
    pub fn owner_command(&self, side: Side) -> Command {
        self.exec(side, &self.tools.owner)
    }

    /// Runs the command `portolan` on one host and returns its output.
    pub fn portolan(&self, side: Side, arguments: &[&str]) -> Result<String, ProcessError> {
        run(self.exec(side, &self.tools.portolan).args(arguments))
    }

    /// Sends a request about guarantees to the server of one host, as root.
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

    /// Starts a TCP service on the server host and waits until it listens. Waits first until the port's
    /// previous listener has closed it.
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

    /// As [`Bed::serve`], on Portolan by a program that performs the handshakes of its port itself.
    pub fn serve_delegated(
        &self,
        stack: Stack,
        port: u16,
        program: &str,
        arguments: &[&str],
    ) -> Result<Background, ServeError> {
        let mut command = self.command(Side::Server, stack, program);
        command.args(arguments).stdout(Stdio::null());
        command.env("PORTOLAN_DELEGATE", "1");
        self.serve_command(port, program, &mut command)
    }

    /// As [`Bed::serve`] on the kernel's stack, for our traffic program, whose output goes to a file. It has
    /// priority over all other programs, so that it records packets when they arrive.
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

    /// As [`Bed::serve`], with a command that is complete except for its input and its standard error.
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

    /// Returns true if a socket on the server host listens on `port`. A Portolan listener has a kernel
    /// socket that reserves its port. Probing by a connection would disturb some services.
    pub fn is_listening(&self, port: u16) -> bool {
        self.is_listening_on(Side::Server, port)
    }

    /// As [`Bed::is_listening`], on either host.
    pub fn is_listening_on(&self, side: Side, port: u16) -> bool {
        const LISTEN: &str = "0A";
        let port = format!(":{port:04X}");
        let tables = self.namespace(side).enter(|| {
            ["tcp", "tcp6"]
                .map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")))
        });
        tables.into_iter().flatten().any(|table| {
            table.lines().skip(1).any(|line| {
                // The fields are: number, local address, remote address, state.
                let mut words = line.split_whitespace().skip(1);
                let local = words.next().is_some_and(|local| local.ends_with(&port));
                local && words.nth(1) == Some(LISTEN)
            })
        })
    }

    /// Returns the number of TCP connections that the kernel's stack has accepted on a host, or `None` if it cannot be
    /// read.
    pub fn kernel_accepted(&self, side: Side) -> Option<u64> {
        const TABLE: &str = "/proc/thread-self/net/snmp";
        let table = self.namespace(side).enter(|| fs::read_to_string(TABLE));
        let table = table.ok()?;
        // A line of names, and one of values.
        let mut lines = table.lines().filter(|line| line.starts_with("Tcp:"));
        let (names, values) = (lines.next()?, lines.next()?);
        let mut fields = names.split_whitespace().zip(values.split_whitespace());
        let (_, accepted) = fields.find(|(name, _)| *name == "PassiveOpens")?;
        accepted.parse().ok()
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
        // A failure is harmless: the system clears its temporary directory.
        let _ = fs::remove_dir_all(&self.directory);
        if let Some(Some(memory)) = self.memory.get() {
            let _ = fs::remove_dir_all(memory);
        }
    }
}

/// Removes the directories of beds whose process has ended without removing them, for they use memory.
fn remove_abandoned(memory: &str) {
    for entry in fs::read_dir(memory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(DIRECTORY));
        let process = number.and_then(|number| number.split_once('-'));
        if process.is_some_and(|(pid, _)| !Path::new("/proc").join(pid).exists()) {
            // Another bed may do the same.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns true if a file system has room for the data of a benchmark.
fn has_room(path: &str) -> bool {
    statvfs(path).is_ok_and(|system| system.f_bavail * system.f_frsize >= ROOM)
}

/// Sends a request to the server of the calling thread's namespace and returns its reply.
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

/// Kills all processes left in a namespace, which exists until its last process ends.
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
            // The process may have ended already.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
