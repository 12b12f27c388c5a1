//! Connections that the server itself holds go on with the next server, if the service manager keeps them in between:
//! relayed and parked ones, and those that the server finishes for programs.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use common::manager::{Manager, confined, start_confined};
use common::scene::{Scene, scene};
use common::{Client, Library, TIMEOUT};
use portolan_netns::{Bed, Daemon};
use portolan_proto::control::{AfterFlush, Reader};
use portolan_proto::{PROTOCOL, encode};
use portolan_sys::unix::{self, PairKind, socket_pair};
use rustix::process::Signal;

/// More than the buffers on the way hold.
const LENGTH: usize = 3_000_000;

const RELAY: AfterFlush = AfterFlush::Relay(Reader::Sender);

/// A server under the service manager, and a connection that a program holds.
fn begin(bed: &Bed, manager: &Manager) -> (Daemon, Scene) {
    let server = start_confined(bed, manager, &[]);
    (server, scene(bed))
}

/// The program gives its connection to the server.
fn flush(scene: &mut Scene, then: AfterFlush) {
    scene.holder.flush(scene.id, scene.slot, then);
}

fn stop(mut server: Daemon) {
    server.signal(Signal::TERM);
    server.await_end();
}

/// Stops the server, and starts the next one with what it has left.
fn replace(bed: &Bed, manager: &Manager, server: Daemon) -> Daemon {
    stop(server);
    start_confined(bed, manager, &manager.kept("connections", 1))
}

fn descriptor(scene: &Scene) -> UnixStream {
    let near = UnixStream::from(scene.near.0.try_clone().expect("a descriptor"));
    near.set_read_timeout(Some(TIMEOUT)).expect("a time");
    near
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at / 251 + at) as u8).collect()
}

fn taken_up(scene: &Scene) -> u64 {
    Client::connect(&scene.path).counter("server", "connections_taken_up")
}

#[test]
fn a_relayed_connection_loses_nothing_in_either_direction() {
    let (bed, manager) = (Bed::veth(), Manager::new("relayed"));
    let (server, mut scene) = begin(&bed, &manager);
    flush(&mut scene, RELAY);
    let (mut near, mut far) = (descriptor(&scene), scene.peer.try_clone().expect("a copy"));
    let (mut near_out, mut far_out) = (descriptor(&scene), far.try_clone().expect("a copy"));
    let senders = [
        thread::spawn(move || near_out.write_all(&pattern()).expect("it goes on")),
        thread::spawn(move || far_out.write_all(&pattern()).expect("it goes on")),
    ];
    let (mut near_in, mut far_in) = (vec![0; LENGTH], vec![0; LENGTH]);
    near.read_exact(&mut near_in[..100_000]).expect("some");
    far.read_exact(&mut far_in[..100_000]).expect("some");
    let mut server = replace(&bed, &manager, server);
    assert_eq!(taken_up(&scene), 1);
    near.read_exact(&mut near_in[100_000..200_000])
        .expect("more");
    server = replace(&bed, &manager, server);
    assert_eq!(taken_up(&scene), 1);
    near.read_exact(&mut near_in[200_000..]).expect("the rest");
    far.read_exact(&mut far_in[100_000..]).expect("the rest");
    assert!(near_in == pattern() && far_in == pattern());
    for sender in senders {
        sender.join().expect("all is sent");
    }
    // The end of each direction passes, too.
    near.shutdown(Shutdown::Write).expect("a stream");
    assert_eq!(far.read(&mut [0]).expect("the end"), 0);
    server = replace(&bed, &manager, server);
    far.write_all(b"last").expect("it is half open");
    far.shutdown(Shutdown::Write).expect("a connection");
    let mut last = Vec::new();
    near.read_to_end(&mut last).expect("the end");
    assert_eq!(last, b"last");
    drop(server);
}

#[test]
fn a_parked_connection_is_the_next_ones_who_asks() {
    let (bed, manager) = (Bed::veth(), Manager::new("parked"));
    let (server, mut scene) = begin(&bed, &manager);
    flush(&mut scene, AfterFlush::Park);
    scene.peer.write_all(b"before, ").expect("it is open");
    let server = replace(&bed, &manager, server);
    scene.peer.write_all(b"after").expect("it is open");
    let mut library = Library::start(&scene.path);
    let slot = library.cache(scene.id);
    assert_eq!(library.read(slot, 13), b"before, after");
    library.write(slot, b"answer");
    let mut answer = [0; 6];
    scene.peer.read_exact(&mut answer).expect("it arrives");
    assert_eq!(&answer, b"answer");
    drop(server);
}

/// A program has written more than its peer reads, has closed, and is gone.
#[test]
fn what_a_program_has_left_to_send_arrives() {
    let (bed, manager) = (Bed::veth(), Manager::new("finished"));
    let (server, mut scene) = begin(&bed, &manager);
    let text = vec![7; 20_000];
    let connection = &mut scene
        .holder
        .stack
        .tcp(scene.slot)
        .expect("it is there")
        .connection;
    let sent = connection.send(portolan_sys::clock::now(), &text);
    assert_eq!(sent, text.len());
    flush(&mut scene, AfterFlush::Close);
    let server = replace(&bed, &manager, server);
    assert_eq!(taken_up(&scene), 1);
    let mut all = Vec::new();
    scene.peer.read_to_end(&mut all).expect("the end");
    assert_eq!(all.len(), sent);
    drop(server);
}

#[test]
fn a_descriptor_that_was_closed_meanwhile_ends_its_connection() {
    let (bed, manager) = (Bed::veth(), Manager::new("closed"));
    let (server, mut scene) = begin(&bed, &manager);
    flush(&mut scene, RELAY);
    stop(server);
    let kept = manager.kept("connections", 1);
    let Scene { near, mut peer, .. } = scene;
    UnixStream::from(near.0)
        .write_all(b"last words")
        .expect("there is room");
    let server = start_confined(&bed, &manager, &kept);
    let mut all = Vec::new();
    peer.read_to_end(&mut all).expect("the end");
    assert_eq!(all, b"last words");
    drop(server);
}

#[test]
fn a_start_that_fails_leaves_them_to_the_next_one() {
    let (bed, manager) = (Bed::veth(), Manager::new("fails"));
    let (server, mut scene) = begin(&bed, &manager);
    flush(&mut scene, RELAY);
    stop(server);
    let kept = manager.kept("connections", 1);
    // The first tap is made when the connections have been read.
    let without_taps = [
        "unshare",
        "-m",
        "sh",
        "-c",
        "mount --bind /dev/null /dev/net/tun && exec \"$@\"",
        "sh",
    ];
    let failed = confined(&bed, &manager, (&kept, &without_taps)).output();
    let failed = failed.expect("it is started");
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    let server = start_confined(&bed, &manager, &kept);
    assert_eq!(taken_up(&scene), 1);
    scene.peer.write_all(b"after").expect("it is open");
    let mut after = [0; 5];
    descriptor(&scene)
        .read_exact(&mut after)
        .expect("it goes on");
    assert_eq!(&after, b"after");
    drop(server);
}

#[test]
fn connections_that_nobody_keeps_end() {
    let bed = Bed::veth();
    let server = common::start_server(&bed.a);
    let mut scene = scene(&bed);
    flush(&mut scene, RELAY);
    stop(server);
    let error = scene.peer.read(&mut [0]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(descriptor(&scene).read(&mut [0]).expect("the end"), 0);
}

/// Of another version, without connections, cut off, or none of the server's messages at all.
#[test]
fn what_is_kept_and_not_understood_is_left_alone() {
    let bed = Bed::veth();
    let formats = [(PROTOCOL, 1), (PROTOCOL + 1, 1), (PROTOCOL, u32::MAX)];
    let mut contents: Vec<Vec<Vec<u8>>> = formats
        .iter()
        .map(|format| vec![encode(format), vec![1; 100]])
        .collect();
    contents.push(vec![]);
    contents.push(vec![vec![0xff; 1000]]);
    for (number, messages) in contents.iter().enumerate() {
        let manager = Manager::new(&format!("odd-{number}"));
        let (end, kept) = socket_pair(PairKind::SeqPacket).expect("a pair");
        for message in messages {
            unix::send(&end, message, &[]).expect("there is room");
        }
        let kept: Vec<OwnedFd> = vec![kept];
        let server = start_confined(&bed, &manager, &kept);
        let mut client = Client::connect(&common::control_path(&bed.a));
        assert_eq!(client.counter("server", "connections_taken_up"), 0);
        drop(server);
    }
}
