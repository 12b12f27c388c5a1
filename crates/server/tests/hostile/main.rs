//! A hostile program, run as user nobody with nothing but what the server gave it: its forged frames do not leave
//! the host, it sees nothing of others, and whatever it sends to the server or writes into shared memory harms only
//! itself.

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod adopting;
mod budgets;
mod capsules;
mod capture;
mod closing;
mod delegations;
mod extensions;
mod forgery;
mod frames;
mod fuzzing;
mod groups;
mod guarantees;
mod handlers;
mod injection;
mod leases;
mod locals;
mod low_ports;
mod memory;
mod messages;
mod meter;
mod misdelivered;
mod offloads;
mod own_protocols;
mod raw;
mod recording;
mod rejoining;
mod relays;
mod sending;
mod snooping;
mod soak;
mod stalling;
mod starting;
mod unread;
mod waking;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Client, Library, Near};
use meter::Meter;
use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_types::{SessionId, Slot};
use rustix::process::Uid;

const TIMEOUT: Option<Duration> = Some(Duration::from_secs(10));

/// User `nobody`.
const NOBODY: u32 = 65534;

/// Runs `action` on a thread that has permanently dropped every privilege; on the calling thread if that has none.
fn as_nobody<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    if !rustix::process::geteuid().is_root() {
        return action();
    }
    std::thread::scope(|scope| {
        let deprived = scope.spawn(|| {
            let nobody = Some(Uid::from_raw(NOBODY));
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            action()
        });
        deprived
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Starts a process of user nobody.
fn hostile_library(path: &Path) -> Library {
    as_nobody(|| Library::start(path))
}

/// An honest process with one connection to the kernel of host `b`, used to see whether the server
/// and other people's sessions are all right; and a meter, unless the test has one of its own.
struct Victim {
    meter: Option<Meter>,
    /// Of its own user, whoever asks for it.
    control: Client,
    library: Library,
    id: SessionId,
    slot: Slot,
    _near: Near,
    peer: TcpStream,
}

impl Victim {
    fn start(bed: &Bed, path: &Path) -> Victim {
        let victim = Victim::unmetered(bed, path);
        Victim {
            meter: Some(Meter::start(bed)),
            ..victim
        }
    }

    fn unmetered(bed: &Bed, path: &Path) -> Victim {
        let mut library = Library::start(path);
        let (id, near, slot, peer) = open_to_b(bed, &mut library);
        let mut control = Client::connect(path);
        // The server has accepted it: its open files can be counted from here.
        status(&mut control);
        Victim {
            meter: None,
            control,
            library,
            id,
            slot,
            _near: near,
            peer,
        }
    }

    /// Bytes go both ways on the old connection, and the server is there for others. What the meter measures ends here.
    fn assert_unharmed(&mut self) {
        if let Some(meter) = self.meter.take() {
            meter.finish_but_for_starts();
        }
        echo(&mut self.library, self.slot, &mut self.peer, b"unharmed");
        assert_prompt_to(&mut self.control);
    }
}

/// Opens a connection to a new listener on host `b`.
fn open_to_b(bed: &Bed, library: &mut Library) -> (SessionId, Near, Slot, TcpStream) {
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B4, 0)))
        .unwrap();
    let (id, near, slot) = library.open(listener.local_addr().unwrap());
    let (peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(TIMEOUT).unwrap();
    (id, near, slot, peer)
}

fn echo(library: &mut Library, slot: Slot, peer: &mut TcpStream, words: &[u8]) {
    use std::io::{Read, Write};
    library.write(slot, words);
    let mut heard = vec![0; words.len()];
    peer.read_exact(&mut heard).unwrap();
    assert_eq!(heard, words);
    peer.write_all(words).unwrap();
    assert_eq!(library.read(slot, words.len()), words);
}

/// Checks that a new program is served: it registers, connects and exchanges data.
fn assert_serves_others(bed: &Bed, path: &Path) {
    let mut library = Library::start(path);
    let (_, _near, slot, mut peer) = open_to_b(bed, &mut library);
    echo(&mut library, slot, &mut peer, b"served");
    assert_prompt(path);
}

/// Limits of the time for a `status` answer: the usual one, and the worst on a busy machine.
const PROMPT: Duration = Duration::from_millis(50);
const AT_WORST: Duration = Duration::from_millis(500);

/// Checks that the server answers a new client: mostly at once, and never after a standstill. For an attack that
/// lasts, a [`meter::Meter`] says more.
fn assert_prompt(path: &Path) {
    assert_prompt_to(&mut Client::connect(path));
}

fn assert_prompt_to(client: &mut Client) {
    let mut times: Vec<Duration> = (0..5).map(|_| status(client)).collect();
    times.sort_unstable();
    assert!(times[4] < AT_WORST && times[2] < PROMPT, "{times:?}");
}

/// Returns how long the server takes to answer `status`.
fn status(client: &mut Client) -> Duration {
    let start = Instant::now();
    let reply = client.ask(RequestBody::ReadStatus);
    assert!(matches!(reply, ReplyBody::Status(_)), "{reply:?}");
    start.elapsed()
}

fn counter(path: &Path, group: &str, name: &str) -> u64 {
    Client::connect(path).counter(group, name)
}

/// Sends a request that must be refused; returns the errno.
fn refused(library: &mut Library, body: RequestBody, fds: &[BorrowedFd<'_>]) -> i32 {
    let what = format!("{body:?}");
    match library.client.ask_with(body, fds).0 {
        ReplyBody::Error { errno } => errno,
        other => panic!("{what}: {other:?}"),
    }
}
