//! Programs that attack the server in rounds, each as a user of its own.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use portolan_netns::{Bed, Daemon, Namespace};
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::qos::Scope;
use portolan_stack::Session;
use portolan_types::{Protocol, SessionId, Slot};
use rustix::net::{Shutdown, sockopt};
use rustix::process::Uid;

use super::bystanders::public_programs;
use crate::admission::unsafe_code;
use crate::budgets::{
    as_user, greet, idle, leave_orphans_to, many_sessions, resident_kib, share_port,
};
use crate::capsules::flipped;
use crate::closing::{lingering, send};
use crate::common::{Client, Library, Near, control_path};
use crate::forgery::{flow_of, forgeries, macs, to_be_summed};
use crate::frames::Forgery;
use crate::fuzzing::values::Random;
use crate::fuzzing::{Hostile, act};
use crate::handlers::{Owner, PASS, always, slow};
use crate::locals::{LIES, end_in_silence, introduce, ring_for_many, scribble};
use crate::memory::Page;
use crate::messages::{requests_about, wrong_pairs};
use crate::relays::reclaim_while_it_is_filled;
use crate::stalling::{StallingFile, with_own_descriptors};
use crate::starting::start_and_leave;
use crate::waking::{die_beside_a_clogged_notifier, have_a_clogged_holder_recalled};
use crate::{delegations, guarantees, low_ports};

/// The user of most attackers.
const COMMON_USER: u32 = 100_000;

/// A port on which a program has rubbish in its ring and doorbell while datagrams arrive.
pub(super) const RUBBISH_PORT: u16 = 6300;

/// Duration of a round that does not end by itself.
const ROUND: Duration = Duration::from_millis(500);

struct Attacker {
    name: &'static str,
    /// Starts programs, or mounts: the thread begins as root, and drops that itself.
    begins_as_root: bool,
    /// Uses up a budget, which the others would lack.
    has_own_user: bool,
    round: fn(&mut Round<'_>),
}

const fn user(name: &'static str, round: fn(&mut Round<'_>)) -> Attacker {
    Attacker {
        name,
        begins_as_root: false,
        has_own_user: false,
        round,
    }
}

const fn another(name: &'static str, round: fn(&mut Round<'_>)) -> Attacker {
    Attacker {
        name,
        begins_as_root: false,
        has_own_user: true,
        round,
    }
}

const fn root(name: &'static str, round: fn(&mut Round<'_>)) -> Attacker {
    Attacker {
        name,
        begins_as_root: true,
        has_own_user: true,
        round,
    }
}

const ATTACKERS: &[Attacker] = &[
    user("clogged notifiers", clogged_notifiers),
    user("clogged alerts", clogged_alerts),
    another("descriptors that linger", descriptors_that_linger),
    root("files that do not close", files_that_do_not_close),
    user("forged frames", forged_frames),
    user("low ports", low_ports),
    another("idle connections", idle_connections),
    another("starts in a loop", starts_in_a_loop),
    user("Hello again and again", hello_again),
    another("orphans", orphans),
    user("sharers that die", sharers),
    another("all bindings", all_bindings),
    another("lists that nobody reads", unread_lists),
    user("memory of local sessions", local_memory),
    user("relays rung for", relays),
    user("relays reclaimed", reclaimed_relays),
    user("sessions of others", sessions_of_others),
    another("anything", anything),
    user("flipped capsules", flipped_capsules),
    user("rubbish in the channel", channel_rubbish),
    user("reservations", reservations),
    user("extensions", extensions),
    user("claims", claims),
    root("killed programs", killed_programs),
];

/// The environment of attackers.
pub(super) struct Field<'a> {
    host: &'a Namespace,
    path: PathBuf,
    programs: PathBuf,
    peer: Peer,
}

impl Field<'_> {
    pub(super) fn prepare(bed: &Bed) -> Field<'_> {
        Field {
            host: &bed.a,
            path: control_path(&bed.a),
            programs: public_programs(&bed.a),
            peer: Peer::start(bed),
        }
    }
}

/// A host on the wire that accepts connections, reads nothing, and resets the oldest.
struct Peer {
    address: SocketAddr,
    listener: Arc<TcpListener>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    const KEPT: usize = 100;

    fn start(bed: &Bed) -> Peer {
        let any = SocketAddr::new(Bed::B4, 0);
        let listener = Arc::new(bed.b.enter(|| TcpListener::bind(any)).unwrap());
        sockopt::set_socket_recv_buffer_size(&*listener, 4096).unwrap();
        let accepting = Arc::clone(&listener);
        let thread = thread::spawn(move || {
            let mut kept = VecDeque::new();
            // Fails when it is shut down.
            while let Ok((stream, _)) = accepting.accept() {
                // None stays in TIME-WAIT.
                let _ = sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
                kept.push_back(stream);
                if kept.len() > Peer::KEPT {
                    kept.pop_front();
                }
            }
        });
        Peer {
            address: listener.local_addr().unwrap(),
            listener,
            thread: Some(thread),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // If it is shut down already, the thread ends as well.
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What one attacker has done.
pub(super) struct Tale {
    name: &'static str,
    pub rounds: u64,
    /// Rounds ended early by a refusal, or by a missing answer.
    cut_short: u64,
    last_reason: String,
}

impl fmt::Display for Tale {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tale {
            name,
            rounds,
            cut_short,
            last_reason,
        } = self;
        let reason: String = last_reason.chars().take(90).collect();
        let reason = reason.replace('\n', " ");
        write!(
            formatter,
            "{name:26} {rounds:7} rounds, {cut_short:6} cut short  {reason}"
        )
    }
}

struct Round<'a> {
    field: &'a Field<'a>,
    random: Random,
    number: usize,
    uid: u32,
}

impl Round<'_> {
    fn path(&self) -> &Path {
        &self.field.path
    }

    fn library(&self) -> Library {
        Library::start(self.path())
    }
}

/// Stops the attackers, even if the thread that waits for them panics.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs all attackers for `duration`, or until the server ends. Returns what each did, and the server's memory after
/// each tenth of the time, in MiB.
pub(super) fn attack(
    field: &Field<'_>,
    duration: Duration,
    server: &mut Daemon,
) -> (Vec<Tale>, Vec<u64>) {
    silence_attackers();
    let stop = AtomicBool::new(false);
    let stop = &stop;
    thread::scope(|scope| {
        let attackers_end = StopOnDrop(stop);
        let threads: Vec<_> = ATTACKERS
            .iter()
            .zip(COMMON_USER + 1..)
            .map(|(attacker, own)| {
                let uid = if attacker.has_own_user {
                    own
                } else {
                    COMMON_USER
                };
                scope.spawn(move || attacker.go_on(field, uid, stop))
            })
            .collect();
        let tenths = (0..10)
            .map_while(|_| runs_for(server, duration / 10).then(|| resident_kib(server) >> 10));
        let resident = tenths.collect();
        drop(attackers_end);
        let tales = threads.into_iter().map(|thread| thread.join().unwrap());
        (tales.collect(), resident)
    })
}

/// Returns false, at once, if the server ends before.
fn runs_for(server: &mut Daemon, duration: Duration) -> bool {
    const LOOK: Duration = Duration::from_millis(200);
    let end = Instant::now() + duration;
    while server.is_running() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        sleep(left.min(LOOK));
    }
    false
}

impl Attacker {
    fn go_on(&self, field: &Field<'_>, uid: u32, stop: &AtomicBool) -> Tale {
        IS_ATTACKER.set(true);
        be_nice();
        if !self.begins_as_root {
            let user = Some(Uid::from_raw(uid));
            rustix::thread::set_thread_res_uid(user, user, user).expect("root may");
        }
        let mut tale = Tale {
            name: self.name,
            rounds: 0,
            cut_short: 0,
            last_reason: String::new(),
        };
        let mut round = Round {
            field,
            random: Random(uid.into()),
            number: 0,
            uid,
        };
        while !stop.load(Ordering::Relaxed) {
            tale.rounds += 1;
            round.number += 1;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.round)(&mut round))) {
                tale.cut_short += 1;
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
                tale.last_reason = text.unwrap_or_default();
                // An attacker that is refused at once pauses before it retries.
                sleep(Duration::from_millis(20));
            }
        }
        tale
    }
}

thread_local! {
    static IS_ATTACKER: Cell<bool> = const { Cell::new(false) };
}

/// A refused attack ends by a panic, which its tale reports.
fn silence_attackers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_ATTACKER.get() {
                usual(info);
            }
        }));
    });
}

/// The nice value of attackers: all together weigh as much as one program of the usual priority.
pub(super) const NICE: &str = "15";

/// Gives the calling thread the priority of attackers.
pub(super) fn be_nice() {
    let nice = NICE.parse().expect("it is a number");
    // SAFETY: the kernel is told nothing but numbers; 0 is the calling thread.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn clogged_notifiers(round: &mut Round<'_>) {
    die_beside_a_clogged_notifier(round.path());
}

fn clogged_alerts(round: &mut Round<'_>) {
    let _programs = have_a_clogged_holder_recalled(round.path(), round.field.peer.address);
    sleep(Duration::from_millis(10));
}

fn descriptors_that_linger(round: &mut Round<'_>) {
    let (stream, _peer) = lingering();
    let client = Client::connect(round.path());
    send(&client, b"rubbish", &[stream.as_fd(); 253]).unwrap();
    let _ = send(&client, b"behind it", &[stream.as_fd()]);
}

fn files_that_do_not_close(round: &mut Round<'_>) {
    let (path, uid) = (round.path(), round.uid);
    with_own_descriptors(|| {
        IS_ATTACKER.set(true);
        let file = StallingFile::mount();
        as_user(uid, || {
            IS_ATTACKER.set(true);
            for _ in 0..5 {
                let client = Client::connect(path);
                // The server may have hung up.
                let _ = send(&client, b"rubbish", &[file.as_fd(); 250]);
            }
        });
        sleep(ROUND);
    });
}

fn forged_frames(round: &mut Round<'_>) {
    let mut library = round.library();
    let (_, _near, slot) = library.open(round.field.peer.address);
    let (device, peer) = macs(&library);
    let own = Forgery::of(&flow_of(&library, slot), device, peer);
    let another = Forgery {
        source_port: 6379,
        ..own.clone()
    };
    let mut frames: Vec<_> = forgeries(&own, &another)
        .into_iter()
        .map(|(_, forgery, _)| forgery.frame())
        .collect();
    for (start, offset) in [(34, 0), (34, 2), (20, 6), (24, 26), (42, 0)] {
        frames.push(to_be_summed(own.frame(), start, offset));
    }
    for _ in 0..20 {
        let mut frame = own.frame();
        let at = round.random.below(frame.len());
        frame[at] ^= 1 << round.random.below(8);
        frames.push(frame);
    }
    for frame in frames.iter().cycle().take(1000) {
        // The kernel itself refuses some.
        let _ = library.tap.0.write(&[std::io::IoSlice::new(frame)]);
    }
}

fn low_ports(round: &mut Round<'_>) {
    let mut library = round.library();
    let file = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..50 {
        low_ports::assert_refused(&mut library, None);
        low_ports::assert_refused(&mut library, Some(file.as_fd()));
    }
}

fn idle_connections(round: &mut Round<'_>) {
    let _open = idle(round.path(), 200);
    sleep(ROUND);
}

fn starts_in_a_loop(round: &mut Round<'_>) {
    let begun = Instant::now();
    start_and_leave(round.path(), || begun.elapsed() > ROUND);
}

fn hello_again(round: &mut Round<'_>) {
    greet(&mut Client::connect(round.path()), 60);
}

fn orphans(round: &mut Round<'_>) {
    let mut library = round.library();
    leave_orphans_to(round.field.peer.address, &mut library, 20, || {});
}

fn sharers(round: &mut Round<'_>) {
    let mut library = round.library();
    let _sharers = share_port(&mut library, 6200, 400);
}

fn all_bindings(round: &mut Round<'_>) {
    let mut library = round.library();
    let mut near = Vec::<Near>::new();
    for port in 20_000..21_100 {
        let local = SocketAddr::new([0, 0, 0, 0].into(), port);
        let (reply, end) = library.bind(Protocol::Udp, local, Slot(port.into()));
        if !matches!(reply, ReplyBody::Bound { .. }) {
            return sleep(ROUND / 5);
        }
        near.push(end);
    }
    panic!("there is no end of bindings");
}

fn unread_lists(round: &mut Round<'_>) {
    let _many = many_sessions(round.path(), 500);
    let mut clients: Vec<Client> = (0..10).map(|_| Client::connect(round.path())).collect();
    for _ in 0..20 {
        for client in &mut clients {
            client.send(RequestBody::ListSessions, &[]);
        }
    }
    sleep(ROUND / 5);
}

fn local_memory(round: &mut Round<'_>) {
    let (mut opener, mut accepter) = (round.library(), round.library());
    for value in [0, 1, 1 << 20, u64::MAX, u64::MAX / 2] {
        let (spoiled, _end) = introduce(&mut opener, &mut accepter);
        scribble(&spoiled, value);
    }
    for lie in LIES {
        let (opened, _accepted) = introduce(&mut opener, &mut accepter);
        end_in_silence(&opened, lie);
    }
}

fn relays(round: &mut Round<'_>) {
    let (mut opener, mut accepter) = (round.library(), round.library());
    let _relayed = ring_for_many(&mut opener, &mut accepter, 100);
    sleep(ROUND / 5);
}

/// A relayed session is reclaimed while its program keeps writing to it.
fn reclaimed_relays(round: &mut Round<'_>) {
    reclaim_while_it_is_filled(round.path(), round.field.peer.address, ROUND);
}

fn sessions_of_others(round: &mut Round<'_>) {
    let mut library = round.library();
    for _ in 0..20 {
        let session = SessionId(round.random.number());
        for body in requests_about(session) {
            library.client.ask(body);
        }
    }
    let control = library.client.as_fd().try_clone_to_owned().unwrap();
    for (_, fds) in wrong_pairs(control.as_fd()) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let body = requests_about(SessionId(0)).swap_remove(7);
        library.client.ask_with(body, &fds);
    }
}

fn anything(round: &mut Round<'_>) {
    let path = &round.field.path;
    let random = &mut round.random;
    let mut clients: Vec<Hostile> = (0..4).map(|_| Hostile::start(path, random)).collect();
    for _ in 0..2000 {
        act(path, &mut clients, random);
    }
}

fn flipped_capsules(round: &mut Round<'_>) {
    let mut library = round.library();
    for number in 0..20 {
        let (id, _near, slot) = library.open(round.field.peer.address);
        let Some(Session::Tcp(session)) = library.stack.remove(slot) else {
            panic!("no session");
        };
        let body = flipped(id, session.to_capsule(), 20 * round.number + number);
        library.client.ask(body);
    }
}

fn channel_rubbish(round: &mut Round<'_>) {
    let mut library = round.library();
    let local = SocketAddr::new([0, 0, 0, 0].into(), RUBBISH_PORT);
    let (_, _near) = library.bind(Protocol::Udp, local, Slot(0));
    let doorbell = Page::map(&library.maps.doorbell);
    let consumer = Page::map(&library.maps.ring);
    let begun = Instant::now();
    while begun.elapsed() < ROUND {
        let value = match round.random.below(3) {
            0 => round.random.number(),
            1 => round.random.below(4) as u64,
            _ => u64::MAX,
        };
        doorbell.fill(value);
        consumer.fill(value);
        sleep(Duration::from_millis(1));
    }
}

fn reservations(round: &mut Round<'_>) {
    let mut client = Client::connect(round.path());
    let scopes = [
        Scope::User { uid: 0 },
        Scope::User { uid: round.uid },
        Scope::Process { pid: 1 },
        Scope::Cgroup("/".into()),
    ];
    for scope in &scopes {
        for request in guarantees::requests_about(scope) {
            client.ask(RequestBody::Qos(request));
        }
    }
}

fn extensions(round: &mut Round<'_>) {
    let mut owner = Owner::start(round.path());
    owner.install(always(PASS));
    owner.install_at(7, slow());
    for (_, code, _) in unsafe_code().into_iter().take(8) {
        owner.refused(code);
    }
    sleep(ROUND / 5);
}

fn claims(round: &mut Round<'_>) {
    let mut library = round.library();
    let (own, _near, _) = delegations::listen(&mut library, 4001, Some(Slot(3)));
    let remote = SocketAddr::new(Bed::B4, 1);
    let cases = [
        (SessionId(77), SocketAddr::new(Bed::A4, 4001)),
        (own, SocketAddr::new(Bed::A4, 6379)),
        (own, SocketAddr::new(Bed::B4, 4001)),
    ];
    for (listener, local) in cases.into_iter().cycle().take(60) {
        let body = delegations::claim(listener, local, remote);
        delegations::claim_refused(&mut library, body);
    }
}

/// Portolan programs, killed at any moment.
fn killed_programs(round: &mut Round<'_>) {
    let field = round.field;
    let program = |name: &str| field.programs.join(name);
    let peer = field.peer.address.to_string();
    let words = match round.random.below(3) {
        0 => vec!["connect", &peer, "--seconds", "5"],
        1 => vec!["bulk", &peer, "--seconds", "5"],
        _ => vec!["hold", &peer],
    };
    let mut command: Command = field.host.exec("nice");
    let user = format!("--reuid={}", round.uid);
    let group = format!("--regid={}", round.uid);
    command
        .args(["-n", NICE, "setpriv", &user, &group, "--clear-groups", "--"])
        .arg(program("portolan"))
        .args(["run", "--require", "--"])
        .arg(program("portolan-traffic"))
        .args(&words)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    sleep(Duration::from_millis(round.random.below(400) as u64));
    child.kill().unwrap();
    child.wait().unwrap();
}
