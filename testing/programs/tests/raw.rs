//! Protocols of programs' own, beside all other traffic of the same hosts.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::{Background, ProcessError, run};
use portolan_netns::{Daemon, Impairment, Ready};
use portolan_programs::{
    PYTHON, bed, client, compiled, counter, eventually, file, impaired_bed, public_programs,
    restart_server,
};
use rustix::process::Signal;

const CALLS: u64 = 2_000;
const BYTES: &str = "8388608";

/// Debian users: one that no policy names, and one that a policy names.
const STRANGER: &str = "65534";
const FRIEND: &str = "2";

fn example(bed: &Bed, name: &str) -> PathBuf {
    bed.tools().beside(name)
}

fn command(bed: &Bed, side: Side, name: &str, words: &[&str]) -> Command {
    let program = example(bed, name).display().to_string();
    let mut command = bed.command(side, Stack::Kernel, &program);
    command.args(words);
    command
}

/// Starts a server and returns when it has its protocol.
fn serve(bed: &Bed, side: Side, name: &str) -> Background {
    serve_with(bed, side, name, &["serve"])
}

fn serve_with(bed: &Bed, side: Side, name: &str, words: &[&str]) -> Background {
    let start = || Background::start(&mut command(bed, side, name, words)).unwrap();
    opened(bed, side, start).expect("it has its protocol")
}

/// Runs `start` and waits until its program has its protocol; None if it ends without.
fn opened(bed: &Bed, side: Side, start: impl FnOnce() -> Background) -> Option<Background> {
    let count = || counter(bed, side, "server", "raw_flows_opened");
    let before = count();
    let mut server = start();
    let is_decided = || count() > before || !server.is_running();
    assert!(eventually(Duration::from_secs(10), is_decided));
    (count() > before).then_some(server)
}

fn failure(outcome: Result<String, ProcessError>) -> String {
    match outcome {
        Err(ProcessError::Failed { message, .. }) => message,
        other => panic!("{other:?}"),
    }
}

fn call(bed: &Bed, count: u64) -> Result<String, ProcessError> {
    let address = bed.endpoint(0).ip().to_string();
    let words = ["call", &address, &count.to_string()];
    run(&mut command(bed, Side::Client, "active-messages", &words))
}

#[test]
fn active_messages_run_handlers_over_ethernet() {
    let bed = bed();
    let _server = serve(&bed, Side::Server, "active-messages");
    let said = call(&bed, CALLS).unwrap();
    let sum = CALLS * (CALLS + 1) / 2;
    assert!(said.contains(&format!("sum {sum}\n")), "{said}");
    // Calls, answers, and the last reading; the kernel's stack received none of them.
    for side in [Side::Client, Side::Server] {
        assert!(counter(&bed, side, "receive", "delivered_raw") > CALLS);
    }
    let address = bed.endpoint(0).ip().to_string();
    client(&bed, Stack::Kernel, "ping", &["-c1", "-W5", &address]);
}

#[test]
fn a_protocol_stays_its_programs_over_restarts() {
    let mut bed = bed();
    let mut server = serve(&bed, Side::Server, "active-messages");
    for end in [Signal::KILL, Signal::TERM] {
        restart_server(&mut bed, Side::Server, end);
        let is_opened = || counter(&bed, Side::Server, "server", "raw_flows_opened") == 1;
        assert!(eventually(Duration::from_secs(10), is_opened));
        call(&bed, CALLS).unwrap();
        assert!(server.is_running());
    }
}

#[test]
fn a_program_in_c_has_a_protocol_of_its_own() {
    let bed = bed();
    let program = compiled(&bed, "docs/examples/greetings.c");
    let on = |side, stack, words: &[&str]| {
        let mut command = bed.command(side, stack, &program);
        command.args(words);
        command
    };
    let without = run(&mut on(Side::Client, Stack::Kernel, &["serve"]));
    assert!(failure(without).contains("not on Portolan"));
    let mut serve = on(Side::Server, Stack::Portolan, &["serve"]);
    let start = || Background::start(&mut serve).unwrap();
    let _server = opened(&bed, Side::Server, start).expect("it has its protocol");
    let address = bed.endpoint(0).ip().to_string();
    let said = run(&mut on(
        Side::Client,
        Stack::Portolan,
        &["call", &address, "500"],
    ));
    assert_eq!(said.unwrap().trim(), "500 greetings, 0 dropped");
    let second = run(&mut on(Side::Server, Stack::Portolan, &["serve"]));
    assert!(failure(second).contains("in use"));
}

#[test]
fn a_protocol_is_one_programs_and_free_when_that_is_killed() {
    let bed = bed();
    let server = serve(&bed, Side::Server, "active-messages");
    let second = run(&mut command(
        &bed,
        Side::Server,
        "active-messages",
        &["serve"],
    ));
    assert!(failure(second).contains("in use"));
    server.signal(rustix::process::Signal::KILL).unwrap();
    let _next = serve_when_free(&bed);
    assert!(call(&bed, 10).unwrap().contains("sum 55\n"));
}

/// The server notices the end of the previous owner by its connection.
fn serve_when_free(bed: &Bed) -> Background {
    let mut server = None;
    let comes_up = || {
        let mut serve = command(bed, Side::Server, "active-messages", &["serve"]);
        let start = || Background::start(&mut serve).unwrap();
        server = opened(bed, Side::Server, start);
        server.is_some()
    };
    assert!(eventually(Duration::from_secs(10), comes_up));
    server.unwrap()
}

#[test]
fn users_have_the_protocols_that_a_rule_gives_them() {
    let mut bed = Bed::bare(portolan_netns::Bed::veth()).unwrap();
    bed.set_settings(&format!(
        "[[raw]]\nuser = \"{FRIEND}\"\nethertypes = [0x88b5]\n"
    ));
    bed.start_daemon(Side::Server).unwrap();
    let directory = public_programs(&bed);
    let program = directory.join("active-messages");
    std::fs::copy(example(&bed, "active-messages"), &program).unwrap();
    let as_user = |user: &str| {
        let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
        command
            .args(["--reuid", user, "--regid", user, "--clear-groups"])
            .arg(&program)
            .arg("serve");
        command
    };
    let refused = failure(run(&mut as_user(STRANGER)));
    assert!(refused.contains("not permitted"), "{refused}");
    let mut served = Background::start(&mut as_user(FRIEND)).unwrap();
    let opened = || counter(&bed, Side::Server, "server", "raw_flows_opened") == 1;
    assert!(eventually(Duration::from_secs(10), opened));
    assert!(served.is_running());
}

/// The same hosts use TCP at the same time.
#[test]
fn a_tcp_of_ones_own_carries_a_stream_over_a_lossy_wire() {
    let bed = impaired_bed(Impairment {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.01,
        ..Impairment::default()
    });
    let mut serve = command(&bed, Side::Server, "special-tcp", &["serve"]);
    let start = || Background::start_with_output(serve.stdout(Stdio::piped())).unwrap();
    let mut server = opened(&bed, Side::Server, start).expect("it has its protocol");
    let mut lines = BufReader::new(server.output().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "serving");
    let address = bed.endpoint(0).ip().to_string();
    let words = ["send", &address, BYTES];
    let sent = run(&mut command(&bed, Side::Client, "special-tcp", &words)).unwrap();
    let received = lines.next().unwrap().unwrap();
    assert!(received.ends_with(" wrong 0"), "{received}");
    let (sent, _) = sent.split_once('\n').unwrap();
    assert!(sent.starts_with(&format!("bytes {BYTES} ")), "{sent}");
    assert_eq!(received.trim_end_matches(" wrong 0"), sent);
    let dropped = |name| counter(&bed, Side::Client, "transmit", name);
    assert_eq!(dropped("drop_protocol") + dropped("drop_foreign"), 0);
}

const SPECIAL_PORT: u16 = 7081;
const STANDARD_PORT: u16 = 7082;
const PAGE: u64 = 4_000_000;

/// The stream that `special-tcp` sends.
fn stream(bytes: u64) -> Vec<u8> {
    let byte = |at: u64| (at ^ at >> 8 ^ at >> 16) as u8;
    (0..bytes).map(byte).collect()
}

/// Fetches a page by HTTP from the host's kernel stack.
fn fetch(bed: &Bed, port: u16) -> Vec<u8> {
    let page = bed.file("page");
    let url = format!("http://{}/page", bed.endpoint(port));
    let page_name = page.display().to_string();
    let words = ["-sS", "--max-time", "60", "-o", &page_name, &url];
    client(bed, Stack::Kernel, "curl", &words);
    std::fs::read(page).unwrap()
}

/// Standard TCP on the same host: nginx on Portolan's sockets.
fn nginx(bed: &Bed) -> Background {
    let text = format!(
        "user root; daemon off; master_process off; pid {}; error_log stderr;\nevents {{}}\n\
         http {{ access_log off; server {{ listen {}; location / {{ return 200 standard; }} }} }}\n",
        bed.file("nginx.pid").display(),
        bed.endpoint(STANDARD_PORT),
    );
    let config = file(bed, "nginx.conf", text);
    let words = ["-c", &config];
    bed.serve(Stack::Portolan, STANDARD_PORT, "/usr/sbin/nginx", &words)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Captures errors that the kernel of the server host would send for a port that is not its own.
fn complaints(bed: &Bed) -> Daemon {
    let mut tcpdump = bed.command(Side::Server, Stack::Kernel, "tcpdump");
    let filter =
        format!("(icmp[0] = 3) or (tcp[tcpflags] & tcp-rst != 0 and src port {SPECIAL_PORT})");
    tcpdump.args(["-i", INTERFACE, "-nl", "--immediate-mode", &filter]);
    Daemon::start(tcpdump, Ready::Line("listening on".to_owned()))
}

/// The peer uses the kernel's TCP; the other ports of the host use standard TCP.
#[test]
fn a_tcp_of_ones_own_has_one_port_and_the_standard_one_has_the_others() {
    let bed = bed();
    let complaints = complaints(&bed);
    let words = [&SPECIAL_PORT.to_string(), &PAGE.to_string()];
    let words = ["offer", words[0].as_str(), words[1].as_str()];
    let _special = serve_with(&bed, Side::Server, "special-tcp", &words);
    let _standard = nginx(&bed);
    for _ in 0..2 {
        assert!(fetch(&bed, SPECIAL_PORT) == stream(PAGE));
        assert_eq!(fetch(&bed, STANDARD_PORT), b"standard");
    }
    assert!(counter(&bed, Side::Server, "receive", "delivered_raw") > 10);
    let said = complaints.output();
    assert!(!said.contains("Flags [R"), "{said}");
    // After the end of the owner the kernel refuses, which the capture would have shown before.
    drop(_special);
    let refused = || {
        let _ = run(&mut nobody_there(&bed));
        complaints.output().contains("Flags [R")
    };
    assert!(eventually(Duration::from_secs(10), refused));
}

fn nobody_there(bed: &Bed) -> Command {
    let mut command = bed.command(Side::Client, Stack::Kernel, "curl");
    let url = format!("http://{}/", bed.endpoint(SPECIAL_PORT));
    command.args(["-sS", "--max-time", "5", &url]);
    command
}

#[test]
fn a_udp_of_ones_own_talks_to_the_kernels_without_checksums() {
    let bed = bed();
    let complaints = complaints(&bed);
    let port = SPECIAL_PORT.to_string();
    let _echo = serve_with(&bed, Side::Server, "unchecked-udp", &["echo", &port]);
    let script = format!(
        "import socket\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.settimeout(10)\n\
         for i in range(100):\n\
         \x20   s.sendto(b'%d' % i, ('{}', {port}))\n\
         \x20   assert s.recv(100) == b'%d' % i\n\
         print('all')",
        bed.endpoint(0).ip(),
    );
    let said = client(&bed, Stack::Kernel, PYTHON, &["-c", &script]);
    assert_eq!(said.trim(), "all");
    let endpoint = bed.endpoint(SPECIAL_PORT).to_string();
    let words = ["call", &endpoint, "100"];
    let said = run(&mut command(&bed, Side::Client, "unchecked-udp", &words)).unwrap();
    assert_eq!(said.trim(), "100 of 100 came back");
    assert!(!complaints.output().contains("unreachable"));
}

fn listed(bed: &Bed) -> Vec<String> {
    let text = bed.portolan(Side::Server, &["ss", "-l", "-p"]).unwrap();
    let raw = text.lines().filter(|line| line.contains(" RAW "));
    raw.map(str::to_owned).collect()
}

/// Returns the protocols that `portolan ss` shows as JSON.
fn raw_flows(bed: &Bed) -> Vec<serde_json::Value> {
    let text = bed.portolan(Side::Server, &["ss", "-w", "--json"]).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn flows_of_every_kind_are_listed_with_their_owners_and_what_they_did() {
    let bed = bed();
    let _messages = serve(&bed, Side::Server, "active-messages");
    let mut special = command(&bed, Side::Server, "special-tcp", &["serve"]);
    let _special = Background::start_with_output(special.stdout(Stdio::null())).unwrap();
    let port = SPECIAL_PORT.to_string();
    let echo = serve_with(&bed, Side::Server, "unchecked-udp", &["echo", &port]);
    call(&bed, 100).unwrap();
    let of = |protocol: &str| {
        let flows = raw_flows(&bed);
        flows.into_iter().find(|flow| flow["protocol"] == protocol)
    };
    let heard = || {
        let frames = of("ethernet").map(|flow| flow["raw"]["frames_in"].as_u64());
        frames.flatten() > Some(100) && of("ip").is_some() && of("udp").is_some()
    };
    assert!(eventually(Duration::from_secs(10), heard));
    let messages = of("ethernet").unwrap();
    assert_eq!(messages["raw"]["number"], 0x88b5);
    assert_eq!(messages["raw"]["guard"], "ethertype 0x88b5");
    assert!(messages["raw"]["frames_out"].as_u64() > Some(100));
    assert_eq!(messages["raw"]["dropped"], 0);
    let holder = &messages["holder"];
    assert_eq!(holder["program"], "active-messages");
    let udp = of("udp").unwrap();
    assert_eq!(udp["raw"]["number"], SPECIAL_PORT);
    assert_eq!(udp["holder"]["pid"], echo.pid());
    assert_ne!(udp["raw"]["channel"], messages["raw"]["channel"]);
    let text = bed.portolan(Side::Server, &["ss", "-a", "-i"]).unwrap();
    assert!(text.contains("eth   RAW"), "{text}");
    assert!(text.contains("ip    RAW"), "{text}");
    assert!(text.contains(" dropped:0 "), "{text}");
}

/// Binds the port like an ordinary program; returns the errno's name if that fails.
fn bind(bed: &Bed, stack: Stack) -> String {
    let script = format!(
        "import socket, errno\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         try:\n\
         \x20   s.bind(('', {SPECIAL_PORT}))\n\
         \x20   print('bound')\n\
         except OSError as e:\n\
         \x20   print(errno.errorcode[e.errno])"
    );
    let mut python = bed.command(Side::Server, stack, PYTHON);
    run(python.args(["-c", &script])).unwrap().trim().to_owned()
}

#[test]
fn a_port_is_one_programs_is_listed_and_is_free_when_that_is_killed() {
    let bed = bed();
    let port = SPECIAL_PORT.to_string();
    let words = ["echo", port.as_str()];
    let echo = serve_with(&bed, Side::Server, "unchecked-udp", &words);
    let lines = listed(&bed);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains(&format!("0.0.0.0:{port}")), "{lines:?}");
    assert!(lines[0].contains("unchecked-udp"), "{lines:?}");
    let second = run(&mut command(&bed, Side::Server, "unchecked-udp", &words));
    assert!(failure(second).contains("in use"));
    for stack in [Stack::Kernel, Stack::Portolan] {
        assert_eq!(bind(&bed, stack), "EADDRINUSE");
    }
    echo.signal(rustix::process::Signal::KILL).unwrap();
    let free = || listed(&bed).is_empty();
    assert!(eventually(Duration::from_secs(10), free));
    for stack in [Stack::Kernel, Stack::Portolan] {
        assert_eq!(bind(&bed, stack), "bound");
    }
}

#[test]
fn users_have_the_ports_that_a_rule_gives_them_and_low_ones_by_their_capability() {
    let mut bed = Bed::bare(portolan_netns::Bed::veth()).unwrap();
    bed.set_settings(&format!(
        "[[raw]]\nuser = \"{FRIEND}\"\nudp_ports = [{SPECIAL_PORT}, 81]\ntcp_ports = [80]\n"
    ));
    bed.start_daemon(Side::Server).unwrap();
    let program = public_programs(&bed).join("unchecked-udp");
    std::fs::copy(example(&bed, "unchecked-udp"), &program).unwrap();
    let as_user = |user: &str, port: u16, more: &[&str]| {
        let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
        command
            .args(["--reuid", user, "--regid", user, "--clear-groups"])
            .args(more)
            .arg(&program)
            .args(["echo", &port.to_string()]);
        command
    };
    for (user, port, reason) in [
        (STRANGER, SPECIAL_PORT, "not permitted"),
        (FRIEND, SPECIAL_PORT + 1, "not permitted"),
        // This rule is for TCP only.
        (FRIEND, 80, "not permitted"),
        (FRIEND, 0, "not permitted"),
        (FRIEND, 81, "denied"),
    ] {
        let refused = failure(run(&mut as_user(user, port, &[])));
        assert!(refused.contains(reason), "{user} {port}: {refused}");
    }
    let opened = |count| {
        let is_open = || counter(&bed, Side::Server, "server", "raw_flows_opened") == count;
        assert!(eventually(Duration::from_secs(10), is_open));
    };
    let _own = Background::start(&mut as_user(FRIEND, SPECIAL_PORT, &[])).unwrap();
    opened(1);
    let capability = "+net_bind_service";
    let capable = ["--inh-caps", capability, "--ambient-caps", capability];
    let _low = Background::start(&mut as_user(FRIEND, 81, &capable)).unwrap();
    opened(2);
}

#[test]
fn a_program_in_c_has_a_port_of_its_own() {
    let bed = bed();
    let program = compiled(&bed, "testing/programs/fixtures/raw_port.c");
    let mut serve = bed.command(Side::Server, Stack::Portolan, &program);
    let mut server = Background::start_with_output(serve.stdout(Stdio::piped())).unwrap();
    let mut lines = BufReader::new(server.output().unwrap()).lines();
    let port = lines.next().unwrap().unwrap();
    let script = format!(
        "import socket\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         s.settimeout(10)\n\
         s.sendto(b'there', ('{}', {port}))\n\
         print(s.recv(100).decode())",
        bed.endpoint(0).ip(),
    );
    let said = client(&bed, Stack::Kernel, PYTHON, &["-c", &script]);
    assert_eq!(said.trim(), "there");
}
