//! One role of a topic: its addresses, its synchronization with the other role, and its output.

use std::{
    cell::Cell,
    fmt::Display,
    fs,
    io::{self, BufRead, BufReader, Write},
    net::{IpAddr, SocketAddr},
    os::unix::net::{UnixListener, UnixStream},
    thread,
    time::{Duration, Instant},
};

use crate::{
    Options,
    call::{self, Fd, STREAM},
};

/// Time limit for the other role to appear.
const TIMEOUT: Duration = Duration::from_secs(100);
/// Ports of one topic; topics run in turn, but closed ports stay in TIME-WAIT for a while.
const PORTS_PER_TOPIC: u16 = 40;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Server,
    Client,
}

pub(crate) struct Side {
    pub role: Role,
    topic: &'static str,
    local: IpAddr,
    remote: IpAddr,
    next_port: Cell<u16>,
    other: BufReader<UnixStream>,
}

impl Side {
    /// Connects to the other role of `topic`.
    pub(crate) fn meet_other(
        role: Role,
        topic: &'static str,
        options: &Options,
    ) -> io::Result<Self> {
        let place = options
            .meet
            .join(format!("posix-check-{}-{topic}", options.port));
        let other = match role {
            Role::Server => {
                let _ = fs::remove_file(&place);
                let listener = UnixListener::bind(&place)?;
                let (other, _) = listener.accept()?;
                fs::remove_file(&place)?;
                other
            }
            Role::Client => connect_patiently(&place)?,
        };
        let index = crate::TOPICS
            .iter()
            .position(|known| known.name == topic)
            .unwrap_or(0) as u16;
        Ok(Self {
            role,
            topic,
            local: options.local,
            remote: options.remote,
            next_port: Cell::new(options.port + index * PORTS_PER_TOPIC),
            other: BufReader::new(other),
        })
    }

    pub(crate) fn is_server(&self) -> bool {
        self.role == Role::Server
    }

    /// Prints one observation.
    pub(crate) fn report(&self, check: &str, observed: impl Display) {
        let role = if self.is_server() { "server" } else { "client" };
        println!("{} {role} {check}: {observed}", self.topic);
    }

    /// A barrier: returns when both roles have called it.
    pub(crate) fn step(&mut self) {
        self.tell("step");
        assert_eq!(self.hear(), "step", "the roles are out of step");
    }

    pub(crate) fn tell(&mut self, line: impl Display) {
        tell(self.other.get_mut(), line);
    }

    /// Tells the other role something from another thread.
    pub(crate) fn teller(&self) -> Teller {
        Teller(self.other.get_ref().try_clone().expect("a descriptor"))
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.other
            .read_line(&mut line)
            .expect("the other role speaks");
        line.trim_end().to_owned()
    }

    /// Returns the next unused port; both roles count in the same way.
    pub(crate) fn port(&self) -> u16 {
        self.next_port.replace(self.next_port.get() + 1)
    }

    pub(crate) fn here(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.local, port)
    }

    pub(crate) fn there(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.remote, port)
    }

    pub(crate) fn is_within_one_host(&self) -> bool {
        self.local == self.remote
    }

    /// On the same link, and nobody's; within one host the host's own.
    pub(crate) fn nowhere(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.nobody(99), port)
    }

    /// One of the addresses that are nobody's: a host that has looked for one in vain knows of that for a while.
    pub(crate) fn nobody(&self, number: u8) -> IpAddr {
        match self.remote {
            IpAddr::V4(v4) => {
                let [a, b, c, _] = v4.octets();
                IpAddr::from([a, b, c, number])
            }
            IpAddr::V6(v6) => {
                let number = 0x9900 | u128::from(number);
                std::net::Ipv6Addr::from_bits((v6.to_bits() & !0xffff) | number).into()
            }
        }
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.local.is_ipv6()
    }

    pub(crate) fn domain(&self) -> i32 {
        if self.is_v6() {
            libc::AF_INET6
        } else {
            libc::AF_INET
        }
    }

    pub(crate) fn socket(&self, kind: i32) -> Fd {
        call::socket(self.domain(), kind, 0).expect("a socket")
    }

    /// Returns a listener on this side's `port`.
    pub(crate) fn listener(&self, port: u16) -> Fd {
        let listener = self.socket(STREAM);
        call::set_option(listener, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1).expect("SO_REUSEADDR");
        call::bind(listener, self.here(port)).expect("bind");
        call::listen(listener, 16).expect("listen");
        listener
    }

    /// Returns a listener on a port that the other role, which calls this too, does not use: both may be on one host.
    pub(crate) fn own_listener(&self) -> Fd {
        let ports = [self.port(), self.port()];
        self.listener(ports[usize::from(self.is_server())])
    }

    /// Makes sockets until no other socket has the port that was chosen for one, and returns that. The kernel gives
    /// connections with different destinations the same port, and what can be done with it depends on all of them. In the
    /// kernel's lists the port has `own` rows for the socket itself.
    pub(crate) fn alone<T>(&self, own: usize, make: impl Fn() -> (Fd, T)) -> (Fd, T) {
        loop {
            let (socket, made) = make();
            let port = call::local_address(socket).expect("a name").port();
            if port == 0 || rows_of(port) <= own {
                return (socket, made);
            }
            call::close(socket).expect("close");
        }
    }

    /// Returns one end of a new connection between the roles, both of which call this.
    pub(crate) fn connection(&mut self) -> Fd {
        let port = self.port();
        if self.is_server() {
            let listener = self.listener(port);
            self.step();
            let (accepted, _) = call::accept(listener, 0).expect("accept");
            call::close(listener).expect("close");
            accepted
        } else {
            self.step();
            let socket = self.socket(STREAM);
            call::connect(socket, self.there(port)).expect("connect");
            socket
        }
    }

    /// Formats an address without parts that vary between runs.
    pub(crate) fn name(&self, address: SocketAddr, known_port: u16) -> String {
        let host = match address.ip() {
            ip if ip.is_unspecified() => "any".to_owned(),
            ip if ip == self.local => "local".to_owned(),
            ip if ip == self.remote => "remote".to_owned(),
            ip => ip.to_string(),
        };
        let port = match address.port() {
            0 => "0",
            port if port == known_port => "known",
            _ => "ephemeral",
        };
        // On one host both roles have the same address.
        if self.local == self.remote && host == "local" {
            format!("remote:{port}")
        } else {
            format!("{host}:{port}")
        }
    }
}

pub(crate) struct Teller(UnixStream);

impl Teller {
    pub(crate) fn tell(&mut self, line: impl Display) {
        tell(&mut self.0, line);
    }
}

fn tell(other: &mut UnixStream, line: impl Display) {
    writeln!(other, "{line}").expect("the other role listens");
}

fn connect_patiently(place: &std::path::Path) -> io::Result<UnixStream> {
    let started = Instant::now();
    loop {
        match UnixStream::connect(place) {
            Err(_) if started.elapsed() < TIMEOUT => thread::sleep(Duration::from_millis(2)),
            connected => return connected,
        }
    }
}

/// Counts the rows of a local port in the kernel's lists of TCP sockets.
fn rows_of(port: u16) -> usize {
    let lists = ["tcp", "tcp6"].map(|list| fs::read_to_string(format!("/proc/self/net/{list}")));
    let lists: Vec<String> = lists.into_iter().flatten().collect();
    let locals = lists
        .iter()
        .flat_map(|list| list.lines())
        .filter_map(|row| row.split_whitespace().nth(1));
    let suffix = format!(":{port:04X}");
    locals.filter(|local| local.ends_with(&suffix)).count()
}
