//! Files whose close blocks as long as their owner likes: those of a FUSE file system that does not answer. Any user
//! can mount one, in a user namespace of its own.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{
    AfterFlush, Blob, Reader, ReplyBody, Request, RequestBody, Reuse, SessionRef,
};
use portolan_proto::datagram::UnreadDatagram;
use portolan_proto::encode;
use portolan_proto::qos::{
    Kind, QosReply, QosRequest, Rate, Scope, Slack, Transmit, TransmitReport,
};
use portolan_proto::report::SessionReport;
use portolan_sys::descriptor::set_socket_option;
use portolan_sys::tap::Tap;
use portolan_sys::unix::{self, PairKind};
use portolan_types::{Protocol, Slot};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::closing::send;
use crate::common::{
    Client, Configuration, Library, await_closes, await_some, connect_request, control_path,
    open_files, open_files_at_rest, start_server,
};
use crate::meter::Meter;
use crate::{
    Victim, as_nobody, assert_prompt, assert_serves_others, counter, groups, hostile_library,
    low_ports,
};

/// Numbers and lengths of linux/fuse.h, and of the arguments of fsconfig(2).
const IN_HEADER: usize = 40;
const INIT: u32 = 26;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const FLUSH: u32 = 25;
const FORGET: u32 = 2;
const INIT_OUT: usize = 64;
const ATTR_OUT: usize = 104;
const OPEN_OUT: usize = 16;
const LARGEST_REQUEST: usize = 1 << 18;
const PAGE: usize = 4096;
const SET_STRING: usize = 1;
const CREATE: usize = 6;

/// A file system with one file, its root, which is not in the file tree.
pub(crate) struct StallingFile {
    file: Option<OwnedFd>,
    flushes: Arc<AtomicUsize>,
    reads: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    lets_close: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl StallingFile {
    /// Mounts it, as root: a close of its file does not return before `self` is dropped.
    pub(crate) fn mount() -> StallingFile {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")
            .expect("the kernel has FUSE");
        let mount = mount(&device);
        let flushes = Arc::new(AtomicUsize::new(0));
        let reads = Arc::new(AtomicUsize::new(0));
        let is_over = Arc::new(AtomicBool::new(false));
        let lets_close = Arc::new(AtomicBool::new(false));
        let counts = (Arc::clone(&flushes), Arc::clone(&reads));
        let ends = (Arc::clone(&is_over), Arc::clone(&lets_close));
        let server =
            thread::spawn(move || serve(device, (&counts.0, &counts.1), (&ends.0, &ends.1)));
        let path = format!("/proc/thread-self/fd/{}", mount.as_raw_fd());
        let file = File::open(path).expect("the file system lets root open its root");
        StallingFile {
            file: Some(file.into()),
            flushes,
            reads,
            is_over,
            lets_close,
            server: Some(server),
        }
    }

    /// From now on only its pages do not come: programs may have it and close it.
    fn let_close(&self) {
        self.lets_close.store(true, Ordering::Relaxed);
    }

    /// Returns a page of memory that becomes available when this is dropped: any access to it blocks.
    fn page(&self) -> StallingPage {
        let file = self.file.as_ref().expect("until it is dropped");
        // The kernel queries its length.
        rustix::fs::fstat(file).expect("it is answered");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe {
            let (fd, flags) = (file.as_raw_fd(), libc::MAP_PRIVATE);
            libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        StallingPage(at as usize)
    }

    /// Waits until a thread is blocked on a page.
    fn await_reader(&self) {
        await_some("a reader", || {
            (self.reads.load(Ordering::Relaxed) > 0).then_some(())
        });
    }

    /// Returns how many closes are blocked.
    pub(crate) fn waiting(&self) -> usize {
        self.flushes.load(Ordering::Relaxed)
    }
}

/// The address of a page of a stalling file, which stays mapped.
#[derive(Clone, Copy)]
struct StallingPage(usize);

impl AsFd for StallingFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("until it is dropped").as_fd()
    }
}

impl Drop for StallingFile {
    /// The file system answers again, and is unmounted.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        drop(self.file.take());
        if let Some(server) = self.server.take() {
            // If it failed, so has the test.
            let _ = server.join();
        }
    }
}

fn mount(device: &File) -> OwnedFd {
    let context = file_system_call(libc::SYS_fsopen, [c"fuse".as_ptr() as usize, 1, 0, 0, 0]);
    let context = context.expect("root may mount");
    let number = context.as_raw_fd() as usize;
    for (key, value) in [
        (c"fd", device.as_raw_fd().to_string()),
        (c"rootmode", "100666".to_owned()),
        (c"user_id", "0".to_owned()),
        (c"group_id", "0".to_owned()),
    ] {
        let value = CString::new(value).unwrap();
        let words = [
            number,
            SET_STRING,
            key.as_ptr() as usize,
            value.as_ptr() as usize,
            0,
        ];
        configure(words);
    }
    configure([number, CREATE, 0, 0, 0]);
    file_system_call(libc::SYS_fsmount, [number, 1, 0, 0, 0]).expect("root may mount")
}

fn configure(words: [usize; 5]) {
    let [context, command, key, value, auxiliary] = words;
    // SAFETY: key and value are null, or strings that live until the call returns.
    let result =
        unsafe { libc::syscall(libc::SYS_fsconfig, context, command, key, value, auxiliary) };
    assert_eq!(result, 0, "fsconfig: {}", std::io::Error::last_os_error());
}

/// Makes a system call that returns a descriptor.
fn file_system_call(number: libc::c_long, words: [usize; 5]) -> std::io::Result<OwnedFd> {
    let [a, b, c, d, e] = words;
    // SAFETY: fsopen and fsmount take numbers, and a static string.
    let fd = unsafe { libc::syscall(number, a, b, c, d, e) };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just made it, and nothing else refers to it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Answers everything but flushes, which close(2) of a file sends and waits for, and reads, which an access to a page
/// waits for.
fn serve(
    mut device: File,
    (flushes, reads): (&AtomicUsize, &AtomicUsize),
    (is_over, lets_close): (&AtomicBool, &AtomicBool),
) {
    let mut request = vec![0; LARGEST_REQUEST];
    let mut unanswered = Vec::new();
    loop {
        let Ok(length) = device.read(&mut request) else {
            if is_over.load(Ordering::Relaxed) && unanswered.is_empty() {
                return;
            }
            if is_over.load(Ordering::Relaxed) {
                unanswered
                    .drain(..)
                    .for_each(|unique| answer(&mut device, unique, &[]));
            }
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        assert!(length >= IN_HEADER);
        let opcode = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        let unique = u64::from_ne_bytes(request[8..16].try_into().unwrap());
        match opcode {
            INIT => answer(&mut device, unique, &init_reply()),
            GETATTR => answer(&mut device, unique, &attributes()),
            OPEN => answer(&mut device, unique, &[0; OPEN_OUT]),
            FLUSH if lets_close.load(Ordering::Relaxed) => answer(&mut device, unique, &[]),
            FLUSH | READ if !is_over.load(Ordering::Relaxed) => {
                let count = if opcode == FLUSH { flushes } else { reads };
                count.fetch_add(1, Ordering::Relaxed);
                unanswered.push(unique);
            }
            FORGET => {}
            _ => answer(&mut device, unique, &[]),
        }
    }
}

fn answer(device: &mut File, unique: u64, body: &[u8]) {
    let length = 16 + body.len();
    let mut reply = (length as u32).to_ne_bytes().to_vec();
    reply.extend(0_i32.to_ne_bytes());
    reply.extend(unique.to_ne_bytes());
    reply.extend(body);
    // The sender of the request may have been killed.
    let _ = device.write(&reply);
}

/// Version 7.31, without features.
fn init_reply() -> [u8; INIT_OUT] {
    let mut reply = [0; INIT_OUT];
    reply[0..4].copy_from_slice(&7_u32.to_ne_bytes());
    reply[4..8].copy_from_slice(&31_u32.to_ne_bytes());
    reply[16..18].copy_from_slice(&64_u16.to_ne_bytes());
    reply[20..24].copy_from_slice(&4096_u32.to_ne_bytes());
    reply
}

/// A file of a page, readable and writable by everyone.
fn attributes() -> [u8; ATTR_OUT] {
    let mut reply = [0; ATTR_OUT];
    // Valid for a second; inode 1.
    reply[0] = 1;
    reply[16] = 1;
    reply[24..32].copy_from_slice(&(PAGE as u64).to_ne_bytes());
    let mode = 16 + 6 * 8 + 3 * 4;
    reply[mode..mode + 4].copy_from_slice(&0o100_666_u32.to_ne_bytes());
    reply[mode + 4] = 1;
    reply
}

/// Runs `action` on a thread with a descriptor table of its own: otherwise a program started by another test at this
/// time would inherit the file, and close it.
pub(crate) fn with_own_descriptors<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let alone = scope.spawn(|| {
            // SAFETY: `action` uses no earlier descriptor but the standard ones.
            unsafe {
                rustix::thread::unshare_unsafe(UnshareFlags::FILES).expect("memory");
                libc::close_range(3, libc::c_uint::MAX, 0);
            }
            action()
        });
        alone
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `action` in the server's network namespace: in [`with_own_descriptors`] a bed's own descriptors do not exist.
fn beside<T: Send>(server: &Daemon, action: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(format!("/proc/{}/ns/net", server.pid())).expect("it runs");
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("root may");
            action()
        });
        there.join().expect("it is short")
    })
}

/// What somebody does with a page that does not come, holding a lock meanwhile.
#[derive(Clone, Copy)]
enum Touch {
    Send,
    Receive,
    /// Asks a tap for its name: the lock of the network's configuration.
    NameOfTap,
    /// Lists a directory.
    List,
}

impl Touch {
    fn touch(self, fd: BorrowedFd<'_>, page: StallingPage) {
        let (fd, page) = (fd.as_raw_fd(), page.0 as *mut libc::c_void);
        // SAFETY: the page is mapped, and nobody has a reference into it.
        unsafe {
            match self {
                Touch::Send => libc::send(fd, page, PAGE / 4, 0) as libc::c_int,
                Touch::Receive => libc::recv(fd, page, PAGE / 4, 0) as libc::c_int,
                Touch::NameOfTap => libc::ioctl(fd, libc::TUNGETIFF as libc::Ioctl, page),
                Touch::List => libc::syscall(libc::SYS_getdents64, fd, page, PAGE) as libc::c_int,
            }
        };
    }
}

/// Runs `action` while somebody waits for a page of the file with what he locks by it, which ends then.
fn while_locked<T>(
    file: StallingFile,
    touch: Touch,
    fd: BorrowedFd<'_>,
    action: impl FnOnce() -> T,
) -> T {
    let page = file.page();
    thread::scope(|scope| {
        scope.spawn(move || touch.touch(fd, page));
        file.await_reader();
        let result = action();
        drop(file);
        result
    })
}

fn cork(socket: impl AsFd) {
    let on = 1_i32.to_ne_bytes();
    set_socket_option(socket, libc::IPPROTO_UDP, libc::UDP_CORK, &on).unwrap();
}

fn threads(server: &Daemon) -> usize {
    let tasks = format!("/proc/{}/task", server.pid());
    std::fs::read_dir(tasks).unwrap().count()
}

#[test]
fn a_file_whose_close_waits_holds_nobody_up() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let before = open_files_at_rest(&server);
    let meter = Meter::start(&bed);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let probe = encode(&Request {
            id: 1,
            body: RequestBody::Probe,
        });
        let clients: Vec<Client> = as_nobody(|| (0..3).map(|_| Client::connect(&path)).collect());
        // In an invalid request, in a request that takes none, and in a message that is never read.
        send(&clients[0], b"rubbish", &[file.as_fd(); 3]).unwrap();
        send(&clients[1], &probe, &[file.as_fd()]).unwrap();
        send(&clients[2], b"rubbish", &[]).unwrap();
        let _ = send(&clients[2], b"behind it", &[file.as_fd()]);
        await_some("closes", || (file.waiting() >= 4).then_some(()));
        assert_prompt(&path);
    });
    meter.finish();
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    await_closes(&server, before);
}

#[test]
fn closes_that_wait_are_so_many_and_no_more() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let before = (open_files_at_rest(&server), threads(&server));
    let meter = Meter::start(&bed);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        as_nobody(|| {
            for _ in 0..20 {
                let client = Client::connect(&path);
                // The server may hang up before the last one.
                for _ in 0..5 {
                    let _ = send(&client, b"rubbish", &[file.as_fd(); 250]);
                }
            }
        });
        await_some("the end of connections", || {
            (counter(&path, "server", "malformed_messages") > 0).then_some(())
        });
        // Refused connections leave nothing if no descriptors are in them.
        as_nobody(|| {
            for _ in 0..1000 {
                let client = Client::connect(&path);
                let _ = send(&client, b"rubbish", &[]);
            }
        });
        thread::sleep(Duration::from_secs(1));
        let now = (open_files(&server), threads(&server));
        assert!(now.1 < before.1 + 100, "{before:?} {now:?}");
        assert!(now.0 < before.0 + 600, "{before:?} {now:?}");
        assert_prompt(&path);
    });
    meter.finish();
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
    await_closes(&server, before.0);
}

/// A thread sends by the socket, from a page that does not become available, and holds its lock for that time.
#[test]
fn a_right_that_does_not_answer_holds_nobody_up() {
    const PORT: u16 = 443;
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let meter = Meter::start(&bed);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let local = SocketAddr::new(Bed::A4, PORT);
        let right = beside(&server, || UdpSocket::bind(local)).unwrap();
        right.connect(SocketAddr::new(Bed::B4, PORT)).unwrap();
        cork(&right);
        while_locked(file, Touch::Send, right.as_fd(), || {
            let mut hostile: Vec<_> = (0..20).map(|_| hostile_library(&path)).collect();
            for library in &mut hostile {
                low_ports::try_to_bind(library, right.as_fd());
            }
            assert_prompt(&path);
        });
    });
    meter.finish();
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// A thread reads the stream into a page that does not become available, and holds its lock for that time.
#[test]
fn a_stream_whose_reader_waits_holds_nobody_up() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let (stream, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(b"something").unwrap();
        while_locked(file, Touch::Receive, stream.as_fd(), || {
            drop(peer);
            let clients: Vec<Client> =
                as_nobody(|| (0..3).map(|_| Client::connect(&path)).collect());
            for client in &clients {
                send(client, b"rubbish", &[stream.as_fd(); 3]).unwrap();
            }
            assert_prompt(&path);
        });
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// The session's kernel socket is the server's, too, which connects it, joins groups by it, and gives it to others.
#[test]
fn a_kernel_socket_whose_sender_waits_holds_nobody_up() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::unmetered(&bed, &path);
    let meter = Meter::start(&bed);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let mut hostile = hostile_library(&path);
        let (session, near) = groups::bind(&mut hostile);
        let socket = UdpSocket::from(groups::kernel_socket(&mut hostile, session));
        socket.connect(SocketAddr::new(Bed::B4, 9)).unwrap();
        cork(&socket);
        while_locked(file, Touch::Send, socket.as_fd(), || {
            let remote = SocketAddr::new(Bed::B4, 9);
            let slot = Slot(0);
            let known = (SessionRef::Known(session), Protocol::Udp);
            let connect = connect_request(known, remote, slot);
            hostile.client.send(connect, &[]);
            let disconnect = RequestBody::Disconnect { session, slot };
            hostile.client.send(disconnect, &[]);
            let priority = 3;
            let prioritize = RequestBody::Prioritize { session, priority };
            hostile.client.send(prioritize, &[]);
            let unread = || Blob::Inline(encode(&Vec::<UnreadDatagram>::new()));
            let share = RequestBody::Share {
                session,
                is_v6: false,
                unread: unread(),
            };
            hostile.client.send(share, &[near.0.as_fd()]);
            hostile
                .client
                .send(RequestBody::Release { session }, &[near.0.as_fd()]);
            drop(near);
            assert_prompt(&path);
        });
    });
    meter.finish();
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// Whoever may make a tap, in a namespace of his own, has the lock of all for as long as he likes.
#[test]
fn whoever_has_the_networks_configuration_stops_nobody() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    with_own_descriptors(|| {
        let tap = beside(&server, || Tap::create("tst")).unwrap();
        let file = StallingFile::mount();
        let mut hostile: Vec<_> = (0..4).map(|_| hostile_library(&path)).collect();
        let mut joined = Vec::new();
        for library in &mut hostile {
            let (session, near) = groups::bind(library);
            groups::join(library, session);
            joined.push((session, near));
        }
        while_locked(file, Touch::NameOfTap, tap.fd.as_fd(), || {
            for (library, (session, _)) in hostile.iter_mut().zip(&joined) {
                let session = *session;
                groups::leave_unheard(library, session);
                library.client.send(RequestBody::Release { session }, &[]);
                library.client.send(RequestBody::Qos(QosRequest::Show), &[]);
            }
            // The last closes of sockets that are members.
            drop(joined);
            hostile.truncate(2);
            assert_prompt(&path);
        });
        drop(hostile);
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// Sockets of new programs get their names in a directory.
#[test]
fn who_lists_the_directory_of_the_control_socket_stops_nobody() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let directory = as_nobody(|| File::open(path.parent().unwrap())).unwrap();
        while_locked(file, Touch::List, directory.as_fd(), || {
            let _new: Vec<Library> = (0..3).map(|_| Library::start(&path)).collect();
            assert_prompt(&path);
        });
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

fn reserve(uid: u32) -> QosRequest {
    let spec = Transmit {
        device: None,
        rate: Rate::Bits(10_000_000),
        burst: None,
        slack: Slack::None,
    };
    let scope = Scope::User { uid };
    QosRequest::Transmit { scope, spec }
}

fn is_done(reply: &ReplyBody) -> bool {
    matches!(reply, ReplyBody::Qos(QosReply::Done))
}

/// The kernel takes that lock for each class of a link.
#[test]
fn nor_does_it_stop_whoever_reserves_rates() {
    const KEPT: u32 = 60_011;
    const ENDED: u32 = 60_012;
    const MORE: u32 = 60_013;
    let bed = Bed::veth();
    let link = format!(
        "[[qos.link]]\ndevice = \"{}\"\nrate = \"1gbit\"",
        Bed::DEVICE
    );
    let server = Configuration::new(&bed.a, &link).start(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    with_own_descriptors(|| {
        let tap = beside(&server, || Tap::create("tst")).unwrap();
        let file = StallingFile::mount();
        let mut root = Client::connect(&path);
        let mut other = Client::connect(&path);
        for uid in [KEPT, ENDED] {
            let reply = root.ask(RequestBody::Qos(reserve(uid)));
            assert!(is_done(&reply), "{reply:?}");
        }
        while_locked(file, Touch::NameOfTap, tap.fd.as_fd(), || {
            let scope = Scope::User { uid: ENDED };
            let kind = Kind::Transmit;
            root.send(RequestBody::Qos(QosRequest::Delete { scope, kind }), &[]);
            other.send(RequestBody::Qos(reserve(MORE)), &[]);
            for _ in 0..10 {
                assert_prompt(&path);
                thread::sleep(Duration::from_millis(30));
            }
        });
        for client in [&mut root, &mut other] {
            let (reply, _) = client.receive().expect("an answer");
            assert!(is_done(&reply.body), "{reply:?}");
        }
        let report = root.guarantees();
        let is_of = |entry: &TransmitReport, uid| entry.scope == Scope::User { uid };
        let has = |uid| report.transmit.iter().any(|entry| is_of(entry, uid));
        assert!(has(KEPT) && !has(ENDED) && has(MORE), "{report:?}");
        await_some("classes as they were promised", || {
            let classes = beside(&server, classes);
            (classes == 4).then_some(())
        });
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// Returns how many classes the device has: the link's, that of best effort, and those that are reserved.
fn classes() -> usize {
    let shown = Command::new("tc")
        .args(["class", "show", "dev", Bed::DEVICE])
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    shown.lines().filter(|line| line.contains("htb")).count()
}

/// Who makes a session's descriptor can keep the end that is the server's.
#[test]
fn who_reads_the_servers_end_of_a_relay_holds_nobody_up() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B4, 0)))
        .unwrap();
    let address = listener.local_addr().unwrap();
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        let mut hostile = hostile_library(&path);
        let (id, near, far, slot) = hostile.open_keeping_far(address);
        rustix::io::write(&near.0, &[1; 100]).unwrap();
        while_locked(file, Touch::Receive, far.as_fd(), || {
            rustix::io::write(&near.0, &[1; 100]).unwrap();
            hostile.flush(id, slot, AfterFlush::Relay(Reader::Sender));
            assert_prompt(&path);
            await_some("its end", || {
                let sessions = Client::connect(&path).sessions();
                let is_relayed = |it: &SessionReport| it.remote == Some(address);
                (!sessions.iter().any(is_relayed)).then_some(())
            });
        });
    });
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// A program with one thread, of which the kernel counts no reference while it waits. It registers, shows the descriptor
/// that is its standard input with a request, and reads from it into memory that does not come, or awaits the answer to a
/// second request.
const SHARER: &str = r#"
import array, mmap, socket, sys
path, hello, first, second = sys.argv[1], *map(bytes.fromhex, sys.argv[2:])
shown = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.connect(path)
control.send(hello)
_, welcome, _, _ = control.recvmsg(1 << 17, socket.CMSG_SPACE(64))
control.sendmsg([first], shown)
control.recv(1 << 17)
print("shown", flush=True)
if second:
    control.sendmsg([second], shown)
    control.recv(1 << 17)
    print("answered", flush=True)
else:
    page = mmap.mmap(2, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    socket.socket(fileno=0).recv_into(page)
"#;

/// A running one, killed at the end.
struct Sharer(Child);

impl Sharer {
    /// `errors` is its standard error, which may be a file to map.
    fn start(
        path: &Path,
        near: &OwnedFd,
        errors: Stdio,
        (first, second): (RequestBody, Option<RequestBody>),
    ) -> Sharer {
        let hello = RequestBody::Hello {
            version: portolan_proto::PROTOCOL,
            program: "sharer".into(),
        };
        let requests = [(1, Some(hello)), (2, Some(first)), (3, second)];
        let requests = requests.map(|(id, body)| {
            let bytes = body.map(|body| encode(&Request { id, body }));
            let bytes = bytes.unwrap_or_default();
            bytes
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        });
        let mut command = Command::new("python3");
        command.args(["-c", SHARER]).arg(path).args(requests);
        command.stdin(near.try_clone().unwrap());
        // As root: the file system is root's alone.
        command.stdout(Stdio::piped()).stderr(errors);
        Sharer(command.spawn().unwrap())
    }

    fn says(&mut self) -> String {
        let mut line = Vec::new();
        let output = self.0.stdout.as_mut().unwrap();
        let mut byte = [0];
        while output.read_exact(&mut byte).is_ok() && byte != *b"\n" {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }

    fn has_said_more(&self) -> bool {
        let output = self.0.stdout.as_ref().unwrap();
        rustix::io::ioctl_fionread(output).unwrap() > 0
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        // It may wait for the page until the file system goes.
        let _ = self.0.kill();
        let _ = self.0.try_wait();
    }
}

/// Another process takes the session back, for which the server reads what is left in the descriptor.
#[test]
fn who_reads_a_relayed_descriptor_holds_up_its_sharers_only() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let any = SocketAddr::new(Bed::B4, 0);
    let listener = bed.b.enter(|| TcpListener::bind(any)).unwrap();
    let address = listener.local_addr().unwrap();
    let peer = thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(b"unread").unwrap();
        peer
    });
    with_own_descriptors(|| {
        let file = StallingFile::mount();
        file.let_close();
        let mut hostile = hostile_library(&path);
        let (session, near, slot) = hostile.open(address);
        hostile.flush(session, slot, AfterFlush::Relay(Reader::Sender));
        await_some("bytes", || {
            (rustix::io::ioctl_fionread(&near.0).unwrap() > 0).then_some(())
        });
        let relay = || RequestBody::Relay {
            session,
            reader: Reader::Other,
        };
        let errors = Stdio::from(file.as_fd().try_clone_to_owned().unwrap());
        let mut reader = Sharer::start(&path, &near.0, errors, (relay(), None));
        assert_eq!(reader.says(), "shown");
        file.await_reader();
        let slot = Slot(0);
        let cache = RequestBody::Cache { session, slot };
        let mut asker = Sharer::start(&path, &near.0, Stdio::inherit(), (relay(), Some(cache)));
        drop(near);
        assert_eq!(asker.says(), "shown");
        for _ in 0..10 {
            assert_prompt(&path);
            thread::sleep(Duration::from_millis(20));
        }
        assert!(!asker.has_said_more(), "nobody waits for the descriptor");
        drop(file);
        assert_eq!(asker.says(), "answered");
    });
    drop(peer.join().unwrap());
    victim.assert_unharmed();
    assert_serves_others(&bed, &path);
}

/// The last close of a member leaves its groups, for which it waits; who binds the port next waits for it.
#[test]
fn the_port_of_a_member_is_free_when_its_close_has_come() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let local = SocketAddr::new(Bed::A4, 7010);
    with_own_descriptors(|| {
        let tap = beside(&server, || Tap::create("tst")).unwrap();
        let file = StallingFile::mount();
        let mut library = Library::start(&path);
        let (reply, near) = library.bind(Protocol::Udp, local, Slot(0));
        let ReplyBody::Bound { session, .. } = reply else {
            panic!("{reply:?}");
        };
        groups::join(&mut library, session);
        drop(groups::kernel_socket(&mut library, session));
        let (far, next) = unix::socket_pair(PairKind::SeqPacket).unwrap();
        while_locked(file, Touch::NameOfTap, tap.fd.as_fd(), || {
            let reply = library.client.ask(RequestBody::Release { session });
            assert!(matches!(reply, ReplyBody::Done), "{reply:?}");
            drop(near);
            let bind = RequestBody::Bind {
                session: SessionRef::New,
                protocol: Protocol::Udp,
                local,
                reuse: Reuse::default(),
                v6_only: false,
                slot: Slot(1),
            };
            library.client.send(bind, &[far.as_fd(), next.as_fd()]);
            thread::sleep(Duration::from_millis(50));
        });
        let (reply, _) = library.client.receive().expect("an answer");
        let is_bound = matches!(reply.body, ReplyBody::Bound { .. });
        assert!(is_bound, "{reply:?}");
    });
    meter.finish_but_for_starts();
}
