//! The packet filter in the device's driver (MB §4.1, SHM-IPF), over a veth link with XDP: programs work, and
//! receive exactly what their peers send, on whatever stack these are.

use std::fs;
use std::process::Command;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Bed as Wire;
use portolan_programs::{
    PYTHON, Pairing, Steps, bed_with, client, counter, each_pairing, eventually, file, serve,
};

const PORT: u16 = 7071;
const TRAFFIC: &str = "portolan-traffic";
const SIDES: [Side; 2] = [Side::Client, Side::Server];
const ALL_IN_DRIVER: &str = "[delivery]\nform = \"shm-ipf\"\n";

fn in_driver(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "receive", "delivered_in_driver")
}

fn left_large(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "driver", "left_large")
}

/// Returns a counter that includes fragments.
fn left_other(bed: &Bed, side: Side) -> u64 {
    counter(bed, side, "driver", "left_other")
}

/// Returns bytes in which no two blocks are alike.
fn noise(bytes: usize) -> Vec<u8> {
    let word = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..bytes / 8).flat_map(word).collect()
}

/// Sends bytes in both directions at once, and checks that they are exact.
fn mirror(bed: &Bed, pairing: Pairing) {
    let endpoint = bed.endpoint(PORT).to_string();
    let (file, copy) = (bed.file("sent"), bed.file("came-back"));
    let bytes = noise(16 << 20);
    fs::write(&file, &bytes).expect("the bed's directory is writable");
    let _mirror = serve(bed, pairing.server, PORT, TRAFFIC, &["mirror", &endpoint]);
    let mut send = bed.command(Side::Client, pairing.client, TRAFFIC);
    run(send.args(["send", &endpoint]).args([&file, &copy])).expect("it is sent");
    let back = fs::read(&copy).expect("it came back");
    assert!(back == bytes, "{pairing:?}: the stream was damaged");
}

fn side_of(pairing: Pairing) -> Side {
    match pairing.server {
        Stack::Portolan => Side::Server,
        _ => Side::Client,
    }
}

#[test]
fn streams_are_exact_by_a_native_hook() {
    let bed = bed_with(Wire::veth(), ALL_IN_DRIVER);
    let status = bed.portolan(Side::Server, &["status"]).expect("a status");
    assert!(status.contains("in driver   eth0: native"), "{status}");
    each_pairing(&bed, |bed, pairing| {
        let side = side_of(pairing);
        let before = in_driver(bed, side);
        mirror(bed, pairing);
        // A veth whose peer has such a hook segments what it sends: full segments, most of them while the owner is
        // awake.
        assert!(in_driver(bed, side) - before > 2000, "{pairing:?}");
    });
    for side in SIDES {
        assert_eq!(left_large(&bed, side), 0);
        assert_eq!(counter(&bed, side, "stack", "drop_checksum"), 0);
    }
    let bed = bed.over_ipv6();
    each_pairing(&bed, mirror);
}

/// A generic hook runs after the kernel has coalesced packets, with incomplete checksums. It does not see what
/// Portolan's peer on this machine sends: the kernel does not run it for redirected packets.
#[test]
fn streams_are_exact_by_a_generic_hook_which_leaves_what_is_put_together() {
    let bed = bed_with(
        Wire::veth(),
        "[delivery]\nform = \"shm-ipf\"\nxdp = \"generic\"\n",
    );
    each_pairing(&bed, |bed, pairing| {
        let side = side_of(pairing);
        let before = (in_driver(bed, side), left_large(bed, side));
        mirror(bed, pairing);
        if pairing.server != pairing.client {
            let after = (in_driver(bed, side), left_large(bed, side));
            assert!(
                after.0 > before.0 && after.1 > before.1,
                "{before:?} {after:?}"
            );
        }
        assert_eq!(counter(bed, side, "stack", "drop_checksum"), 0);
    });
}

#[test]
fn datagrams_are_answered_over_either_family() {
    let bed = bed_with(Wire::veth(), ALL_IN_DRIVER);
    answer_datagrams(&bed);
    answer_datagrams(&bed.over_ipv6());
}

fn answer_datagrams(bed: &Bed) {
    let endpoint = bed.endpoint(PORT).to_string();
    let mut echo = bed.command(Side::Server, Stack::Kernel, TRAFFIC);
    let arguments = ["echo", "udp", &endpoint, "--spin", "--size", "4000"];
    let _echo = Background::start(echo.args(arguments)).expect("echo");
    let counted = || [in_driver(bed, Side::Client), left_other(bed, Side::Client)];
    let before = counted();
    // Longer ones are fragmented and received by the other filter.
    for size in ["1", "183", "1400", "4000"] {
        let mut ping = bed.command(Side::Client, Stack::Portolan, TRAFFIC);
        ping.args(["ping", "udp", &endpoint, "--count", "500", "--spin"]);
        run(ping.args(["--size", size])).expect("all are answered");
    }
    let after = counted();
    let [served, left] = [after[0] - before[0], after[1] - before[1]];
    assert!(
        served >= 1500 && left >= 1500,
        "{served} served, {left} left"
    );
    assert_eq!(counter(bed, Side::Client, "stack", "drop_checksum"), 0);
}

#[test]
fn unmodified_services_work_with_peers_on_either_stack() {
    let bed = bed_with(Wire::veth(), ALL_IN_DRIVER);
    each_pairing(&bed, |bed, pairing| {
        let before = in_driver(bed, side_of(pairing));
        redis(bed, pairing);
        nginx(bed, pairing);
        iperf3(bed, pairing);
        assert!(in_driver(bed, side_of(pairing)) > before, "{pairing:?}");
    });
}

fn redis(bed: &Bed, pairing: Pairing) {
    let address = bed.server.address.to_string();
    let arguments = ["--bind", &address, "--protected-mode", "no", "--save", ""];
    let _redis = serve(bed, pairing.server, 6379, "redis-server", &arguments);
    let arguments = [
        "-h", &address, "-c", "20", "-n", "5000", "-t", "set,get", "--csv",
    ];
    let csv = client(bed, pairing.client, "redis-benchmark", &arguments);
    assert!(csv.contains("\"SET\"") && csv.contains("\"GET\""), "{csv}");
}

fn nginx(bed: &Bed, pairing: Pairing) {
    let root = bed.file("www");
    fs::create_dir_all(&root).expect("the bed's directory is writable");
    let page = "0123456789".repeat(100_000);
    fs::write(root.join("page"), &page).expect("the bed's directory is writable");
    let config = file(
        bed,
        "nginx.conf",
        format!(
            "user root; daemon off; worker_processes 2; pid {}; error_log stderr crit;\nevents {{}}\n\
             http {{ access_log off; server {{ listen {}; root {}; }} }}\n",
            bed.file("nginx.pid").display(),
            bed.endpoint(8080),
            root.display(),
        ),
    );
    let _nginx = serve(bed, pairing.server, 8080, "nginx", &["-c", &config]);
    let url = format!("http://{}/page", bed.endpoint(8080));
    let arguments = ["-sS", "--max-time", "20", &url, &url];
    let twice = client(bed, pairing.client, "curl", &arguments);
    assert_eq!(twice, page.repeat(2));
}

fn iperf3(bed: &Bed, pairing: Pairing) {
    let address = bed.server.address.to_string();
    for direction in [&[][..], &["-R"]] {
        let arguments = ["-s", "-1", "-B", &address];
        let _iperf = serve(bed, pairing.server, 5201, "iperf3", &arguments);
        let arguments = [&["-c", &address, "-n", "64M", "-J"], direction].concat();
        let json = client(bed, pairing.client, "iperf3", &arguments);
        let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let rate = report["end"]["sum_received"]["bits_per_second"].as_f64();
        assert!(rate.is_some_and(|rate| rate > 1e7), "{json}");
    }
}

/// One socket by the driver, one by the ring, in one process of a server whose default form is the ring.
const CHOOSER: &str = "
import socket, sys
for form in (3, -1):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, 0x5045, form)
    assert s.getsockopt(socket.SOL_SOCKET, 0x5045) == form
    s.connect((sys.argv[1], int(sys.argv[2])))
    s.setblocking(False)
    for _ in range(300):
        s.send(b'x')
        while True:
            try:
                s.recv(1)
                break
            except BlockingIOError:
                pass
    print(form, flush=True)
    sys.stdin.readline()
    s.close()
";

fn chooser(bed: &Bed) -> Steps {
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    let (address, port) = (bed.server.address.to_string(), PORT.to_string());
    Steps::start(command.args(["-c", CHOOSER, &address, &port]))
}

/// Returns the figures of the only established session.
fn shown(bed: &Bed) -> String {
    let sessions = bed.portolan(Side::Client, &["ss", "-i"]).expect("sessions");
    let mut lines = sessions
        .lines()
        .skip_while(|line| !line.contains(" ESTAB "));
    lines.nth(1).expect("a session with figures").to_owned()
}

#[test]
fn a_session_chooses_it_where_the_server_has_the_hook() {
    let bed = bed_with(Wire::veth(), "[delivery]\nxdp = \"native\"\n");
    let endpoint = bed.endpoint(PORT).to_string();
    let _mirror = serve(&bed, Stack::Kernel, PORT, TRAFFIC, &["mirror", &endpoint]);
    let mut steps = chooser(&bed);
    steps.await_line("3");
    let chosen = in_driver(&bed, Side::Client);
    assert!(chosen >= 100, "{chosen} in the driver");
    assert!(
        shown(&bed).contains(" delivery:shm-ipf "),
        "{}",
        shown(&bed)
    );
    steps.go_on();
    steps.await_line("-1");
    let after = in_driver(&bed, Side::Client);
    assert!(after - chosen < 20, "{} more in the driver", after - chosen);
    assert!(!shown(&bed).contains(" delivery:"), "{}", shown(&bed));
}

#[test]
fn where_there_is_no_hook_it_comes_as_ever_and_says_so() {
    let bed = bed_with(Wire::veth(), "");
    let endpoint = bed.endpoint(PORT).to_string();
    let _mirror = serve(&bed, Stack::Kernel, PORT, TRAFFIC, &["mirror", &endpoint]);
    let mut steps = chooser(&bed);
    steps.await_line("3");
    let shown = shown(&bed);
    assert!(shown.contains(" delivery:shm(no-driver-hook) "), "{shown}");
    assert_eq!(in_driver(&bed, Side::Client), 0);
}

fn programs_on_the_device(bed: &Bed) -> String {
    let mut show: Command = bed.namespace(Side::Server).exec("ip");
    run(show.args(["-d", "link", "show", "eth0"])).expect("the device is there")
}

#[test]
fn the_hook_goes_with_the_server_however_that_ends() {
    let mut bed = bed_with(Wire::veth(), ALL_IN_DRIVER);
    assert!(programs_on_the_device(&bed).contains("prog/xdp"));
    let daemon = bed.daemon(Side::Server).take().expect("it runs");
    daemon
        .signal(rustix::process::Signal::KILL)
        .expect("it runs");
    let has_gone = || !programs_on_the_device(&bed).contains("prog/xdp");
    assert!(eventually(Duration::from_secs(10), has_gone));
    drop(daemon);
    bed.start_daemon(Side::Server).expect("a server again");
    assert!(programs_on_the_device(&bed).contains("prog/xdp"));
}
