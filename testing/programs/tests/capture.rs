//! `portolan capture`: what two programs of one host have sent each other, and packets, as tcpdump reads it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::{Background, run};
use portolan_netns::Bed as Wire;
use portolan_programs::{PYTHON, bed, bed_with, eventually, public_programs};
use rustix::process::Signal;

const TALK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/captured.py");
const SCRIBBLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/scribbling.py");
const PROMPTLY: Duration = Duration::from_secs(10);
const AS_NOBODY: [&str; 5] = [
    "--reuid=nobody",
    "--regid=nogroup",
    "--clear-groups",
    "--no-new-privs",
    "--",
];

/// A capture, its file, and what it says.
struct Capture {
    process: Background,
    file: String,
    log: String,
}

impl Capture {
    /// Starts a capture and waits until it has begun.
    fn start(bed: &Bed, name: &str, command: &mut Command, options: &[&str]) -> Capture {
        let [file, log] = ["pcapng", "log"].map(|kind| {
            let path = bed.file(&format!("{name}.{kind}"));
            path.display().to_string()
        });
        command.args(options).stdin(Stdio::null());
        command.stdout(File::create(&file).expect("the bed's directory is writable"));
        command.stderr(File::create(&log).expect("the bed's directory is writable"));
        let process =
            Background::start_with_output(command).unwrap_or_else(|error| panic!("{error}"));
        let capture = Capture { process, file, log };
        let has_begun = eventually(PROMPTLY, || capture.said().contains("capturing"));
        assert!(has_begun, "{}", capture.said());
        capture
    }

    fn of_root(bed: &Bed, options: &[&str]) -> Capture {
        let mut command = bed.own_command(Side::Server);
        Capture::start(bed, "root", command.arg("capture"), options)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends the capture and returns what it says, and the streams in its file.
    fn end(mut self) -> (String, Vec<Stream>) {
        self.process.signal(Signal::INT).expect("it runs");
        assert!(self.process.wait(PROMPTLY), "it does not end");
        (self.said(), streams(&self.file))
    }
}

/// The data of one direction of a connection, and how it has begun and ended.
#[derive(Debug, Default)]
struct Stream {
    source: u16,
    bytes: Vec<u8>,
    has_syn: bool,
    has_fin: bool,
    /// Sequence numbers follow each other.
    has_gap: bool,
}

/// A captured TCP segment.
struct Segment {
    source: u16,
    sequence: u32,
    flags: u8,
    text: Vec<u8>,
}

impl Segment {
    /// Of an Ethernet frame with IPv4.
    fn of(frame: &[u8]) -> Segment {
        assert_eq!(frame[12..14], [8, 0], "IPv4");
        let length = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
        let packet = &frame[14..14 + length];
        let segment = &packet[usize::from(packet[0] & 15) * 4..];
        Segment {
            source: u16::from_be_bytes([segment[0], segment[1]]),
            sequence: u32::from_be_bytes(segment[4..8].try_into().expect("four")),
            flags: segment[13],
            text: segment[usize::from(segment[12] >> 4) * 4..].to_vec(),
        }
    }
}

/// Reads a file of packets by way of tcpdump, which writes it in its older format.
fn packets(file: &str) -> Vec<Segment> {
    let plain = format!("{file}.pcap");
    run(Command::new("tcpdump").args(["-r", file, "-w", &plain]))
        .unwrap_or_else(|error| panic!("{error}"));
    let bytes = fs::read(&plain).expect("tcpdump has written it");
    let mut rest = &bytes[24..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().expect("four"));
        let length = word(8) as usize;
        found.push(Segment::of(&rest[16..16 + length]));
        rest = &rest[16 + length..];
    }
    found
}

fn streams(file: &str) -> Vec<Stream> {
    let mut found: Vec<(u32, Stream)> = Vec::new();
    for segment in packets(file) {
        add_segment(&mut found, &segment);
    }
    found.into_iter().map(|(_, stream)| stream).collect()
}

/// Returns the data of the segments from the ports wanted, with their numbers.
fn segments(file: &str, is_wanted: impl Fn(u16) -> bool) -> Vec<(u32, Vec<u8>)> {
    let wanted = packets(file).into_iter();
    let wanted = wanted.filter(|segment| is_wanted(segment.source) && !segment.text.is_empty());
    wanted
        .map(|segment| (segment.sequence, segment.text))
        .collect()
}

/// Adds a segment to its stream; the next sequence number is kept beside it.
fn add_segment(found: &mut Vec<(u32, Stream)>, segment: &Segment) {
    let Segment {
        source,
        sequence,
        flags,
        text,
    } = segment;
    let (source, sequence) = (*source, *sequence);
    let place = found.iter().position(|(_, stream)| stream.source == source);
    let place = place.unwrap_or_else(|| {
        let stream = Stream {
            source,
            ..Stream::default()
        };
        found.push((sequence, stream));
        found.len() - 1
    });
    let (next, stream) = &mut found[place];
    let [fin, syn] = [1, 2].map(|bit| flags & bit != 0);
    stream.has_gap |= sequence != *next;
    stream.has_syn |= syn;
    stream.has_fin |= fin;
    stream.bytes.extend(text);
    *next = sequence.wrapping_add(text.len() as u32 + u32::from(fin) + u32::from(syn));
}

fn serve(bed: &Bed, port: u16, count: &str) -> Background {
    let words = [TALK, "serve", "127.0.0.1", &port.to_string(), count];
    bed.serve(Stack::Portolan, port, PYTHON, &words)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn ask(bed: &Bed, port: u16, path: &str, length: usize) {
    let (port, length) = (port.to_string(), length.to_string());
    let mut client = bed.neighbour(Stack::Portolan, PYTHON);
    run(client.args([TALK, "ask", "127.0.0.1", &port, path, &length]))
        .unwrap_or_else(|error| panic!("{error}"));
}

fn path(bed: &Bed, name: &str) -> String {
    bed.file(name).display().to_string()
}

/// Checks that both streams of the connection to `port` are there, once and whole.
fn assert_whole(found: &[Stream], port: u16, path: &str) {
    let [sent, received] =
        ["out", "in"].map(|kind| fs::read(format!("{path}.{kind}")).expect("the client's"));
    assert_eq!(found.len(), 2, "{found:?}");
    for stream in found {
        let expected = if stream.source == port {
            &received
        } else {
            &sent
        };
        assert!(stream.has_syn && stream.has_fin && !stream.has_gap);
        assert!(stream.bytes == *expected, "from port {}", stream.source);
    }
}

/// Both ends record: what they send, and what they receive.
#[test]
fn a_session_between_two_programs_is_captured_whole() {
    let bed = bed();
    for (round, length) in [0, 3_000_000].into_iter().enumerate() {
        let port = 7060 + round as u16;
        let _server = serve(&bed, port, "1");
        // One program runs already, the other one starts afterwards.
        let capture = Capture::of_root(&bed, &["--only", "local", "--buffer-size", "65536"]);
        let path = path(&bed, "whole");
        ask(&bed, port, &path, length);
        let (said, found) = capture.end();
        assert!(said.contains("\n0 records dropped"), "{said}");
        assert_whole(&found, port, &path);
    }
}

/// tshark dissects the segments without a complaint, and puts the same bytes together.
#[test]
fn tshark_follows_a_captured_session() {
    let bed = bed();
    let port = 7064;
    let _server = serve(&bed, port, "1");
    let mut capture = Capture::of_root(&bed, &["--only", "local"]);
    let path = path(&bed, "tshark");
    ask(&bed, port, &path, 100_000);
    capture.process.signal(Signal::INT).expect("it runs");
    assert!(capture.process.wait(PROMPTLY), "it does not end");
    let tshark = |words: &[&str]| {
        let mut command = Command::new("tshark");
        command.args(["-n", "-r", &capture.file]).args(words);
        run(&mut command).unwrap_or_else(|error| panic!("{error}"))
    };
    let complaints = "_ws.malformed || tcp.analysis.lost_segment || tcp.analysis.retransmission";
    assert_eq!(tshark(&["-Y", complaints]), "");
    let followed = tshark(&["-q", "-z", "follow,tcp,raw,0"]);
    for (kind, indent) in [("out", ""), ("in", "\t")] {
        let expected = fs::read(format!("{path}.{kind}")).expect("the client's");
        let is_data = |line: &&str| line.chars().all(|c| c.is_ascii_hexdigit());
        let lines = followed.lines().filter_map(|line| match indent {
            "" => Some(line),
            indent => line.strip_prefix(indent),
        });
        let bytes: usize = lines.filter(is_data).map(|line| line.len() / 2).sum();
        assert_eq!(bytes, expected.len(), "{kind}");
    }
}

/// A client that has asked half of its questions.
struct Late {
    process: Child,
    input: ChildStdin,
}

impl Late {
    fn start(bed: &Bed, port: u16, path: &str) -> Late {
        let mut client = bed.neighbour(Stack::Portolan, PYTHON);
        client.args([TALK, "late", "127.0.0.1", &port.to_string(), path]);
        let mut process = client
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python starts");
        let output = process.stdout.take().expect("a pipe");
        let mut line = String::new();
        BufReader::new(output)
            .read_line(&mut line)
            .expect("half of it is done");
        let input = process.stdin.take().expect("a pipe");
        Late { process, input }
    }

    fn finish(mut self) {
        self.input.write_all(b"\n").expect("it waits");
        assert!(self.process.wait().expect("a child").success());
    }
}

#[test]
fn a_session_that_was_open_before_is_captured_from_then_on() {
    let bed = bed();
    let server = serve(&bed, 7062, "1");
    let client = Late::start(&bed, 7062, &path(&bed, "late"));
    let capture = Capture::of_root(&bed, &[]);
    let processes = [server.pid(), client.process.id()];
    assert!(eventually(PROMPTLY, || processes.into_iter().all(records)));
    client.finish();
    let (_, found) = capture.end();
    assert_eq!(found.len(), 2, "{found:?}");
    for stream in &found {
        assert!(
            stream.has_fin && !stream.has_syn && !stream.has_gap,
            "{stream:?}"
        );
        let text = String::from_utf8_lossy(&stream.bytes).to_lowercase();
        assert!(
            text.contains("question 99") && !text.contains("question 49 "),
            "{text}"
        );
    }
}

/// Another user's end of a session with one's own program is not captured, but what that program receives is.
#[test]
fn a_user_captures_the_sessions_of_the_own_programs_only() {
    let bed = bed();
    let programs = public_programs(&bed);
    let _server = serve(&bed, 7063, "2");
    let talk = programs.join("talk.py");
    fs::copy(TALK, &talk).expect("the directory is writable");
    let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
    command.args(AS_NOBODY).arg(programs.join("portolan"));
    let options = ["capture", "--buffer-size", "65536"];
    let capture = Capture::start(&bed, "nobody", &mut command, &options);
    assert!(capture.said().contains("0 processes"), "{}", capture.said());
    ask(&bed, 7063, &path(&bed, "roots"), 1000);
    let own = programs.join("own");
    fs::create_dir(&own).expect("the directory is writable");
    run(Command::new("chown").arg("nobody").arg(&own)).expect("root may");
    let path = own.join("talk").display().to_string();
    ask_as_nobody(
        &bed,
        &programs,
        &["ask", "127.0.0.1", "7063", &path, "50000"],
    );
    let (said, found) = capture.end();
    assert!(said.contains("\n0 records dropped"), "{said}");
    assert_whole(&found, 7063, &path);
}

fn ask_as_nobody(bed: &Bed, programs: &Path, words: &[&str]) {
    let mut command = bed.neighbour(Stack::Kernel, "setpriv");
    command.args(AS_NOBODY).arg(programs.join("portolan"));
    command.args(["run", "--require", "--", PYTHON]);
    command.arg(programs.join("talk.py")).args(words);
    run(&mut command).unwrap_or_else(|error| panic!("{error}"));
}

/// Is a process on the server host recording?
fn records(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.contains("portolan-capture")
}

#[test]
fn a_capture_that_stops_reading_or_is_killed_harms_no_session() {
    let bed = bed();
    let server = serve(&bed, 7064, "3");
    let mut capture = Capture::of_root(&bed, &["--buffer-size", "256"]);
    let path = path(&bed, "stopped");
    capture.process.signal(Signal::STOP).expect("it runs");
    ask(&bed, 7064, &path, 3_000_000);
    capture.process.signal(Signal::CONT).expect("it is there");
    // What found no room is counted.
    capture.process.signal(Signal::INT).expect("it runs");
    assert!(capture.process.wait(PROMPTLY));
    assert!(
        !capture.said().contains("\n0 records dropped"),
        "{}",
        capture.said()
    );
    assert!(!streams(&capture.file).is_empty());
    assert!(
        eventually(PROMPTLY, || !records(server.pid())),
        "it goes on recording"
    );

    let client = Late::start(&bed, 7064, &path);
    let capture = Capture::of_root(&bed, &[]);
    assert!(eventually(PROMPTLY, || records(server.pid())));
    capture.process.signal(Signal::KILL).expect("it runs");
    client.finish();
    assert!(
        eventually(PROMPTLY, || !records(server.pid())),
        "it goes on recording"
    );
    ask(&bed, 7064, &path, 1000);
}

#[test]
fn a_program_that_writes_over_its_records_spoils_its_own_only() {
    let bed = bed();
    let endpoint = "127.0.0.1:7066";
    let _sink = bed
        .serve(
            Stack::Portolan,
            7066,
            "portolan-traffic",
            &["sink", endpoint],
        )
        .unwrap_or_else(|error| panic!("{error}"));
    let _server = serve(&bed, 7067, "1");
    let capture = Capture::of_root(&bed, &["--buffer-size", "65536"]);
    let mut hostile = bed.neighbour(Stack::Portolan, PYTHON);
    let said = run(hostile.args([SCRIBBLE, "127.0.0.1", "7066"]));
    assert_eq!(said.unwrap_or_else(|error| panic!("{error}")), "done");
    let path = path(&bed, "beside");
    ask(&bed, 7067, &path, 100_000);
    let (_, mut found) = capture.end();
    let client = found.iter().position(|stream| stream.source == 7067);
    let client = client.expect("the other session is there");
    assert_eq!(
        found.swap_remove(client).bytes,
        fs::read(format!("{path}.in")).expect("the client's")
    );
}

#[test]
fn a_user_has_a_bounded_number_of_captures() {
    let bed = bed();
    let first = Capture::of_root(&bed, &[]);
    let mut command = bed.own_command(Side::Server);
    let second = Capture::start(&bed, "second", command.arg("capture"), &[]);
    let refused = bed.portolan(Side::Server, &["capture"]);
    assert!(refused.is_err_and(|error| error.to_string().contains("captures twice")));
    drop(first);
    drop(second);
    let again = Capture::of_root(&bed, &[]);
    assert_eq!(again.end().1.len(), 0);
}

/// The data of a stream in the order of its numbers; segments may come twice, and not in order.
fn joined(segments: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let first = segments.iter().map(|(number, _)| *number).min();
    let mut bytes = Vec::new();
    for (number, text) in segments {
        let at = number.wrapping_sub(first.unwrap_or_default()) as usize;
        bytes.resize(bytes.len().max(at + text.len()), 0);
        bytes[at..at + text.len()].copy_from_slice(text);
    }
    bytes
}

/// Packets of a connection with another host, also where the driver has delivered them.
#[test]
fn packets_are_captured_without_privilege_whatever_delivers_them() {
    const LENGTH: usize = 300_000;
    for settings in ["", "[delivery]\nform = \"shm-ipf\"\n"] {
        let bed = bed_with(Wire::veth(), settings);
        let (address, port) = (bed.client.address.to_string(), 7068);
        let mut server = bed.command(Side::Client, Stack::Kernel, PYTHON);
        server.args([TALK, "serve", &address, &port.to_string()]);
        let _server = Background::start(&mut server).unwrap_or_else(|error| panic!("{error}"));
        let listens = || bed.is_listening_on(Side::Client, port);
        assert!(eventually(PROMPTLY, listens));
        let programs = public_programs(&bed);
        fs::copy(TALK, programs.join("talk.py")).expect("the directory is writable");
        let mut command = bed.command(Side::Server, Stack::Kernel, "setpriv");
        command.args(AS_NOBODY).arg(programs.join("portolan"));
        let options = ["capture", "--only", "packets", "--buffer-size", "65536"];
        let capture = Capture::start(&bed, "packets", &mut command, &options);
        let own = programs.join("own");
        fs::create_dir(&own).expect("the directory is writable");
        run(Command::new("chown").arg("nobody").arg(&own)).expect("root may");
        let path = own.join("talk").display().to_string();
        let words = [
            "ask",
            &address,
            &port.to_string(),
            &path,
            &LENGTH.to_string(),
        ];
        ask_as_nobody(&bed, &programs, &words);
        let file = capture.file.clone();
        let (said, _) = capture.end();
        assert!(said.contains("\n0 records dropped"), "{said}");
        for (kind, is_wanted) in [("out", false), ("in", true)] {
            let expected = fs::read(format!("{path}.{kind}")).expect("the client's");
            let found = joined(&segments(&file, |source| (source == port) == is_wanted));
            assert!(
                found == expected,
                "{settings} {kind}: {} bytes",
                found.len()
            );
        }
    }
}
