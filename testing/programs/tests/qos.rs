//! Guarantees for programs that are not aware of them: proportional shares of a link, and sessions of one
//! process that do not wait for each other.

use std::fs::{self, File};
use std::ops::Range;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use portolan_bench::bed::{Bed, INTERFACE, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Bed as Wire;
use portolan_programs::{PYTHON, eventually, file};
use portolan_proto::qos::{Kind, QosRequest, Rate, Scope, Slack, Transmit};
use portolan_types::Protocol;
use rustix::process::Signal;
use serde_json::Value;

const PORT: u16 = 7302;
/// Local port of the sender with a rate.
const SLOW_PORT: u16 = 7303;
const SECONDS: f64 = 3.0;
/// Windows per second in the receiver's report.
const WINDOWS: usize = 5;
/// Time limit for events that are soon on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(20);

const SLOW: u64 = 1;
const OTHER: u64 = 2;

/// Two sockets of one program, each written to as fast as possible: by a thread each, by one thread that polls, or
/// by two processes, of which the second inherited its connection from the first. The sender with the local port is
/// the slow one.
const TWO_SENDERS: &str = r#"
import os, select, socket, struct, sys, threading, time

protocol, how, address, port, slow_port, seconds = sys.argv[1:]
to, end = (address, int(port)), time.monotonic() + float(seconds)
family = socket.AF_INET6 if ":" in address else socket.AF_INET
kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM

class Sender:
    def __init__(self, tag, local):
        self.tag, self.number = tag, 0
        self.socket = s = socket.socket(family, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", local))
        s.connect(to)
        if protocol == "tcp":
            s.sendall(struct.pack(">H", tag))
        if local:
            self.fill()

    def fill(self):
        # All that is sent before its transmit queue can exist.
        self.socket.setblocking(False)
        try:
            while time.monotonic() < end:
                self.send()
        except BlockingIOError:
            self.socket.setblocking(True)

    def send(self):
        if protocol == "tcp":
            self.socket.send(bytes(65536))
        else:
            self.socket.send(struct.pack(">HxxxxxxQ", self.tag, self.number) + bytes(1456))
            self.number += 1

    def stream(self):
        self.socket.settimeout(0.5)
        while time.monotonic() < end:
            try:
                self.send()
            except TimeoutError:
                pass

def poll(senders, flags):
    by_fd = {sender.socket.fileno(): sender for sender in senders}
    poll = select.epoll()
    for fd, sender in by_fd.items():
        sender.socket.setblocking(False)
        poll.register(fd, select.EPOLLOUT | flags)
    ready = set()
    while time.monotonic() < end:
        ready.update(fd for fd, _ in poll.poll(0 if ready else 0.5))
        for fd in list(ready):
            try:
                by_fd[fd].send()
            except BlockingIOError:
                # By edges nobody tells of it again until there is room.
                ready.discard(fd)
            except ConnectionRefusedError:
                # The receiver has gone: the rest is for nobody.
                pass
        if not flags:
            ready.clear()

senders = [Sender(1, int(slow_port)), Sender(2, 0)]
if how == "threads":
    threads = [threading.Thread(target=sender.stream) for sender in senders]
    for t in threads: t.start()
    for t in threads: t.join()
elif how == "child":
    is_child = os.fork() == 0
    senders[1 if is_child else 0].socket.close()
    senders[0 if is_child else 1].stream()
else:
    poll(senders, select.EPOLLET if how == "edges" else 0)
"#;

/// Makes a bed whose client's link has 100 Mb/s.
fn shaped_bed() -> Bed {
    let mut bed = Bed::bare(Wire::veth()).expect("a bed needs root and `cargo build`");
    bed.set_settings(&format!(
        "[[qos.link]]\ndevice = \"{INTERFACE}\"\nrate = \"100mbit\"\n"
    ));
    bed.start_daemon(Side::Client).expect("portoland starts");
    // Packets sent before the neighbour is resolved may be lost, as with the kernel's stack.
    for address in [bed.server.address, Wire::B6] {
        let mut ping = bed.namespace(Side::Client).exec("ping");
        run(ping.args(["-c", "1", &address.to_string()])).expect("it answers");
    }
    bed
}

fn reserve(bed: &Bed, scope: Scope, rate: Rate) {
    let spec = Transmit {
        device: None,
        rate,
        burst: None,
        slack: Slack::None,
    };
    bed.ask_qos(Side::Client, QosRequest::Transmit { scope, spec })
        .expect("it fits the link");
}

/// Starts the receiver, on the kernel's stack, which writes its report to a file.
fn receiver(bed: &Bed) -> Background {
    let output = File::create(bed.file("gauge.json")).expect("the bed's directory is writable");
    let (address, seconds) = (bed.endpoint(PORT).to_string(), SECONDS.to_string());
    bed.observe(PORT, &["gauge", &address, "--seconds", &seconds], output)
        .expect("the receiver listens")
}

/// The arrivals of each sender.
struct Received(Value);

impl Received {
    fn from(bed: &Bed, mut receiver: Background) -> Received {
        assert!(receiver.wait(TIMEOUT), "nothing arrived");
        let text = fs::read_to_string(bed.file("gauge.json")).expect("a report");
        eprintln!("{text}");
        Received(serde_json::from_str(&text).expect("JSON"))
    }

    fn sender(&self, tag: u64) -> &Value {
        let senders = self.0["senders"].as_array().expect("a list");
        let found = senders.iter().find(|sender| sender["tag"] == tag);
        found.unwrap_or_else(|| panic!("nothing came of sender {tag}"))
    }

    /// Returns the Mb/s after the first second.
    fn rate(&self, tag: u64) -> f64 {
        self.rate_in(tag, WINDOWS..(SECONDS as usize) * WINDOWS)
    }

    /// Returns the window of the sender's first arrival.
    fn first_window(&self, tag: u64) -> usize {
        let first = self.sender(tag)["first_ms"].as_f64().expect("a number");
        first as usize * WINDOWS / 1000
    }

    /// Returns the Mb/s in these windows of 200 ms.
    fn rate_in(&self, tag: u64, range: Range<usize>) -> f64 {
        let windows = self.sender(tag)["bytes"].as_array().expect("a list");
        let bytes = windows.iter().take(range.end).skip(range.start);
        let bytes: f64 = bytes.filter_map(Value::as_f64).sum();
        bytes * 8.0 / range.len() as f64 * WINDOWS as f64 / 1e6
    }

    fn lost(&self, tag: u64) -> u64 {
        self.sender(tag)["lost"].as_u64().expect("a number")
    }
}

/// Reserves the slow sender's rate.
fn reserve_port(bed: &Bed, protocol: Protocol) -> Scope {
    let scope = Scope::Port {
        protocol,
        port: SLOW_PORT,
    };
    reserve(bed, scope.clone(), Rate::Bits(2_000_000));
    scope
}

fn start_two(bed: &Bed, protocol: Protocol, how: &str, seconds: f64) -> Background {
    let script = file(bed, "two.py", TWO_SENDERS);
    let mut command = bed.command(Side::Client, Stack::Portolan, PYTHON);
    command.args(["-S", "-E", &script, &protocol.to_string(), how]);
    command.args([bed.server.address.to_string(), PORT.to_string()]);
    command.args([SLOW_PORT.to_string(), seconds.to_string()]);
    Background::start(&mut command).expect("Python starts")
}

fn two_senders(bed: &Bed, protocol: Protocol, how: &str) -> Received {
    reserve_port(bed, protocol);
    let receiver = receiver(bed);
    let _senders = start_two(bed, protocol, how, SECONDS + 2.0);
    Received::from(bed, receiver)
}

/// Returns the number of the client's devices of channels and transmit queues.
fn taps(bed: &Bed) -> usize {
    let mut command = bed.namespace(Side::Client).exec("ip");
    let list = run(command.args(["-o", "link"])).expect("iproute2 is installed");
    list.lines().filter(|line| line.contains(" ptl")).count()
}

/// Best effort has about 90 Mb/s. A busy machine may reduce that by much, but a sender that waits for the other would
/// not reach a multiple of the other's rate.
fn assert_apart(received: &Received) {
    let (slow, other) = (received.rate(SLOW), received.rate(OTHER));
    assert!((1.6..2.2).contains(&slow), "{slow} of 2 Mb/s");
    assert!(other > 5.0 * slow, "{other} beside {slow} Mb/s");
    // From the first byte on: no packet enters the slow class through a queue that both share.
    let first = received.first_window(OTHER);
    let at_first = received.rate_in(OTHER, first..first + WINDOWS);
    assert!(at_first > other / 2.0, "{at_first} at first, then {other}");
}

#[test]
fn a_stream_with_a_rate_does_not_stop_another_of_its_process() {
    for bed in [shaped_bed(), shaped_bed().over_ipv6()] {
        assert_apart(&two_senders(&bed, Protocol::Tcp, "threads"));
    }
}

/// Both with level- and with edge-triggered polling.
#[test]
fn what_has_a_rate_does_not_stop_others_of_one_thread_that_polls() {
    for how in ["levels", "edges"] {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            eprintln!("{how} {protocol}");
            let received = two_senders(&shaped_bed().over_ipv6(), protocol, how);
            assert_apart(&received);
            if protocol == Protocol::Udp {
                assert_eq!(received.lost(SLOW), 0);
            }
        }
    }
}

/// The session migrates to the child, with its rate.
#[test]
fn a_child_sends_at_the_rate_of_what_it_has_inherited() {
    assert_apart(&two_senders(&shaped_bed(), Protocol::Tcp, "child"));
}

/// Packets that the slow sender has sent before stay in their class.
#[test]
fn a_rate_for_what_is_under_way_does_not_stop_another_of_its_process() {
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let bed = shaped_bed();
        let receiver = receiver(&bed);
        let _senders = start_two(&bed, protocol, "threads", SECONDS + 2.0);
        sleep(Duration::from_secs(1));
        reserve_port(&bed, protocol);
        let received = Received::from(&bed, receiver);
        // The second that begins after both have sent for some time, and ends before they stop.
        let range = 2 * WINDOWS..3 * WINDOWS;
        let (slow, other) = (
            received.rate_in(SLOW, range.clone()),
            received.rate_in(OTHER, range),
        );
        assert!(slow < 10.0, "{slow} of 2 Mb/s and what was on its way");
        assert!(other > 20.0, "{other} beside {slow} Mb/s");
    }
}

#[test]
fn a_tx_queue_comes_with_its_reservation_and_goes_with_it_or_with_the_process() {
    let bed = shaped_bed();
    let mut receiver = receiver(&bed);
    let mut senders = start_two(&bed, Protocol::Udp, "levels", 60.0);
    assert!(receiver.wait(TIMEOUT), "nothing arrives");
    let before = taps(&bed);

    let scope = reserve_port(&bed, Protocol::Udp);
    assert!(eventually(TIMEOUT, || taps(&bed) == before + 1));
    let kind = Kind::Transmit;
    bed.ask_qos(Side::Client, QosRequest::Delete { scope, kind })
        .expect("it is there");
    assert!(eventually(TIMEOUT, || taps(&bed) == before));
    assert!(senders.is_running());

    reserve_port(&bed, Protocol::Udp);
    assert!(eventually(TIMEOUT, || taps(&bed) == before + 1));
    senders.signal(Signal::KILL).expect("it runs");
    // The channel's own tap is removed, too.
    assert!(eventually(TIMEOUT, || taps(&bed) < before));
}

#[test]
fn senders_share_a_link_in_proportion_to_their_slices() {
    let bed = shaped_bed();
    let receiver = receiver(&bed);
    let mut senders = Vec::new();
    for tag in 1..=6_u32 {
        let (to, tag_word) = (bed.endpoint(PORT).to_string(), tag.to_string());
        let mut command = bed.command(Side::Client, Stack::Portolan, "portolan-traffic");
        command.args(["pour", "udp", &to, "--tag", &tag_word, "--gate"]);
        command.args(["--seconds", "60"]).stdin(Stdio::piped());
        let sender = Background::start_with_output(&mut command).expect("a sender starts");
        let slice = Rate::Slice {
            slice_us: tag * 4_000,
            period_us: 100_000,
        };
        reserve(&bed, Scope::Process { pid: sender.pid() }, slice);
        senders.push(sender);
    }
    sleep(Duration::from_millis(500));
    senders.iter_mut().for_each(Background::end_input);
    let received = Received::from(&bed, receiver);
    // On a busy machine all of them may be stopped for a while.
    let rates: Vec<f64> = (1..=6).map(|tag| received.rate(tag)).collect();
    let sum: f64 = rates.iter().sum();
    for (rate, slice) in rates.iter().zip((4..=24).step_by(4)) {
        let (portion, share) = (rate / sum, f64::from(slice) / 84.0);
        assert!((portion / share - 1.0).abs() < 0.1, "{rates:?}");
        assert!(*rate < 1.05 * f64::from(slice), "{rates:?}");
    }
    for tag in 1..=6 {
        assert_eq!(received.lost(tag), 0, "of {tag}");
    }
}
