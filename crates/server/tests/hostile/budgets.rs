//! What one user can take of the server: its part, while root can always continue.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{AfterFlush, Blob, Reader, Reloaded, ReplyBody, RequestBody, Reuse};
use portolan_proto::report::SessionReport;
use portolan_stack::Session;
use portolan_sys::unix::{ConnectError, Connection};
use portolan_sys::{clock, shm};
use portolan_types::{Protocol, Slot};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, Uid, getrlimit, setrlimit};

use crate::common::{
    Client, Configuration, Library, Near, await_some, control_path, session_part, start_server,
};
use crate::meter::{Machine, Meter, RunDelays, VICTIM};
use crate::{TIMEOUT, Victim, as_nobody, assert_serves_others, counter, hostile_library, status};

/// Subordinate users of one real user.
const SUBORDINATES: std::ops::Range<u32> = 100_000..100_012;

const ANY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);

/// Runs `action` on a thread that has become another user permanently.
pub(crate) fn as_user<T: Send>(uid: u32, action: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = Some(Uid::from_raw(uid));
            rustix::thread::set_thread_res_uid(user, user, user).expect("root may");
            action()
        });
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

pub(crate) fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, wanted).unwrap();
}

/// The longest wait for another user's request among several, without the time for which others had the processors, and
/// the machine's lateness in that time: the server, the filter's softirq and this thread run one after the other.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    longest: Duration,
    machine: Duration,
}

impl Waits {
    fn sample(client: &mut Client, rounds: u32) -> Waits {
        let mut machine = Machine::start();
        let delays = RunDelays::with_server_of(client);
        let mut waits = Waits::default();
        for _ in 0..rounds {
            let answered_after = delays.without(|| status(client));
            waits.longest = waits.longest.max(answered_after);
            let start = clock::now();
            machine.ask();
            waits.machine = waits.machine.max(clock::now().since(start));
            sleep(Duration::from_millis(2));
        }
        waits
    }

    fn assert_below(self, limit: Duration) {
        assert!(
            self.longest < limit + 2 * self.machine,
            "{self:?}, {limit:?}"
        );
    }
}

pub(crate) fn resident_kib(server: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let value = line.and_then(|line| line.split_whitespace().nth(1));
    value.unwrap().parse().unwrap()
}

/// Opens connections that send nothing; the server closes some.
pub(crate) fn idle(path: &Path, count: usize) -> Vec<Connection> {
    let connect = || {
        await_some("room in the queue", || match Connection::connect(path) {
            Err(ConnectError::Failed(Errno::AGAIN)) => None,
            connected => Some(connected.unwrap()),
        })
    };
    (0..count).map(|_| connect()).collect()
}

fn descriptors(server: &Daemon) -> usize {
    let directory = format!("/proc/{}/fd", server.pid());
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn idle_connections_keep_nobody_else_out() {
    allow_descriptors();
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start_as_root(&bed);
    let mut open = as_nobody(|| idle(&path, 600));
    assert_serves_others(&bed, &path);
    // Subordinate users of one real user have parts of their own, but not root's.
    for uid in SUBORDINATES {
        open.extend(as_user(uid, || idle(&path, 100)));
    }
    assert_serves_others(&bed, &path);
    assert!(counter(&path, "server", "budget_connections_refused") > 0);
    meter.finish();
}

#[test]
fn channels_of_any_number_of_users_leave_root_some() {
    let bed = Bed::veth();
    let limits = "[limits]\nprocesses = 8\nprocesses_per_user = 4";
    let _server = Configuration::new(&bed.a, limits).start(&bed.a);
    let path = control_path(&bed.a);
    let mut taken = Vec::new();
    for uid in SUBORDINATES {
        as_user(uid, || {
            let mut client = Client::greeting(&path);
            let (reply, fds) = client.receive().unwrap();
            taken.push((client, matches!(reply.body, ReplyBody::Welcome { .. }), fds));
        });
    }
    let welcome = taken
        .iter()
        .filter(|(_, is_welcome, _)| *is_welcome)
        .count();
    assert_eq!(welcome, 7);
    assert_serves_others(&bed, &path);
}

/// Sends `Hello` repeatedly before any reply is read.
pub(crate) fn greet(client: &mut Client, times: usize) -> Vec<ReplyBody> {
    for _ in 0..times {
        let program = "greedy".into();
        let version = portolan_proto::PROTOCOL;
        client.send(RequestBody::Hello { version, program }, &[]);
    }
    (0..times)
        .map(|_| client.receive().unwrap().0.body)
        .collect()
}

#[test]
fn a_connection_gets_one_channel_however_often_it_says_hello() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let before = descriptors(&server);
    let mut client = as_nobody(|| Client::connect(&path));
    const HELLOS: usize = 60;
    let replies = greet(&mut client, HELLOS);
    let is_welcome = |reply: &&ReplyBody| matches!(reply, ReplyBody::Welcome { .. });
    assert_eq!(replies.iter().filter(is_welcome).count(), 1);
    let errno = libc::EALREADY;
    let is_refused =
        |reply: &&ReplyBody| matches!(reply, ReplyBody::Error { errno: no } if *no == errno);
    assert_eq!(replies.iter().filter(is_refused).count(), HELLOS - 1);
    // The channels made in advance come later.
    sleep(Duration::from_millis(500));
    let more = descriptors(&server) - before;
    assert!(more < 64, "{more} descriptors for one connection");
    meter.finish();
}

const LARGE_BUFFERS: &str = "[buffers]\nsend_initial = 8388608";

/// Leaves sessions with unsent bytes to the server.
fn leave_orphans(bed: &Bed, path: &Path, count: usize) -> Vec<TcpStream> {
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B4, 0)))
        .unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let address = listener.local_addr().unwrap();
    let mut peers = Vec::new();
    let mut library = as_nobody(|| Library::start(path));
    leave_orphans_to(address, &mut library, count, || {
        peers.push(listener.accept().unwrap().0);
    });
    peers
}

/// Likewise to a listener whose peers read nothing; `on_opened` is called for each connection.
pub(crate) fn leave_orphans_to(
    listener: SocketAddr,
    library: &mut Library,
    count: usize,
    mut on_opened: impl FnMut(),
) {
    const UNSENT: usize = 4 << 20;
    let text = vec![b'x'; 64 << 10];
    let mut near = Vec::<Near>::new();
    for _ in 0..count {
        let (id, descriptor, slot) = library.open(listener);
        on_opened();
        near.push(descriptor);
        let mut queued = 0;
        while queued < UNSENT {
            let session = library.stack.tcp(slot).unwrap();
            let sent = session.connection.send(clock::now(), &text);
            queued += sent;
            if sent == 0 {
                break;
            }
        }
        library.stack.touch(slot);
        library.turn();
        let Some(Session::Tcp(session)) = library.stack.remove(slot) else {
            panic!("no session");
        };
        let (capsule, fds) = shm::pack_capsule(session.to_capsule(), None).unwrap();
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let body = RequestBody::Flush {
            session: id,
            capsule,
            then: AfterFlush::Close,
            options_blob: Default::default(),
        };
        let reply = library.client.ask_with(body, &fds).0;
        assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
    }
}

fn assert_reset(peer: &mut TcpStream) {
    peer.set_read_timeout(TIMEOUT).unwrap();
    let ended = std::io::copy(peer, &mut std::io::sink()).unwrap_err();
    assert_eq!(ended.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn unsent_bytes_of_programs_that_are_gone_are_limited() {
    let bed = Bed::veth();
    let server = Configuration::new(&bed.a, LARGE_BUFFERS).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let before = resident_kib(&server);
    let mut peers = leave_orphans(&bed, &path, 60);
    sleep(Duration::from_millis(300));
    let more = (resident_kib(&server) - before) >> 10;
    assert!(more < 160, "the server holds {more} MiB");
    victim.assert_unharmed();
    // The oldest is the first to be reset.
    assert_reset(&mut peers[0]);
    assert!(counter(&path, "server", "orphans_reset") > 0);
    meter.finish();
}

#[test]
fn an_orphan_without_progress_ends_in_time() {
    let bed = Bed::veth();
    let limits = format!("{LARGE_BUFFERS}\n[limits]\norphan_seconds = 1");
    let _server = Configuration::new(&bed.a, &limits).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut peers = leave_orphans(&bed, &path, 1);
    await_some("reset of an orphan", || {
        (counter(&path, "server", "orphans_reset") == 1).then_some(())
    });
    assert_reset(&mut peers[0]);
    meter.finish_but_for_starts();
}

const SHARED: Reuse = Reuse {
    address: true,
    port: true,
};

/// Opens `count` sockets on one UDP port.
pub(crate) fn share_port(library: &mut Library, port: u16, count: u32) -> Vec<Near> {
    let local = SocketAddr::new(ANY, port);
    let share = |slot| {
        let (reply, near) = library.bind_with(Protocol::Udp, local, Slot(slot), SHARED);
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
        near
    };
    (0..count).map(share).collect()
}

#[test]
fn thousands_that_share_a_port_die_without_holding_others_up() {
    const SHARERS: u32 = 4000;
    allow_descriptors();
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Client::connect(&path);
    let mut hostile = as_nobody(|| Library::start(&path));
    let near = share_port(&mut hostile, 6200, SHARERS);
    drop((hostile, near));
    Waits::sample(&mut victim, 200).assert_below(Duration::from_millis(300));
    meter.finish();
    await_some("end of the sharers", || {
        victim.sessions().is_empty().then_some(())
    });
}

#[test]
fn a_full_table_of_bindings_is_said_and_is_one_users_only() {
    let bed = Bed::veth();
    let limits = "[limits]\nbindings = 100\nbindings_per_user = 40";
    let _server = Configuration::new(&bed.a, limits).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = as_nobody(|| Library::start(&path));
    let bind = |library: &mut Library, port: u16| {
        let local = SocketAddr::new(ANY, port);
        library.bind(Protocol::Udp, local, Slot(port.into()))
    };
    let refusal = libc::ENOBUFS;
    let is_full =
        |reply: &ReplyBody| matches!(reply, ReplyBody::Error { errno } if *errno == refusal);
    let mut near = Vec::new();
    for port in 7000..7040 {
        let (reply, end) = bind(&mut hostile, port);
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
        near.push(end);
    }
    let (reply, _) = bind(&mut hostile, 7040);
    assert!(is_full(&reply), "{reply:?}");
    // Nothing is left of it: the port is free.
    bed.a
        .enter(|| std::net::UdpSocket::bind((ANY, 7040)))
        .unwrap();
    // A listener needs a row, too.
    let (reply, end) = hostile.bind(Protocol::Tcp, SocketAddr::new(ANY, 7100), Slot(0));
    let ReplyBody::Bound { session, .. } = reply else {
        panic!("{reply:?}");
    };
    near.push(end);
    let listen = RequestBody::Listen {
        session: portolan_proto::control::SessionRef::Known(session),
        backlog: 1,
        options: Default::default(),
        options_blob: Default::default(),
        slot: None,
    };
    let (reply, _) = hostile.ask_new(portolan_sys::unix::PairKind::SeqPacket, listen);
    assert!(is_full(&reply), "{reply:?}");
    // Others get their rows, and receive.
    let mut other = Library::start(&path);
    let (reply, _near) = bind(&mut other, 7200);
    assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    let peer = bed
        .b
        .enter(|| std::net::UdpSocket::bind("0.0.0.0:0"))
        .unwrap();
    peer.send_to(b"x", (Bed::A4, 7200)).unwrap();
    await_some("a datagram", || other.ring.next().map(drop));
    assert!(counter(&path, "server", "budget_bindings_refused") > 0);
    // Closed sockets return their rows.
    near.swap_remove(0);
    await_some("a row", || {
        let (reply, end) = bind(&mut hostile, 7040);
        let is_bound = matches!(reply, ReplyBody::Bound { .. });
        is_bound.then(|| near.push(end))
    });
    meter.finish();
}

#[test]
fn deals_of_shared_ports_are_limited_and_a_refused_one_takes_nothing() {
    let bed = Bed::veth();
    let limits = "[limits]\nshared_ports = 10\nshared_ports_per_user = 2";
    let _server = Configuration::new(&bed.a, limits).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = as_nobody(|| Library::start(&path));
    let mut near = Vec::new();
    let mut bind = |port: u16| {
        let local = SocketAddr::new(ANY, port);
        let (reply, end) = hostile.bind_with(Protocol::Udp, local, Slot(0), SHARED);
        near.push(end);
        reply
    };
    for port in [7000, 7000, 7001, 7001, 7000, 7002] {
        let reply = bind(port);
        assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
    }
    let errno = libc::ENOBUFS;
    let reply = bind(7002);
    let is_full = matches!(reply, ReplyBody::Error { errno: no } if no == errno);
    assert!(is_full, "{reply:?}");
    assert!(counter(&path, "server", "budget_shared_ports_refused") > 0);
    meter.finish();
}

/// Opens sessions whose list is long.
pub(crate) fn many_sessions(path: &Path, count: u32) -> (Library, Vec<Near>) {
    let mut library = as_nobody(|| Library::start(path));
    let near = (0..count)
        .map(|slot| {
            let port = u16::try_from(10_000 + slot).unwrap();
            let local = SocketAddr::new(ANY, port);
            let (reply, near) = library.bind(Protocol::Udp, local, Slot(slot));
            assert!(matches!(reply, ReplyBody::Bound { .. }), "{reply:?}");
            near
        })
        .collect();
    (library, near)
}

#[test]
fn lists_that_nobody_reads_are_not_made() {
    allow_descriptors();
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let _many = many_sessions(&path, 1000);
    let mut client = as_nobody(|| Client::connect(&path));
    let before = resident_kib(&server);
    for _ in 0..100 {
        client.send(RequestBody::ListSessions, &[]);
    }
    let mut other = Client::connect(&path);
    Waits::sample(&mut other, 50).assert_below(Duration::from_millis(100));
    let more = resident_kib(&server).saturating_sub(before);
    assert!(more < 8 << 10, "{more} KiB for one client");
    assert!(counter(&path, "server", "budget_lists_refused") > 50);
    // A client that reads is served.
    let lists = (0..100).filter(|_| list_of(&mut client).is_ok());
    assert!((1..10).contains(&lists.count()));
    meter.finish();
}

fn list_of(client: &mut Client) -> Result<Vec<SessionReport>, i32> {
    client.receive_list_or_errno(session_part)
}

/// Returns the addresses of 10.77.0.0/24 that the kernel of `a` looks for, or has looked for.
fn looked_for(bed: &Bed) -> Vec<Ipv4Addr> {
    let command = ["neigh", "show", "dev", Bed::DEVICE];
    let output = bed.a.exec("ip").args(command).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let addresses = shown
        .lines()
        .filter_map(|line| line.split(' ').next()?.parse().ok());
    addresses.collect()
}

/// Nobody answers for any of them.
#[test]
fn who_looks_for_many_neighbours_keeps_nobody_from_looking_for_one() {
    const LIMIT: usize = 128;
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut hostile = hostile_library(&path);
    let mut honest = as_user(VICTIM, || Library::start(&path));
    let command = ["-o", "link", "show", Bed::DEVICE];
    let output = bed.a.exec("ip").args(command).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let interface: u32 = shown.split(':').next().unwrap().parse().unwrap();
    let address = |number| Ipv4Addr::new(10, 77, 0, number);
    let look_for = |library: &mut Library, number| {
        let address = address(number).into();
        let resolve = RequestBody::Resolve { interface, address };
        library.client.send(resolve, &[]);
    };
    for number in 10..210 {
        look_for(&mut hostile, number);
    }
    look_for(&mut honest, 250);
    await_some("its turn", || {
        looked_for(&bed).contains(&address(250)).then_some(())
    });
    let known = looked_for(&bed);
    let by_hostile = known
        .iter()
        .filter(|ip| (10..210).contains(&ip.octets()[3]));
    assert_eq!(by_hostile.count(), LIMIT);
    meter.finish();
}

/// Each connection may have one.
#[test]
fn lists_of_all_connections_of_a_user_take_so_much_and_no_more() {
    const SESSIONS: u32 = 4000;
    const MOST_KIB: u64 = 64 << 10;
    allow_descriptors();
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let _many = many_sessions(&path, SESSIONS);
    let mut clients: Vec<Client> = as_nobody(|| (0..185).map(|_| Client::connect(&path)).collect());
    let before = resident_kib(&server);
    for client in &mut clients {
        client.send(RequestBody::ListSessions, &[]);
    }
    await_some("a refusal", || {
        (counter(&path, "server", "budget_lists_refused") > 0).then_some(())
    });
    let more = resident_kib(&server).saturating_sub(before);
    assert!(more < MOST_KIB, "{more} KiB for one user");
    assert!(Client::connect(&path).sessions().len() >= SESSIONS as usize);
    let lists: Vec<_> = clients.iter_mut().map(list_of).collect();
    let whole = lists.iter().flatten();
    assert!(whole.clone().all(|list| list.len() >= SESSIONS as usize));
    assert!(whole.count() > 20);
    let refused = |list: &Result<_, i32>| *list.as_ref().err().unwrap_or(&libc::EAGAIN);
    assert!(lists.iter().all(|list| refused(list) == libc::EAGAIN));
    meter.finish();
}

#[test]
fn lists_in_a_loop_take_no_more_than_a_part_of_each_turn() {
    allow_descriptors();
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let _many = many_sessions(&path, 3000);
    let clients: Vec<Client> = as_nobody(|| (0..60).map(|_| Client::connect(&path)).collect());
    let mut victim = Client::connect(&path);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let is_over = || stop.load(std::sync::atomic::Ordering::Relaxed);
    let waits = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut clients = clients;
            while !is_over() {
                for client in &mut clients {
                    client.send(RequestBody::ListSessions, &[]);
                }
                for client in &mut clients {
                    list_of(client).unwrap();
                }
            }
        });
        sleep(Duration::from_millis(200));
        let waits = Waits::sample(&mut victim, 50);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        waits
    });
    waits.assert_below(Duration::from_millis(150));
    assert!(counter(&path, "server", "budget_turns_spent") > 0);
    meter.finish();
}

#[test]
fn who_does_not_read_is_not_served_and_is_served_when_it_does() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut client = as_nobody(|| Client::connect(&path));
    let mut sent = 0;
    let request = |id| portolan_proto::control::Request {
        id,
        body: RequestBody::ReadStatus,
    };
    // Both queues fill up, and neither is read.
    let start = clock::now();
    while clock::now().since(start) < Duration::from_millis(700) {
        let bytes = portolan_proto::encode(&request(sent + 1));
        let flags = rustix::net::SendFlags::DONTWAIT;
        match rustix::net::send(&client, &bytes, flags) {
            Ok(_) => sent += 1,
            Err(_) => sleep(Duration::from_millis(20)),
        }
    }
    assert_eq!(counter(&path, "server", "deaf_clients"), 0);
    for id in 1..=sent {
        assert_eq!(client.receive().unwrap().0.id, id);
    }
    meter.finish();
}

#[test]
fn a_process_with_thousands_of_sessions_is_listed_and_dies_in_parts() {
    const COUNT: u32 = 4000;
    allow_descriptors();
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Client::connect(&path);
    let mut requester = as_nobody(|| Client::connect(&path));
    let (hostile, near) = many_sessions(&path, COUNT);
    requester.send(RequestBody::ListSessions, &[]);
    let listing = Waits::sample(&mut victim, 20);
    let sessions = list_of(&mut requester).unwrap();
    let datagram_sockets = sessions.iter().filter(|s| s.protocol == Protocol::Udp);
    assert_eq!(datagram_sockets.count(), COUNT as usize);
    let connection = hostile.client;
    drop((connection, near));
    let dying = Waits::sample(&mut victim, 100);
    for waits in [listing, dying] {
        waits.assert_below(Duration::from_millis(80));
    }
    meter.finish();
    await_some("end of the sessions", || {
        victim.sessions().is_empty().then_some(())
    });
}

/// Over more than a turn: a user that requests as much as the server can do gets its share, and others do not notice.
#[test]
fn requests_in_a_loop_take_no_more_than_their_users_share_of_the_time() {
    let bed = Bed::veth();
    let server = Configuration::new(&bed.a, "[limits]\ntime_share = 20").start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let used = || {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", server.pid())).unwrap();
        Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
    };
    let before = used();
    let begun = clock::now();
    let attack = Duration::from_secs(3);
    let asked = as_nobody(|| {
        let mut clients: Vec<Client> = (0..8).map(|_| Client::connect(&path)).collect();
        let mut asked = 0;
        while clock::now().since(begun) < attack {
            for client in &mut clients {
                client.send(RequestBody::ReadCounters, &[]);
            }
            for client in &mut clients {
                client.receive().unwrap();
                asked += 1;
            }
        }
        asked
    });
    let share = (used() - before).as_secs_f64() / clock::now().since(begun).as_secs_f64();
    eprintln!("{asked} requests, {:.0} % of the time", 100.0 * share);
    assert!(counter(&path, "server", "budget_shares_spent") > 0);
    // The burst of a quarter of a second, the meter's own requests, and the kernel's work for the others.
    assert!(share < 0.55, "{share}");
    assert!(asked > 100, "it is served all the same");
    meter.finish();
}

/// A relayed session's program writes, and its peer reads nothing: the total that the server holds for a user is
/// limited.
#[test]
fn relayed_bytes_that_nobody_takes_are_limited_and_the_rest_waits() {
    const SESSIONS: usize = 40;
    let bed = Bed::veth();
    let limits = "[buffers]\nsend_initial = 4194304\n[limits]\nrelay_memory_per_user = 8";
    let server = Configuration::new(&bed.a, limits).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B4, 0)))
        .unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut library = as_nobody(|| Library::start(&path));
    let mut relayed = Vec::new();
    for _ in 0..SESSIONS {
        let (id, near, slot) = library.open(listener.local_addr().unwrap());
        let (peer, _) = listener.accept().unwrap();
        library.flush(id, slot, AfterFlush::Relay(Reader::Sender));
        relayed.push((near, peer));
    }
    let before = resident_kib(&server);
    let chunk = [7; 1 << 16];
    let flags = rustix::net::SendFlags::DONTWAIT;
    for _ in 0..100 {
        for (near, _) in &relayed {
            // Until its descriptor is full.
            let _ = rustix::net::send(&near.0, &chunk, flags);
        }
        sleep(Duration::from_millis(5));
    }
    let more = resident_kib(&server).saturating_sub(before) >> 10;
    assert!(more < 40, "{more} MiB");
    assert!(counter(&path, "server", "budget_relays_stalled") > 0);
    // Bytes move again as soon as the peer reads.
    let (near, mut peer) = relayed.remove(0);
    relayed.clear();
    peer.set_read_timeout(TIMEOUT).unwrap();
    let mut came = 0;
    let mut buffer = vec![0; 1 << 16];
    while came < 8 << 20 {
        let _ = rustix::net::send(&near.0, &chunk, flags);
        came += std::io::Read::read(&mut peer, &mut buffer).unwrap();
    }
    meter.finish();
}

#[test]
fn the_servers_table_of_descriptors_does_not_grow_while_others_fill_it() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let meter = Meter::start(&bed);
    let size = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("FDSize:"));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
            .unwrap()
    };
    let before = size();
    assert!(before >= 1 << 14, "{before}");
    let _open = idle(&control_path(&bed.a), 400);
    assert_eq!(size(), before);
    meter.finish_but_for_starts();
}

/// How many UDP ports a user gets before he is refused.
fn bind_all(path: &Path, kept: &mut Vec<(Library, Vec<Near>)>) -> usize {
    let mut library = Library::start(path);
    let mut ports = Vec::new();
    loop {
        let (reply, near) = library.bind(Protocol::Udp, SocketAddr::new(Bed::A4, 0), Slot(0));
        match reply {
            ReplyBody::Bound { .. } => ports.push(near),
            ReplyBody::Error { errno } => {
                assert_eq!(errno, libc::ENOBUFS);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    let count = ports.len();
    kept.push((library, ports));
    count
}

/// The server's descriptors are parted as its sessions are.
#[test]
fn two_users_do_not_use_up_the_servers_descriptors() {
    const DESCRIPTORS: u64 = 1024;
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start_as_root(&bed);
    let mut limit = std::process::Command::new("prlimit");
    limit.args(["--pid", &server.pid().to_string()]);
    limit.arg(format!("--nofile={DESCRIPTORS}:"));
    assert!(limit.status().unwrap().success());
    let text = Blob::Inline(b"[limits]\nsessions = 200000".to_vec());
    let reply = Client::connect(&path).ask(RequestBody::Reload { text });
    let is_changed = matches!(reply, ReplyBody::Reloaded(Reloaded::Changed(_)));
    assert!(is_changed, "{reply:?}");
    let mut kept = Vec::new();
    for uid in SUBORDINATES.take(2) {
        let count = as_user(uid, || bind_all(&path, &mut kept));
        assert!((100..=213).contains(&count), "{count}");
    }
    assert_serves_others(&bed, &path);
    assert_eq!(counter(&path, "server", "descriptors_short"), 0);
    meter.finish();
}
