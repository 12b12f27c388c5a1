//! A relayed session returns to a library when no other process has its descriptor. Alone in its program: a child
//! forked by another test holds copies of all descriptors until its exec, and counts as another process.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use common::scene::{Scene, scene};
use common::start_server;
use portolan_netns::Bed;
use portolan_proto::control::{AfterFlush, Reader};
use portolan_sys::unix;

/// Bytes from the peer are unread in the descriptor, and more follow; likewise in the other direction.
#[test]
fn a_relayed_session_comes_back_whole_when_nobody_else_has_its_descriptor() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let mut scene = scene(&bed);
    scene
        .holder
        .flush(scene.id, scene.slot, AfterFlush::Relay(Reader::Sender));
    scene.peer.write_all(&[1; 300_000]).unwrap();
    let mut descriptor = UnixStream::from(scene.near.0.try_clone().unwrap());
    descriptor.read_exact(&mut [0; 1000]).unwrap();
    descriptor.write_all(b"by the descriptor, ").unwrap();
    let ask = |scene: &mut Scene| {
        let near = scene.near.0.as_fd();
        scene.holder.try_cache(scene.id, &[near])
    };
    let mut stranger = Command::new("sleep");
    stranger.arg("100").stdin(scene.near.0.try_clone().unwrap());
    let mut running = stranger.spawn().unwrap();
    drop(stranger);
    assert_eq!(ask(&mut scene), None);
    running.kill().unwrap();
    running.wait().unwrap();
    // A copy in a message counts as well.
    let (sender, receiver) = UnixStream::pair().unwrap();
    unix::send(&sender, b"x", &[descriptor.as_fd()]).unwrap();
    drop(descriptor);
    assert_eq!(ask(&mut scene), None);
    drop(receiver);
    drop(sender);
    let slot = ask(&mut scene).expect("nobody else has it");
    scene.peer.write_all(&[2; 1000]).unwrap();
    let got = scene.holder.read(slot, 300_000);
    assert!(got[..299_000].iter().all(|&byte| byte == 1));
    assert!(got[299_000..].iter().all(|&byte| byte == 2));
    scene.holder.write(slot, b"by the session");
    let mut all = [0; 33];
    scene.peer.read_exact(&mut all).unwrap();
    assert_eq!(&all, b"by the descriptor, by the session");
    let ended = scene.other.client.counter("server", "relays_ended");
    assert_eq!(ended, 1);
}
