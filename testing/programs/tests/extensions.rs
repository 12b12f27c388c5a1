//! Protocol extensions as written by their authors: the guide's examples, and the output of the command.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_netns::Namespace;
use portolan_programs::{
    PYTHON, Steps, bed, client, compiled, counter, eventually, file, restart_server,
};
use rustix::process::Signal;
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const GUIDE: &str = include_str!("../../../docs/guide/extensions.md");

/// Time limit for events that are soon on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(10);

const ASK: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.1)
for _ in range(100):
    s.sendto(sys.argv[3].encode(), (sys.argv[1], int(sys.argv[2])))
    try:
        print(s.recv(2048).decode(), end='')
        sys.exit()
    except TimeoutError:
        pass
sys.exit('no answer')";

/// A missing key, and a datagram that is not a question.
const ASK_ONCE: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.2)
for words in b'get nothing', b'set k7':
    s.sendto(words, (sys.argv[1], int(sys.argv[2])))
try:
    print(s.recv(2048))
except TimeoutError:
    print('silence')";

/// Answers each connection with the peer's address, and then echoes; a half-closed connection is served to its
/// end.
const SERVER: &str = "import socket, sys, threading
def serve(peer, address):
    peer.sendall(address[0].encode() + b'\\n')
    while bytes := peer.recv(1 << 16):
        peer.sendall(bytes)
    peer.close()
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    threading.Thread(target=serve, args=listener.accept(), daemon=True).start()";

/// Sends a number of bytes, reads their echo after the server's first line, and prints that line.
const CLIENT: &str = "import socket, sys, threading
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
count = int(sys.argv[3])
bytes = bytes(n * 7 % 251 for n in range(count))
def send():
    s.sendall(bytes)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
stream = s.makefile('rb')
line = stream.readline().decode().strip()
assert stream.read() == bytes
print(line)";

/// Connects, waits for the first line, then for the end of the connection.
const WATCHER: &str = "import socket, sys
try:
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
except ConnectionRefusedError:
    sys.exit(print('refused'))
s.recv(100)
open(sys.argv[3], 'w').close()
try:
    s.recv(100)
    print('ended')
except ConnectionResetError:
    print('reset')";

/// Returns the guide's first block in that language after the given words.
fn block(language: &str, from: &str) -> &'static str {
    let rest = &GUIDE[GUIDE.find(from).expect("the guide says so")..];
    let (_, rest) = rest
        .split_once(&format!("```{language}\n"))
        .expect("a block follows");
    rest.split_once("```").expect("it ends").0
}

/// Runs a command of the guide in the bed's directory, where `include` exists.
fn shell(bed: &Bed, line: &str) {
    let directory = bed.file("");
    let include = directory.join("include");
    if !include.exists() {
        std::os::unix::fs::symlink(format!("{ROOT}/include"), include).unwrap();
    }
    let mut shell = Command::new("sh");
    shell.current_dir(directory).args(["-ec", line]);
    run(&mut shell).unwrap_or_else(|error| panic!("{error}"));
}

fn compile(bed: &Bed, source: &str, text: &str) -> PathBuf {
    file(bed, source, text);
    let commands = block("sh", "Compile it");
    let compiler = commands
        .lines()
        .find(|line| line.starts_with("clang"))
        .unwrap();
    let stem = source.strip_suffix(".c").unwrap();
    shell(bed, &compiler.replace("echo.", &format!("{stem}.")));
    bed.file(&format!("{stem}.o"))
}

/// Returns the exit status and the output of `portolan ext`.
fn ext(bed: &Bed, words: &[&str]) -> (i32, String) {
    let words: Vec<&str> = ["ext"].iter().chain(words).copied().collect();
    match bed.portolan(Side::Server, &words) {
        Ok(said) => (0, said),
        Err(ProcessError::Failed {
            status, message, ..
        }) => (status.code().unwrap_or(-1), message),
        Err(error) => panic!("{words:?}: {error}"),
    }
}

fn extensions(bed: &Bed, words: &[&str]) -> Vec<Value> {
    let words: Vec<&str> = words.iter().chain(&["--json"]).copied().collect();
    let (status, said) = ext(bed, &words);
    assert_eq!(status, 0, "{said}");
    serde_json::from_str(&said).unwrap()
}

fn install(bed: &Bed, object: &str, port: &str) -> Background {
    let mut owner = bed.own_command(Side::Server);
    owner.args(["ext", "install", object, "--udp", port]);
    Background::start(&mut owner).unwrap()
}

fn ask(bed: &Bed, port: &str, words: &str) -> String {
    let address = bed.endpoint(0).ip().to_string();
    client(
        bed,
        Stack::Kernel,
        PYTHON,
        &["-c", ASK, &address, port, words],
    )
}

#[test]
fn the_guide_leads_from_an_empty_file_to_a_running_extension() {
    let bed = bed();
    let object = compile(&bed, "echo.c", block("c", "Write `echo.c`"));
    let object = object.display().to_string();
    let (status, said) = ext(&bed, &["check", &object]);
    assert_eq!(status, 0, "{said}");
    assert!(said.starts_with("admitted: "), "{said}");
    let owner = install(&bed, &object, "7007");
    assert_eq!(ask(&bed, "7007", "hello"), "hello");
    let [listed] = &extensions(&bed, &["list"])[..] else {
        panic!("one is installed");
    };
    assert_eq!(listed["name"], "echo");
    assert_eq!(listed["event"], "UDP.PacketRecv");
    assert_eq!(listed["state"], "running");
    let [counted] = &extensions(&bed, &["stats"])[..] else {
        panic!("one is installed");
    };
    assert!(counted["replied"].as_u64() >= Some(1), "{counted}");
    assert_eq!(counted["runs"], counted["replied"]);
    drop(owner);
    let is_gone = || extensions(&bed, &["list"]).is_empty();
    assert!(eventually(TIMEOUT, is_gone), "it goes with its owner");
}

#[test]
fn one_can_be_removed_from_under_its_owner() {
    let bed = bed();
    let object = compile(&bed, "echo.c", block("c", "Write `echo.c`"));
    let _owner = install(&bed, &object.display().to_string(), "7008");
    assert_eq!(ask(&bed, "7008", "hello"), "hello");
    let number = extensions(&bed, &["list"])[0]["number"].to_string();
    assert_eq!(ext(&bed, &["remove", &number]).0, 0);
    assert!(extensions(&bed, &["list"]).is_empty());
    let (status, said) = ext(&bed, &["remove", &number]);
    assert_eq!(status, 4, "{said}");
}

#[test]
fn the_command_tells_why_an_extension_is_refused() {
    let bed = bed();
    let check = |name: &str, text: &str| {
        let object = compile(&bed, name, text).display().to_string();
        ext(&bed, &["check", &object])
    };
    let (status, said) = check(
        "past.c",
        "#include <portolan/extension.h>
        PORTOLAN_HANDLER int past(struct portolan_view *view)
        { return view->payload[view->captured]; }",
    );
    assert_eq!(status, 4, "{said}");
    assert!(said.contains("verifier"), "{said}");
    let (status, said) = check(
        "helper.c",
        "#include <portolan/extension.h>
        static long (*const redirect)(__u32, __u64) = (void *)23;
        PORTOLAN_HANDLER int away(struct portolan_view *view)
        { return redirect(view->interface, 0); }",
    );
    assert_eq!(status, 4, "{said}");
    assert!(
        said.contains("helper 23 is not in the protection domain"),
        "{said}"
    );
    let (status, said) = check("none.c", "int nothing(void *view) { return view != 0; }");
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("PORTOLAN_HANDLER"), "{said}");
    let text = file(&bed, "words.o", "not an object");
    let (status, said) = ext(&bed, &["check", &text]);
    assert_eq!(status, 1, "{said}");
}

#[test]
fn a_key_value_server_answers_in_the_filter_from_its_owners_map() {
    let bed = bed();
    let source = std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/values.c"));
    let object = compile(&bed, "values.c", &source.unwrap());
    let local = bed.endpoint(7009).to_string();
    let mut owner = bed.owner_command(Side::Server);
    owner.args(["values", &local]).arg(object);
    let _owner = Background::start(&mut owner).unwrap();
    let answer = |key: &str| ask(&bed, "7009", &format!("get {key}"));
    assert!(eventually(TIMEOUT, || extensions(&bed, &["list"]).len() == 1));
    assert_eq!(answer("k7").trim_end_matches('\0'), "VALUE = v7");
    assert_eq!(answer("k999").trim_end_matches('\0'), "VALUE = v999");
    let counted = || extensions(&bed, &["stats"])[0].clone();
    assert_eq!(counted()["replied"], counted()["runs"]);
    // A missing key and a datagram that is not a question go to the owner, which does not answer.
    let words = ["-c", ASK_ONCE, &bed.endpoint(0).ip().to_string(), "7009"];
    assert_eq!(client(&bed, Stack::Kernel, PYTHON, &words), "silence");
    assert_eq!(counted()["passed"], 1);
    assert_eq!(counted()["skipped"], 1);
}

/// A bed with an additional client host, for which the first host forwards to the second.
struct Forwarding {
    bed: Bed,
    guest: Namespace,
    _owner: Background,
    front: String,
}

const BEHIND: u16 = 7011;

fn forwarding(protocol: &str) -> Forwarding {
    let bed = Bed::switched().unwrap_or_else(|error| panic!("{error}"));
    let guest = bed.guest(9);
    let source = std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/forward.c"));
    let object = compile(&bed, "forward.c", &source.unwrap());
    let front = SocketAddr::new(bed.client.address, 7010);
    let mut owner = bed.owner_command(Side::Client);
    owner.args(["forward", protocol]).arg(front.to_string());
    owner.arg(bed.endpoint(BEHIND).to_string()).arg(object);
    let _owner = Background::start(&mut owner).unwrap();
    let is_there = || {
        bed.portolan(Side::Client, &["ext", "list"])
            .unwrap()
            .contains("forward")
    };
    assert!(eventually(TIMEOUT, is_there));
    Forwarding {
        front: front.ip().to_string(),
        bed,
        guest,
        _owner,
    }
}

impl Forwarding {
    fn serve(&self) -> Background {
        let endpoint = self.bed.endpoint(BEHIND).ip().to_string();
        let arguments = ["-c", SERVER, &endpoint, &BEHIND.to_string()];
        self.bed
            .serve(Stack::Kernel, BEHIND, PYTHON, &arguments)
            .unwrap()
    }

    fn client(&self, script: &str, arguments: &[&str]) -> Command {
        let mut client = self.guest.exec(PYTHON);
        client
            .args(["-c", script, &self.front, "7010"])
            .args(arguments);
        client
    }

    fn counted(&self, what: &str) -> u64 {
        let said = self
            .bed
            .portolan(Side::Client, &["ext", "stats", "--json"])
            .unwrap();
        serde_json::from_str::<Value>(&said).unwrap()[0][what]
            .as_u64()
            .unwrap()
    }
}

/// Prints the TCP headers of both directions, at one port of a device, until a file exists.
const SNIFFER: &str = "import os, socket, struct, sys
port, stop = int(sys.argv[1]), sys.argv[2]
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(('eth0', 0))
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
s.settimeout(0.05)
open(stop + '.' + str(port), 'w').close()
while True:
    try:
        frame = s.recv(1 << 17)
    except TimeoutError:
        if os.path.exists(stop):
            break
        continue
    if frame[12:14] != b'\\x08\\0' or frame[23] != 6:
        continue
    tcp = 14 + 4 * (frame[14] & 15)
    source, to, sequence, acknowledged, head, window = struct.unpack_from('!HHIIHH', frame, tcp)
    if port not in (source, to):
        continue
    options = frame[tcp + 20:tcp + 4 * (head >> 12)].hex()
    length = struct.unpack_from('!H', frame, 16)[0] - (tcp - 14) - 4 * (head >> 12)
    print('>' if to == port else '<', hex(head & 0x1ff), sequence, acknowledged, window, options, length)";

/// Starts a sniffer, and returns when it captures.
fn sniff(host: &Namespace, port: u16, stop: &std::path::Path) -> std::thread::JoinHandle<String> {
    let mut sniffer = host.exec(PYTHON);
    sniffer.args(["-c", SNIFFER, &port.to_string()]).arg(stop);
    let started = stop.with_file_name(format!(
        "{}.{port}",
        stop.file_name().unwrap().to_str().unwrap()
    ));
    let sniffer = std::thread::spawn(move || run(&mut sniffer).unwrap());
    assert!(eventually(TIMEOUT, || started.exists()));
    sniffer
}

#[test]
fn what_the_two_ends_of_a_forwarded_connection_say_is_not_changed() {
    let forwarding = forwarding("tcp");
    let bed = &forwarding.bed;
    let stop = bed.file("enough");
    let near = sniff(&forwarding.guest, 7010, &stop);
    let far = sniff(bed.namespace(Side::Server), BEHIND, &stop);
    // A RST first, then bytes in both directions and a FIN of each end.
    let said = run(&mut forwarding.client(WATCHER, &["/dev/null"])).unwrap();
    assert_eq!(said, "refused");
    let server = forwarding.serve();
    run(&mut forwarding.client(CLIENT, &["300000"])).unwrap();
    let mark = bed.file("seen");
    let mut watcher = forwarding.client(WATCHER, &[mark.to_str().unwrap()]);
    let watcher = std::thread::spawn(move || run(&mut watcher).unwrap());
    assert!(eventually(TIMEOUT, || mark.exists()));
    drop(server);
    watcher.join().unwrap();
    std::fs::write(&stop, "").unwrap();
    let of = |seen: &str, direction: &str| -> Vec<String> {
        let lines = seen.lines().filter(|line| line.starts_with(direction));
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        // Two processors may bring them to the second capture in another order.
        lines.sort();
        lines
    };
    let (near, far) = (near.join().unwrap(), far.join().unwrap());
    for direction in [">", "<"] {
        let (near, far) = (of(&near, direction), of(&far, direction));
        assert!(near.len() > 10, "{near:?}");
        // Sequence numbers, acknowledgements, windows, options and flags.
        assert_eq!(near, far);
        let has = |flag: u16| {
            near.iter().any(|line| {
                let flags = line.split(' ').nth(1).unwrap().trim_start_matches("0x");
                u16::from_str_radix(flags, 16).unwrap() & flag != 0
            })
        };
        const FIN: u16 = 1;
        const RST: u16 = 4;
        assert!(has(FIN), "{near:?}");
        assert!(direction == ">" || has(RST), "{near:?}");
    }
}

#[test]
fn a_forwarded_connection_is_one_of_the_two_ends() {
    let forwarding = forwarding("tcp");
    // The destination refuses the connection, which the client sees.
    let said = run(&mut forwarding.client(WATCHER, &["/dev/null"])).unwrap();
    assert_eq!(said, "refused");
    let server = forwarding.serve();
    for bytes in ["0", "1", "100000", "3000000"] {
        let said = run(&mut forwarding.client(CLIENT, &[bytes])).unwrap();
        assert_eq!(said, forwarding.front, "{bytes}");
    }
    // One end resets or closes the connection, and the other end sees the same.
    let mark = forwarding.bed.file("connected");
    let mut watcher = forwarding.client(WATCHER, &[mark.to_str().unwrap()]);
    let watcher = std::thread::spawn(move || run(&mut watcher).unwrap());
    assert!(eventually(TIMEOUT, || mark.exists()));
    drop(server);
    assert_eq!(watcher.join().unwrap(), "ended");
    assert!(forwarding.counted("forwarded") > 100);
    assert_eq!(forwarding.counted("refused"), 0);
    // The forwarder has no session of the connection.
    let listed = forwarding.bed.portolan(Side::Client, &["ss"]).unwrap();
    assert!(!listed.contains("ESTABLISHED"), "{listed}");
}

#[test]
fn datagrams_are_forwarded_there_and_back() {
    const ECHO: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
while True:
    words, peer = s.recvfrom(2048)
    s.sendto(words + b' by ' + peer[0].encode(), peer)";
    let forwarding = forwarding("udp");
    let bed = &forwarding.bed;
    let endpoint = bed.endpoint(BEHIND).ip().to_string();
    let mut server = bed.command(Side::Server, Stack::Kernel, PYTHON);
    server.args(["-c", ECHO, &endpoint, &BEHIND.to_string()]);
    let _server = Background::start(&mut server).unwrap();
    for word in ["one", "two"] {
        let said = run(&mut forwarding.client(ASK, &[word])).unwrap();
        assert_eq!(said, format!("{word} by {}", forwarding.front));
    }
}

/// Receives films of a number of frames and bytes at several ports, and prints how many viewers received them intact.
const AUDIENCE: &str = "import select, socket, sys
address, first, streams, frames, size = sys.argv[1], *map(int, sys.argv[2:6])
film = b''.join(bytes((f * 31 + n) % 251 for n in range(size)) for f in range(frames))
seen = {}
for port in range(first, first + streams):
    s = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    s.bind((address, port))
    seen[s] = b''
listener = socket.create_server((address, first), family=s.family)
while any(len(bytes) < len(film) for bytes in seen.values()):
    ready = select.select(seen, [], [], 10)[0]
    if not ready:
        break
    for s in ready:
        seen[s] += s.recv(65536)
print(sum(bytes == film for bytes in seen.values()), min(map(len, seen.values())))";

const FILM_PORT: u16 = 7200;

/// Returns how many viewers received every frame intact, and the counters.
fn show_film(bed: &Bed, streams: &str, options: &[&str]) -> (String, Value) {
    const FRAMES: &str = "6";
    const SIZE: &str = "12500";
    let object = compile(
        bed,
        "video.c",
        &std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/video.c")).unwrap(),
    );
    let first = bed.endpoint(FILM_PORT);
    let words = [
        "-c",
        AUDIENCE,
        &first.ip().to_string(),
        &FILM_PORT.to_string(),
        streams,
        FRAMES,
        SIZE,
    ];
    let mut audience = bed.command(Side::Server, Stack::Kernel, PYTHON);
    audience.args(words);
    let audience = std::thread::spawn(move || run(&mut audience).unwrap());
    assert!(eventually(TIMEOUT, || bed.is_listening(FILM_PORT)));
    let local = SocketAddr::new(bed.client.address, 7199);
    let mut owner = bed.owner_command(Side::Client);
    owner
        .arg("video")
        .args([local, first].map(|end| end.to_string()))
        .arg(object)
        .args(["--streams", streams, "--frames", FRAMES, "--size", SIZE])
        .args(options);
    let shown = serde_json::from_str(&run(&mut owner).unwrap()).unwrap();
    (audience.join().unwrap(), shown)
}

#[test]
fn every_frame_of_a_film_comes_to_everybody_as_it_was_sent() {
    let bed = bed();
    let whole = |streams: &str| format!("{streams} {}", 6 * 12_500);
    // One datagram that is fragmented, datagrams that the device segments, and some without checksums.
    for (streams, options) in [
        ("1", &[][..]),
        ("30", &[]),
        ("30", &["--segment", "1400"]),
        ("32", &["--segment", "1400", "--checksums", "without"]),
    ] {
        let (seen, shown) = show_film(&bed, streams, options);
        assert_eq!(seen, whole(streams), "{options:?}");
        assert_eq!(shown["frames"], 6);
    }
    let bed = bed.over_ipv6();
    for options in [&[][..], &["--segment", "1400"]] {
        assert_eq!(show_film(&bed, "5", options).0, whole("5"), "{options:?}");
    }
}

#[test]
fn handlers_in_a_thread_see_what_the_filters_leave_to_the_owner() {
    const ASK_FOR: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
server = (sys.argv[1], int(sys.argv[2]))
for words in b'-nobody', b'+owner', b'handler':
    s.sendto(words, server)
for _ in range(2):
    words, peer = s.recvfrom(2048)
    print(words.decode(), peer == server)
s.settimeout(0.1)
try:
    print(s.recv(2048))
except TimeoutError:
    pass";
    let bed = bed();
    let local = bed.endpoint(7012);
    let mut owner = bed.owner_command(Side::Server);
    let owner = Background::start(owner.args(["threaded", &local.to_string()])).unwrap();
    assert_eq!(ask(&bed, "7012", "hello"), "hello");
    let words = ["-c", ASK_FOR, &local.ip().to_string(), "7012"];
    let said = client(&bed, Stack::Kernel, PYTHON, &words);
    let mut said: Vec<&str> = said.lines().collect();
    said.sort_unstable();
    assert_eq!(said, ["handler True", "owner False"]);
    let listed = extensions(&bed, &["list"]);
    let names: Vec<&str> = listed
        .iter()
        .filter_map(|one| one["name"].as_str())
        .collect();
    assert_eq!(names, ["handler", "handler", "echo"]);
    for one in &listed {
        assert_eq!(
            (&one["placement"], &one["event"]),
            (&"thread".into(), &"UDP.PacketRecv".into())
        );
        assert_eq!(one["ports"][0], 7012);
    }
    // The first handler passes on what it does not want; each has counters.
    let counted = extensions(&bed, &["stats"]);
    let of = |at: usize, what: &str| counted[at][what].as_u64().unwrap();
    assert_eq!(counted.len(), 3);
    let runs: Vec<u64> = (0..3).map(|at| of(at, "runs")).collect();
    assert!(
        runs[0] >= 4 && runs[0] >= runs[1] && runs[1] >= runs[2],
        "{counted:?}"
    );
    let sum = |what: &str| (0..3).map(|at| of(at, what)).sum::<u64>();
    assert_eq!((sum("consumed"), sum("delivered")), (1, 1), "{counted:?}");
    assert!(sum("replied") >= 2, "{counted:?}");
    for one in &counted {
        assert_eq!(one["placement"], "thread");
        assert!(one["longest_ns"].as_u64() > Some(0) && one["mean_ns"].as_u64() > Some(0));
        assert_eq!((&one["limit_ns"], &one["overruns"]), (&0.into(), &0.into()));
    }
    // No other process may remove them.
    assert_eq!(
        ext(&bed, &["remove", &listed[0]["number"].to_string()]).0,
        4
    );
    drop(owner);
    assert!(eventually(TIMEOUT, || extensions(&bed, &["list"]).is_empty()));
}

#[test]
fn a_program_in_c_keeps_hosts_out_of_connections_that_it_has_accepted() {
    const CLIENT: &str = "import socket, sys
s = socket.create_connection((sys.argv[1], 7014), 10)
for byte in b'a-b!c':
    s.sendall(bytes([byte]))
    assert s.recv(1) == bytes([byte])";
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/gate_keeper.c");
    let source = std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/gate.c"));
    let object = compile(&bed, "gate.c", &source.unwrap());
    let address = bed.endpoint(0).ip().to_string();
    let mut owner = bed.command(Side::Server, Stack::Portolan, &program);
    let mut owner = Steps::start(owner.args([&address, "7014"]).arg(object));
    owner.await_line("ready");
    let listed = extensions(&bed, &["list"]);
    let [gate] = listed.as_slice() else {
        panic!("{listed:?}");
    };
    assert_eq!(gate["name"], "gate");
    assert_eq!(gate["ports"], serde_json::json!([7014]));
    client(&bed, Stack::Kernel, PYTHON, &["-c", CLIENT, &address]);
    for byte in ["a", "-", "b", "!", "c"] {
        owner.await_line(byte);
    }
    assert!(extensions(&bed, &["list"]).is_empty());
}

#[test]
fn a_program_in_c_places_handlers_in_a_thread() {
    const ASK_FOR: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
for words in b'-nobody', b'handler', b'+owner':
    s.sendto(words, (sys.argv[1], 7013))
print(s.recv(2048).decode(), end='')";
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/handlers_in_a_thread.c");
    let address = bed.endpoint(0).ip().to_string();
    let mut owner = bed.command(Side::Server, Stack::Portolan, &program);
    let mut owner = Steps::start(owner.args([&address, "7013"]));
    owner.await_line("ready");
    let listed = extensions(&bed, &["list"]);
    let said = |what: &str| {
        listed
            .iter()
            .map(|one| one[what].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(said("name"), ["choose", "shout"]);
    assert_eq!(said("placement"), ["thread", "thread"]);
    let answer = client(&bed, Stack::Kernel, PYTHON, &["-c", ASK_FOR, &address]);
    assert_eq!(answer, "HANDLER!");
    owner.await_line("+owner from 1, 3 seen, -1 dropped");
    assert!(eventually(TIMEOUT, || extensions(&bed, &["list"]).is_empty()));
}

/// Echoes by a raw socket of the kernel, and prints what returns without its IP header.
const RAW: &str = "import socket, sys
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
s = socket.socket(family, socket.SOCK_RAW, 253)
s.settimeout(0.1)
for _ in range(100):
    s.sendto(b'own protocol', (sys.argv[1], 0))
    try:
        heard = s.recv(2048)
        print(heard[0 if family == socket.AF_INET6 else 20:].decode(), end='')
        sys.exit()
    except TimeoutError:
        pass
sys.exit('no answer')";

/// Sends an active message to all stations of the link, and one to the station that has answered.
const BROADCAST: &str = "import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88b5))
s.bind(('eth0', 0x88b5))
s.settimeout(5)
own = s.getsockname()[4]
station = b'\\xff' * 6
for _ in range(2):
    s.send(station + own + b'\\x88\\xb5' + b'\\0\\1' + bytes(12))
    while (heard := s.recv(2048))[:6] != own or heard[14] != 0x80:
        pass
    station, before = heard[6:12], station
    print(station == before, station[0] & 1)";

fn install_for(bed: &Bed, object: &str, words: &[&str]) -> Background {
    let mut owner = bed.own_command(Side::Server);
    owner.args(["ext", "install", object]).args(words);
    let owner = Background::start(&mut owner).unwrap();
    assert!(eventually(TIMEOUT, || extensions(bed, &["list"]).len() == 1));
    owner
}

#[test]
fn active_messages_are_handled_in_the_filter_without_waking_anybody() {
    const CALLS: u64 = 2_000;
    let bed = bed();
    let source = std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/messages.c"));
    let object = compile(&bed, "messages.c", &source.unwrap());
    let owner = install_for(
        &bed,
        &object.display().to_string(),
        &["--ethertype", "0x88b5"],
    );
    let program = bed.tools().beside("active-messages").display().to_string();
    let mut caller = bed.command(Side::Client, Stack::Kernel, &program);
    let address = bed.endpoint(0).ip().to_string();
    caller.args(["call", &address, &CALLS.to_string()]);
    let said = run(&mut caller).unwrap();
    let sum = CALLS * (CALLS + 1) / 2;
    assert!(said.contains(&format!("sum {sum}\n")), "{said}");
    let listed = extensions(&bed, &["list"])[0].clone();
    assert_eq!(listed["event"], "Ethernet.PacketRecv");
    assert_eq!(listed["ports"][0], 0x88b5);
    let (_, said) = ext(&bed, &["list"]);
    assert!(said.contains("0x88b5"), "{said}");
    let counted = extensions(&bed, &["stats"])[0].clone();
    assert_eq!(counted["replied"], CALLS + 1);
    assert_eq!(counter(&bed, Side::Server, "receive", "delivered_raw"), 0);
    let heard = client(&bed, Stack::Kernel, PYTHON, &["-c", BROADCAST]);
    assert_eq!(heard, "False 0\nTrue 0");
    drop(owner);
    assert!(eventually(TIMEOUT, || extensions(&bed, &["list"]).is_empty()));
}

/// The owner's maps stay, with what it has put into them; so do handlers on protocols of its own, and in its threads.
#[test]
fn extensions_are_installed_again_by_the_next_server() {
    let mut bed = bed();
    let example = |name: &str| {
        std::fs::read_to_string(format!("{ROOT}/docs/examples/extensions/{name}")).unwrap()
    };
    let values = compile(&bed, "values.c", &example("values.c"));
    let messages = compile(&bed, "messages.c", &example("messages.c"));
    let owner = |kind: &str, port: u16, object: Option<&PathBuf>| {
        let mut owner = bed.owner_command(Side::Server);
        owner.args([kind, &bed.endpoint(port).to_string()]);
        Background::start(owner.args(object)).unwrap()
    };
    let _protocol = install_for(
        &bed,
        &messages.display().to_string(),
        &["--ethertype", "0x88b5"],
    );
    let _values = owner("values", 7009, Some(&values));
    let _threads = owner("threaded", 7012, None);
    let are_there = |bed: &Bed| extensions(bed, &["list"]).len() == 5;
    assert!(eventually(TIMEOUT, || are_there(&bed)));
    for end in [Signal::KILL, Signal::TERM] {
        restart_server(&mut bed, Side::Server, end);
        assert!(
            eventually(TIMEOUT, || are_there(&bed)),
            "{}",
            bed.daemon_log(Side::Server)
        );
        let said = ask(&bed, "7009", "get k7");
        assert_eq!(said.trim_end_matches('\0'), "VALUE = v7");
        assert_eq!(ask(&bed, "7012", "hello"), "hello");
        let program = bed.tools().beside("active-messages").display().to_string();
        let mut caller = bed.command(Side::Client, Stack::Kernel, &program);
        let address = bed.endpoint(0).ip().to_string();
        let said = run(caller.args(["call", &address, "100"])).unwrap();
        assert!(said.contains("sum 5050\n"), "{said}");
        let counted = extensions(&bed, &["stats"]);
        let replied = |placement: &str| {
            let those = counted.iter().filter(|one| one["placement"] == placement);
            those
                .map(|one| one["replied"].as_u64().unwrap())
                .sum::<u64>()
        };
        // 100 calls and the last reading, and a value.
        assert_eq!(replied("filter"), 102, "{counted:?}");
        assert!(replied("thread") >= 1, "{counted:?}");
    }
}

/// Makes each call add twice as much as the program states.
const TWICE: &str = "#include <portolan/extension.h>
struct message { __u16 handler; __u32 sequence; __u64 argument; } __attribute__((packed));
PORTOLAN_SEND_HANDLER int twice(struct portolan_sending *sending)
{
	struct message *message = (void *)sending->view.payload;

	if (sending->view.captured < sizeof(*message) || message->handler != __builtin_bswap16(1))
		return PORTOLAN_PASS;
	message->argument = __builtin_bswap64(2 * __builtin_bswap64(message->argument));
	sending->view.length = sizeof(*message);
	return PORTOLAN_REPLACE;
}
";

#[test]
fn active_messages_are_changed_in_the_filter_as_they_leave() {
    const CALLS: u64 = 100;
    let bed = bed();
    let object = compile(&bed, "twice.c", TWICE).display().to_string();
    let program = bed.tools().beside("active-messages").display().to_string();
    let mut server = bed.command(Side::Server, Stack::Kernel, &program);
    let _server = Background::start(server.arg("serve")).unwrap();
    let opened = || counter(&bed, Side::Server, "server", "raw_flows_opened") == 1;
    assert!(eventually(TIMEOUT, opened));
    let mut caller = bed.command(Side::Client, Stack::Kernel, &program);
    let address = bed.endpoint(0).ip().to_string();
    let said = run(caller.args(["call", &address, &CALLS.to_string(), &object])).unwrap();
    let sum = CALLS * (CALLS + 1);
    assert!(said.contains(&format!("sum {sum}\n")), "{said}");
    let counted = |name| counter(&bed, Side::Client, "extension", name);
    // The request for the sum is not changed.
    assert_eq!((counted("replaced"), counted("sent")), (CALLS, 1));
}

/// Answers datagrams that begin with an exclamation mark.
const CHOOSY: &str = "#include <portolan/extension.h>
PORTOLAN_HANDLER int choosy(struct portolan_view *view)
{
	return view->payload[0] == '!' ? PORTOLAN_REPLY : PORTOLAN_PASS;
}
";

#[test]
fn a_transport_of_ones_own_gets_what_its_handler_leaves() {
    const PORT: &str = "7014";
    let bed = bed();
    let object = compile(&bed, "choosy.c", CHOOSY).display().to_string();
    let program = bed.tools().beside("unchecked-udp").display().to_string();
    let mut owner = bed.command(Side::Server, Stack::Kernel, &program);
    let _owner = Background::start(owner.args(["echo", PORT, &object])).unwrap();
    assert!(eventually(TIMEOUT, || extensions(&bed, &["list"]).len() == 1));
    let listed = extensions(&bed, &["list"])[0].clone();
    assert_eq!(listed["event"], "UDP.PacketRecv");
    assert_eq!(listed["ports"][0], 7014);
    assert_eq!(ask(&bed, PORT, "!handler"), "!handler");
    let raw = || counter(&bed, Side::Server, "receive", "delivered_raw");
    assert_eq!(raw(), 0);
    assert_eq!(ask(&bed, PORT, "program"), "program");
    assert!(raw() > 0);
    let counted = extensions(&bed, &["stats"])[0].clone();
    assert!(counted["replied"].as_u64() > Some(0) && counted["passed"].as_u64() > Some(0));
}

#[test]
fn packets_of_an_ip_protocol_are_handled_in_the_filter() {
    let bed = bed();
    let object = compile(&bed, "echo.c", block("c", "Write `echo.c`"));
    let _owner = install_for(&bed, &object.display().to_string(), &["--protocol", "253"]);
    let v4 = bed.endpoint(0).ip().to_string();
    assert_eq!(
        client(&bed, Stack::Kernel, PYTHON, &["-c", RAW, &v4]),
        "own protocol"
    );
    let bed = bed.over_ipv6();
    let v6 = bed.endpoint(0).ip().to_string();
    assert_eq!(
        client(&bed, Stack::Kernel, PYTHON, &["-c", RAW, &v6]),
        "own protocol"
    );
    let listed = extensions(&bed, &["list"])[0].clone();
    assert_eq!(
        (&listed["event"], &listed["ports"][0]),
        (&"IP.PacketRecv".into(), &253.into())
    );
}
