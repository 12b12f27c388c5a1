//! Random requests of the whole control protocol: of the right structure, or nearly, about existing sessions, with
//! descriptors of any kind, and nearly valid extensions, by several clients at a time, to a server that serves others
//! at the same time.
//!
//! `PORTOLAN_TEST_SECONDS` extends it, `PORTOLAN_FUZZ_SEED` selects other requests.

pub(crate) mod values;

use std::fs::File;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use portolan_netns::Bed;
use portolan_proto::control::{Reply, ReplyBody, Request, RequestBody};
use portolan_proto::extension::{Code, Event, Extension, ExtensionRequest, Guard};
use portolan_proto::{MAX_MESSAGE, decode, encode};
use portolan_sys::unix::{Connection, PairKind, ReceiveError, socket_pair};
use portolan_types::{Protocol, SessionId};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::admission::unsafe_code;
use crate::common::{Client, await_some, control_path, start_server};
use crate::handlers::{always, slow};
use crate::meter::Meter;
use crate::{Victim, as_nobody, assert_serves_others, counter};
use values::{Known, Random, any};

const SECONDS: u64 = 20;
const SEED: u64 = 1;

const CLIENTS: usize = 6;

/// Requests between two checks of the other users.
const REQUESTS: usize = 400;

/// Extensions go to the loader, which is a thread: most requests are others.
const BETWEEN_HANDLERS: usize = 40;

pub(crate) fn parameter(name: &str, usual: u64) -> u64 {
    let chosen = std::env::var(name).ok();
    chosen.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A client that sends random requests.
pub(crate) struct Hostile {
    connection: Connection,
    known: Known,
    /// Descriptors of its own sessions, and those received from the server.
    fds: Vec<OwnedFd>,
    next: u32,
}

impl Hostile {
    /// One in four sends no `Hello` first.
    pub(crate) fn start(path: &Path, random: &mut Random) -> Hostile {
        let connection = await_some("a connection", || Connection::connect(path).ok());
        let mut hostile = Hostile {
            connection,
            known: Known {
                sessions: Vec::new(),
                slots: (0..4).collect(),
            },
            fds: Vec::new(),
            next: 1,
        };
        if !random.once_in(4) {
            let hello = RequestBody::Hello {
                version: portolan_proto::PROTOCOL,
                program: "anything".into(),
            };
            hostile.send(hello, &[], random);
        }
        hostile
    }

    /// Returns false if the server has hung up.
    fn send(&mut self, body: RequestBody, fds: &[OwnedFd], random: &mut Random) -> bool {
        self.next = self.next.wrapping_add(1);
        let id = if random.once_in(5) { 0 } else { self.next };
        let mut bytes = encode(&Request { id, body });
        if random.once_in(25) {
            damage(&mut bytes, random);
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // A message without room in the queue is not sent; a client that does not read is not read either.
        let _ = self.connection.send(&bytes, &fds);
        self.hear(random)
    }

    /// Reads the server's replies or, once in a while, does not.
    fn hear(&mut self, random: &mut Random) -> bool {
        if random.once_in(10) {
            return true;
        }
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            match self.connection.receive(&mut buffer) {
                Ok(received) => {
                    if let Ok(reply) = decode::<Reply>(&buffer[..received.length]) {
                        self.learn(&reply.body);
                    }
                    self.fds.extend(received.fds);
                    self.fds.truncate(40);
                }
                Err(ReceiveError::Blocked) => return true,
                Err(_) => return false,
            }
        }
    }

    fn learn(&mut self, reply: &ReplyBody) {
        let session = match reply {
            ReplyBody::Bound { session, .. }
            | ReplyBody::Connecting { session, .. }
            | ReplyBody::Listening { session, .. } => session,
            _ => return,
        };
        self.known.sessions.push(session.0);
        if self.known.sessions.len() > 30 {
            self.known.sessions.remove(0);
        }
    }
}

/// Flips a bit, truncates or extends the bytes.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(3) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes.truncate(at),
        _ => bytes.extend((0..random.below(50)).map(|n| n as u8)),
    }
}

/// Returns a descriptor of any kind; the other ends of some are closed.
fn descriptor(own: &[OwnedFd], connection: &Connection, random: &mut Random) -> Option<OwnedFd> {
    let pair = |kind| socket_pair(kind).ok();
    Some(match random.below(14) {
        0 => pair(PairKind::Stream)?.0,
        1 => pair(PairKind::SeqPacket)?.0,
        2 => File::open("/dev/null").ok()?.into(),
        3 => UdpSocket::bind("127.0.0.1:0").ok()?.into(),
        4 => TcpListener::bind("127.0.0.1:0").ok()?.into(),
        5 => {
            let listener = TcpListener::bind("127.0.0.1:0").ok()?;
            TcpStream::connect(listener.local_addr().ok()?).ok()?.into()
        }
        6 => eventfd(0, EventfdFlags::empty()).ok()?,
        7 => rustix::pipe::pipe().ok()?.0,
        8 => connection.as_fd().try_clone_to_owned().ok()?,
        9 | 10 => {
            let memory = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).ok()?;
            ftruncate(&memory, random.below(1 << 20) as u64).ok()?;
            if random.once_in(2) {
                fcntl_add_seals(&memory, SealFlags::all()).ok()?;
            }
            memory
        }
        _ => random.of(own)?.try_clone().ok()?,
    })
}

/// Returns near and far end of a new session, or anything.
fn descriptors(hostile: &Hostile, random: &mut Random) -> Vec<OwnedFd> {
    let kind = match random.below(6) {
        0 => Some(PairKind::Stream),
        1 => Some(PairKind::SeqPacket),
        _ => None,
    };
    if let Some((far, near)) = kind.and_then(|kind| socket_pair(kind).ok()) {
        return vec![far, near];
    }
    (0..random.below(4))
        .filter_map(|_| descriptor(&hostile.fds, &hostile.connection, random))
        .collect()
}

/// Returns a handler's instructions, valid or nearly so: completely random ones never reach the verifier.
fn handler(random: &mut Random) -> Code {
    let mut code = match random.below(3) {
        0 => always(random.below(6) as i32),
        1 => slow(),
        _ => {
            let mut all = unsafe_code();
            let chosen = random.below(all.len());
            all.swap_remove(chosen).1
        }
    };
    for _ in 0..random.below(4) {
        let at = random.below(code.instructions.len());
        if let Some(instruction) = code.instructions.get_mut(at) {
            *instruction ^= 1 << random.below(64);
        }
    }
    code
}

/// Returns an extension of an own session, or one that is only to be checked.
fn extension(known: &Known, random: &mut Random) -> RequestBody {
    let code = handler(random);
    let request = match random.of(&known.sessions) {
        Some(&session) if random.once_in(2) => ExtensionRequest::Install(Extension {
            name: "anything".to_owned(),
            event: Event::of(Protocol::Udp, code.direction),
            guards: vec![Guard::Session(SessionId(session))],
            priority: random.below(256) as u8,
            code,
        }),
        _ => ExtensionRequest::Check(code),
    };
    RequestBody::Extension(request)
}

/// Sends one request; a client that was disconnected is replaced.
pub(crate) fn act(path: &Path, clients: &mut [Hostile], random: &mut Random) {
    let chosen = random.below(clients.len());
    let hostile = &mut clients[chosen];
    let body = if random.once_in(BETWEEN_HANDLERS) {
        extension(&hostile.known, random)
    } else {
        any(random, &hostile.known)
    };
    let fds = descriptors(hostile, random);
    let is_there = hostile.send(body, &fds, random);
    // Near ends of what may be its sessions.
    hostile.fds.extend(fds);
    if !is_there || random.once_in(300) {
        clients[chosen] = Hostile::start(path, random);
    }
}

#[test]
fn whatever_clients_say_others_are_served() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let victims = Known {
        sessions: vec![victim.id.0, 0, u64::MAX],
        slots: vec![victim.slot.0, u32::MAX],
    };
    let seed = parameter("PORTOLAN_FUZZ_SEED", SEED);
    eprintln!("PORTOLAN_FUZZ_SEED={seed}");
    let meter = Meter::start(&bed);
    let mut random = Random(seed);
    let end = Instant::now() + Duration::from_secs(parameter("PORTOLAN_TEST_SECONDS", SECONDS));
    let mut requests = 0;
    as_nobody(|| {
        let mut clients: Vec<Hostile> = (0..CLIENTS)
            .map(|_| Hostile::start(&path, &mut random))
            .collect();
        while Instant::now() < end {
            for hostile in &mut clients {
                hostile.known.sessions.extend(&victims.sessions);
                hostile.known.slots.clone_from(&victims.slots);
            }
            for _ in 0..REQUESTS {
                act(&path, &mut clients, &mut random);
                requests += 1;
            }
            victim.assert_unharmed();
        }
    });
    let checked = counter(&path, "server", "extensions_refused");
    let installed = counter(&path, "server", "extensions_installed");
    eprintln!("{requests} requests, {checked} extensions refused, {installed} installed");
    meter.finish();
    assert_serves_others(&bed, &path);
    let mut watcher = Client::connect(&path);
    let mut left = watcher.sessions();
    let patience = Instant::now() + Duration::from_secs(10);
    while left.len() > 1 {
        assert!(
            Instant::now() < patience,
            "sessions of clients stay: {left:#?}"
        );
        left = watcher.sessions();
    }
}
