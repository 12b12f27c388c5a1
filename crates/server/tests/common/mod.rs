//! A minimal protocol library: speaks the control protocol, and runs sessions by the engine over
//! its channel. Panics on anything that a test does not expect.
// Each test program uses a part of it.
#![allow(dead_code)]

pub(crate) mod cgroup;
pub(crate) mod manager;
pub(crate) mod scene;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use portolan_netns::{Bed, Daemon, Namespace, Ready};
use portolan_proto::control::{
    AfterFlush, Blob, DescriptorEvent, HandshakeOptions, ListPart, Reply, ReplyBody, Request,
    RequestBody, Reuse, SessionRef,
};
use portolan_proto::metastate::Metastate;
use portolan_proto::qos::{QosReply, QosReport, QosRequest};
use portolan_proto::report::{CounterReport, SessionReport};
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_stack::{Frame, Input, Routes, Session, Stack, TcpSession, Wire};
use portolan_sys::clock;
use portolan_sys::ring::Ring;
use portolan_sys::shm::{self, MetastateReader};
use portolan_sys::tap::TapIo;
use portolan_sys::unix::{self, Connection, PairKind, ReceiveError};
use portolan_sys::wait::WakeReceiver;
use portolan_types::{Generation, Instant, Protocol, SessionId, Slot};

/// Time limit of any step in a test.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the server on host `a` of a bed.
pub(crate) fn start_server(host: &Namespace) -> Daemon {
    start_server_with(host, &[])
}

/// Likewise, with further arguments.
pub(crate) fn start_server_with(host: &Namespace, arguments: &[&str]) -> Daemon {
    let mut command = host.exec(env!("CARGO_BIN_EXE_portoland"));
    command.args(["--interface", Bed::DEVICE]).args(arguments);
    // The reader of its output may be delayed on a busy machine, and the server with it.
    let level = std::env::var("PORTOLAN_LOG").unwrap_or_else(|_| "info".into());
    command
        .env("PORTOLAN_LOG", level)
        .env("RUST_BACKTRACE", "1")
        .env_remove("PORTOLAN_SOCKET");
    Daemon::start(command, Ready::Line("ready".into()))
}

/// A configuration file, which is removed at the end of the test.
pub(crate) struct Configuration(PathBuf);

impl Configuration {
    pub(crate) fn new(host: &Namespace, text: &str) -> Configuration {
        let path = std::env::temp_dir().join(format!("portoland-{}.toml", host.inode()));
        std::fs::write(&path, text).unwrap();
        Configuration(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Starts the server of `host` with it.
    pub(crate) fn start(&self, host: &Namespace) -> Daemon {
        start_server_with(host, &["--config", self.0.to_str().unwrap()])
    }
}

impl Drop for Configuration {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns how many files a server has open, except those of channels that it makes in advance.
pub(crate) fn open_files(server: &Daemon) -> usize {
    names_of_open_files(server).len()
}

/// Likewise for an idle server: while it makes channels it opens sockets for a moment.
pub(crate) fn open_files_at_rest(server: &Daemon) -> usize {
    let looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        open_files(server)
    });
    looks.min().unwrap()
}

/// Waits until a server has no more files open than `before`.
pub(crate) fn await_closes(server: &Daemon, before: usize) {
    let start = clock::now();
    while open_files(server) > before {
        let open = names_of_open_files(server);
        let is_in_time = clock::now().since(start) < TIMEOUT;
        assert!(
            is_in_time,
            "of more than {before} files {open:#?} stay open"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn names_of_open_files(server: &Daemon) -> Vec<String> {
    let directory = format!("/proc/{}/fd", server.pid());
    let files = std::fs::read_dir(directory).unwrap().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets
        .map(|target| target.display().to_string())
        .filter(|target| {
            !["net/tun", "bpf-map"]
                .iter()
                .any(|end| target.ends_with(end))
        })
        .collect()
}

pub(crate) fn control_path(host: &Namespace) -> PathBuf {
    format!("/run/portolan/{}/control", host.inode()).into()
}

/// A control connection, which gets a channel by `hello`.
pub(crate) struct Client {
    connection: Connection,
    next: u32,
    waiting: VecDeque<(Reply, Vec<OwnedFd>)>,
}

impl Client {
    pub(crate) fn connect(path: &Path) -> Client {
        Client {
            connection: Connection::connect(path).unwrap(),
            next: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Returns a client that has sent `Hello` and not received the answer.
    pub(crate) fn greeting(path: &Path) -> Client {
        let mut client = Client::connect(path);
        let hello = RequestBody::Hello {
            version: portolan_proto::PROTOCOL,
            program: "test".into(),
        };
        client.send(hello, &[]);
        client
    }

    pub(crate) fn send(&mut self, body: RequestBody, fds: &[BorrowedFd<'_>]) -> u32 {
        self.next += 1;
        let request = Request {
            id: self.next,
            body,
        };
        self.connection.send(&encode(&request), fds).unwrap();
        self.next
    }

    pub(crate) fn send_raw(&self, bytes: &[u8]) {
        self.connection.send(bytes, &[]).unwrap();
    }

    pub(crate) fn ask(&mut self, body: RequestBody) -> ReplyBody {
        self.ask_with(body, &[]).0
    }

    pub(crate) fn ask_with(
        &mut self,
        body: RequestBody,
        fds: &[BorrowedFd<'_>],
    ) -> (ReplyBody, Vec<OwnedFd>) {
        let id = self.send(body, fds);
        let (reply, fds) = self.receive().expect("the server answers");
        assert_eq!(reply.id, id);
        (reply.body, fds)
    }

    /// Returns all sessions that the server shows to this client.
    pub(crate) fn sessions(&mut self) -> Vec<SessionReport> {
        self.send(RequestBody::ListSessions, &[]);
        self.receive_list(session_part)
    }

    /// Returns all guarantees.
    pub(crate) fn guarantees(&mut self) -> QosReport {
        self.send(RequestBody::Qos(QosRequest::Show), &[]);
        self.receive_list(|body| match body {
            ReplyBody::Qos(QosReply::State(part)) => Some(part),
            _ => None,
        })
    }

    /// Returns all counters.
    pub(crate) fn counters(&mut self) -> Vec<CounterReport> {
        self.send(RequestBody::ReadCounters, &[]);
        self.receive_list(|body| match body {
            ReplyBody::Counters(part) => Some(part),
            _ => None,
        })
    }

    /// Receives the parts of a list, which `part` takes from their replies.
    pub(crate) fn receive_list<T: serde::de::DeserializeOwned>(
        &mut self,
        part: impl Fn(ReplyBody) -> Option<ListPart>,
    ) -> T {
        let list = self.receive_list_or_errno(part);
        list.unwrap_or_else(|errno| panic!("{errno}"))
    }

    pub(crate) fn receive_list_or_errno<T: serde::de::DeserializeOwned>(
        &mut self,
        part: impl Fn(ReplyBody) -> Option<ListPart>,
    ) -> Result<T, i32> {
        let mut bytes = Vec::new();
        loop {
            let (reply, fds) = self.receive().expect("the server answers");
            assert!(fds.is_empty(), "what its program keeps is its own");
            if let ReplyBody::Error { errno } = reply.body {
                return Err(errno);
            }
            let part = part(reply.body).expect("a part of the list");
            bytes.extend(part.bytes);
            if part.is_last {
                return Ok(decode(&bytes).unwrap());
            }
        }
    }

    /// Returns a counter of filters or server, or of all holders together.
    pub(crate) fn counter(&mut self, group: &str, name: &str) -> u64 {
        self.counters()
            .iter()
            .find(|c| c.group == group && c.name == name && c.holder.is_none())
            .unwrap_or_else(|| panic!("no counter {group} {name}"))
            .value
    }

    /// Returns the next reply; none if the server closed the connection.
    pub(crate) fn receive(&mut self) -> Option<(Reply, Vec<OwnedFd>)> {
        if let Some(reply) = self.waiting.pop_front() {
            return Some(reply);
        }
        let mut buffer = vec![0; MAX_MESSAGE];
        await_some("a reply", || match self.connection.receive(&mut buffer) {
            Ok(received) => {
                let reply = decode(&buffer[..received.length]).unwrap();
                Some(Some((reply, received.fds.into_iter().collect())))
            }
            Err(ReceiveError::Blocked) => None,
            Err(_) => Some(None),
        })
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// A registered process.
pub(crate) struct Library {
    pub client: Client,
    pub stack: Stack,
    pub ring: Ring,
    pub tap: Tap,
    pub metastate: MetastateReader,
    /// Becomes readable when the server has a recall or news of transmit queues.
    pub recall_event: OwnedFd,
    /// Becomes readable when a peer of a local session notifies it.
    pub wake_receiver: WakeReceiver,
    /// Descriptors that came with `Welcome` besides the tap.
    pub maps: Maps,
    routes: Routes,
}

/// The shared memory of a channel.
pub(crate) struct Maps {
    pub ring: OwnedFd,
    pub doorbell: OwnedFd,
    pub metastate: OwnedFd,
    pub statistics: OwnedFd,
    pub journal: OwnedFd,
}

pub(crate) struct Tap(pub TapIo<OwnedFd>);

impl Wire for Tap {
    fn transmit(&mut self, frame: &Frame<'_>) {
        let [first, second] = frame.payload;
        let parts = [frame.head, first, second].map(IoSlice::new);
        self.0.write(&parts).unwrap();
    }

    fn is_full(&self) -> bool {
        false
    }
}

/// An application's descriptor.
pub(crate) struct Near(pub OwnedFd);

impl Library {
    pub(crate) fn start(path: &Path) -> Library {
        Library::welcomed(Client::greeting(path))
    }

    /// Takes the channel of a client that has sent `Hello`.
    pub(crate) fn welcomed(mut client: Client) -> Library {
        let (reply, fds) = client.receive().expect("a reply");
        let ReplyBody::Welcome { ring_size, .. } = reply.body else {
            panic!("{reply:?}");
        };
        let [
            tap,
            ring,
            doorbell,
            metastate,
            statistics,
            journal,
            recall_event,
            wake_receiver,
        ] = <[OwnedFd; 8]>::try_from(fds).unwrap();
        Library {
            client,
            stack: Stack::new(clock::now()),
            ring: Ring::map(&ring, ring_size as usize).unwrap(),
            tap: Tap(TapIo::new(tap)),
            metastate: MetastateReader::map(&metastate).unwrap(),
            recall_event,
            wake_receiver: WakeReceiver::from_fd(wake_receiver),
            maps: Maps {
                ring,
                doorbell,
                metastate,
                statistics,
                journal,
            },
            routes: Routes::default(),
        }
    }

    /// Sends a request about a new session with its descriptor pair.
    pub(crate) fn ask_new(&mut self, kind: PairKind, body: RequestBody) -> (ReplyBody, Near) {
        let (far, near) = unix::socket_pair(kind).unwrap();
        let (reply, _) = self.client.ask_with(body, &[far.as_fd(), near.as_fd()]);
        (reply, Near(near))
    }

    pub(crate) fn bind(
        &mut self,
        protocol: Protocol,
        local: SocketAddr,
        slot: Slot,
    ) -> (ReplyBody, Near) {
        self.bind_with(protocol, local, slot, Reuse::default())
    }

    pub(crate) fn bind_with(
        &mut self,
        protocol: Protocol,
        local: SocketAddr,
        slot: Slot,
        reuse: Reuse,
    ) -> (ReplyBody, Near) {
        let body = RequestBody::Bind {
            session: SessionRef::New,
            protocol,
            local,
            reuse,
            v6_only: false,
            slot,
        };
        self.ask_new(PairKind::Stream, body)
    }

    /// Binds and listens. Returns the session, its address and its descriptor.
    pub(crate) fn listen(
        &mut self,
        local: SocketAddr,
        backlog: u32,
    ) -> (SessionId, SocketAddr, Near) {
        self.listen_with(
            local,
            backlog,
            Reuse::default(),
            HandshakeOptions::default(),
        )
    }

    /// Likewise, for children (`SO_CONCURRENT_SERVER`).
    pub(crate) fn listen_for_children(&mut self, local: SocketAddr) -> Near {
        let options = HandshakeOptions {
            is_concurrent_server: Some(true),
            ..HandshakeOptions::default()
        };
        self.listen_with(local, 5, Reuse::default(), options).2
    }

    /// Likewise, with `SO_REUSEPORT`.
    pub(crate) fn listen_sharing(&mut self, local: SocketAddr) -> Near {
        let reuse = Reuse {
            address: false,
            port: true,
        };
        self.listen_with(local, 100, reuse, HandshakeOptions::default())
            .2
    }

    fn listen_with(
        &mut self,
        local: SocketAddr,
        backlog: u32,
        reuse: Reuse,
        options: HandshakeOptions,
    ) -> (SessionId, SocketAddr, Near) {
        let (reply, _replaced) = self.bind_with(Protocol::Tcp, local, Slot(0), reuse);
        let ReplyBody::Bound { session, .. } = reply else {
            panic!("{reply:?}");
        };
        let body = RequestBody::Listen {
            session: SessionRef::Known(session),
            backlog,
            options,
            options_blob: Default::default(),
            slot: None,
        };
        let (reply, near) = self.ask_new(PairKind::SeqPacket, body);
        let ReplyBody::Listening { session, local, .. } = reply else {
            panic!("{reply:?}");
        };
        (session, local, near)
    }

    pub(crate) fn connect(
        &mut self,
        protocol: Protocol,
        remote: SocketAddr,
    ) -> (ReplyBody, Near, Slot) {
        let slot = self.stack.reserve();
        let body = connect_request((SessionRef::New, protocol), remote, slot);
        let (reply, near) = self.ask_new(PairKind::Stream, body);
        (reply, near, slot)
    }

    /// Opens a TCP connection and caches it.
    pub(crate) fn open(&mut self, remote: SocketAddr) -> (SessionId, Near, Slot) {
        let (reply, near, slot) = self.connect(Protocol::Tcp, remote);
        (self.take_over(&reply, &near, slot), near, slot)
    }

    /// The same with what is to be the server's end of the descriptor.
    pub(crate) fn open_keeping_far(
        &mut self,
        remote: SocketAddr,
    ) -> (SessionId, Near, OwnedFd, Slot) {
        let slot = self.stack.reserve();
        let body = connect_request((SessionRef::New, Protocol::Tcp), remote, slot);
        let (far, near) = unix::socket_pair(PairKind::Stream).unwrap();
        let (reply, _) = self.client.ask_with(body, &[far.as_fd(), near.as_fd()]);
        let near = Near(near);
        (self.take_over(&reply, &near, slot), near, far, slot)
    }

    fn take_over(&mut self, reply: &ReplyBody, near: &Near, slot: Slot) -> SessionId {
        let ReplyBody::Connecting { session, .. } = *reply else {
            panic!("{reply:?}");
        };
        let (event, _) = near.event();
        let DescriptorEvent::Established {
            capsule: Blob::Inline(bytes),
            generation,
        } = event
        else {
            panic!("{event:?}");
        };
        self.adopt(&bytes, generation, slot);
        session
    }

    /// Accepts the next session of a listener and caches it.
    pub(crate) fn accept(&mut self, listener: &Near) -> (SessionId, Near, Slot) {
        let (event, mut fds) = listener.event();
        let DescriptorEvent::Accepted { session, .. } = event else {
            panic!("{event:?}");
        };
        let slot = self.cache(session);
        (session, Near(fds.remove(0)), slot)
    }

    pub(crate) fn cache(&mut self, session: SessionId) -> Slot {
        self.try_cache(session, &[]).expect("it is not relayed")
    }

    /// Returns none if the session is relayed.
    pub(crate) fn try_cache(&mut self, session: SessionId, fds: &[BorrowedFd<'_>]) -> Option<Slot> {
        let slot = self.stack.reserve();
        let request = RequestBody::Cache { session, slot };
        let (capsule, generation, fds) = match self.client.ask_with(request, fds) {
            (
                ReplyBody::Cached {
                    capsule,
                    generation,
                    ..
                },
                fds,
            ) => (capsule, generation, fds),
            (ReplyBody::Relayed, _) => return None,
            (reply, _) => panic!("{reply:?}"),
        };
        let bytes = shm::unpack(capsule.state, fds.into_iter().next()).unwrap();
        self.adopt(&bytes, generation, slot);
        Some(slot)
    }

    fn adopt(&mut self, capsule: &[u8], generation: Generation, slot: Slot) {
        let mut session = TcpSession::from_capsule(capsule).unwrap();
        session.generation = generation;
        let session = Session::Tcp(Box::new(session));
        self.stack.insert_at(clock::now(), slot, session);
    }

    /// Flushes a session to the server.
    pub(crate) fn flush(&mut self, id: SessionId, slot: Slot, then: AfterFlush) {
        let Some(Session::Tcp(session)) = self.stack.remove(slot) else {
            panic!("no session at {slot:?}");
        };
        let body = RequestBody::Flush {
            session: id,
            capsule: Blob::Inline(session.to_capsule()).into(),
            then,
            options_blob: Default::default(),
        };
        let reply = self.client.ask(body);
        assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    }

    pub(crate) fn metastate(&self) -> Metastate {
        await_some("metastate", || self.metastate.read())
    }

    /// Moves packets once.
    pub(crate) fn turn(&mut self) {
        let now: Instant = clock::now();
        let generation = self.metastate.generation();
        // None while the server is in the middle of an update.
        if generation != self.routes.generation()
            && let Some(metastate) = self.metastate.read()
        {
            self.routes = Routes::new(generation, metastate);
        }
        let mut strays = Vec::new();
        while let Some(record) = self.ring.next() {
            if let Input::Unclaimed(_) = self.stack.input(now, &record.header, record.frame) {
                strays.push(record.frame.to_vec());
            }
        }
        for frame in strays {
            self.client
                .send(RequestBody::MisdeliveredFrame { frame }, &[]);
        }
        self.stack.expire(now);
        self.stack.output(now, &self.routes, &mut self.tap);
    }

    /// What lies in the ring, for none of its sessions.
    pub(crate) fn take_frames(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while let Some(record) = self.ring.next() {
            frames.push(record.frame.to_vec());
        }
        frames
    }

    pub(crate) fn write(&mut self, slot: Slot, bytes: &[u8]) {
        let mut left = bytes;
        await_some("room to send", || {
            let now = clock::now();
            let sent = self.stack.tcp(slot).unwrap().connection.send(now, left);
            left = &left[sent..];
            self.stack.touch(slot);
            self.turn();
            left.is_empty().then_some(())
        });
    }

    /// Reads exactly `count` bytes.
    pub(crate) fn read(&mut self, slot: Slot, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        await_some("bytes", || {
            self.turn();
            let mut chunk = vec![0; count - bytes.len()];
            let now = clock::now();
            let got = self
                .stack
                .tcp(slot)
                .unwrap()
                .connection
                .recv(now, &mut chunk);
            bytes.extend_from_slice(&chunk[..got]);
            self.stack.touch(slot);
            (bytes.len() == count).then(|| bytes.clone())
        })
    }
}

impl Near {
    /// Returns the next event on the descriptor.
    pub(crate) fn event(&self) -> (DescriptorEvent, Vec<OwnedFd>) {
        await_some("an event", || self.try_event())
    }

    /// Returns the next event, if there is one.
    pub(crate) fn try_event(&self) -> Option<(DescriptorEvent, Vec<OwnedFd>)> {
        let mut buffer = vec![0; MAX_MESSAGE];
        match unix::receive(&self.0, &mut buffer) {
            Ok(received) => {
                let event = decode(&buffer[..received.length]).unwrap();
                Some((event, received.fds.into_iter().collect()))
            }
            Err(ReceiveError::Blocked) => None,
            Err(failure) => panic!("{failure}"),
        }
    }
}

pub(crate) fn connect_request(
    (session, protocol): (SessionRef, Protocol),
    remote: SocketAddr,
    slot: Slot,
) -> RequestBody {
    RequestBody::Connect {
        session,
        protocol,
        remote,
        slot,
        options: HandshakeOptions::default(),
        early: portolan_proto::control::FastOpenMode::No,
    }
}

/// Tries until `attempt` gives something; panics when it takes too long.
pub(crate) fn await_some<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = clock::now();
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(clock::now().since(start) < TIMEOUT, "no {what} came");
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub(crate) fn session_part(body: ReplyBody) -> Option<ListPart> {
    match body {
        ReplyBody::Sessions(part) => Some(part),
        _ => None,
    }
}
