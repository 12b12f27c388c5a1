//! Descriptors by which the server, and other programs, wake a program: whatever a hostile program does to
//! its own copies, a wake-up never blocks its sender, and wake-ups of others arrive.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use portolan_netns::Bed;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_sys::clock;
use portolan_types::SessionId;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{SendFlags, Shutdown};

use crate::common::{Library, Near, control_path, start_server};
use crate::locals::introduce;
use crate::meter::Meter;
use crate::{PROMPT, Victim, assert_prompt, hostile_library};

/// Makes a write to the description behind `fd` block indefinitely, as far as possible.
fn clog(fd: BorrowedFd<'_>) {
    let flags = fcntl_getfl(fd).unwrap();
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).unwrap();
    // An eventfd at its maximum.
    let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
    while rustix::io::write(fd, &[0; 4096]).is_ok() {}
    while rustix::io::write(fd, &[0]).is_ok() {}
    fcntl_setfl(fd, flags - OFlags::NONBLOCK).unwrap();
}

fn notifier_of_peer(library: &mut Library, session: SessionId) -> OwnedFd {
    let (reply, mut fds) = library
        .client
        .ask_with(RequestBody::PeerNotifier { session, number: 0 }, &[]);
    assert!(matches!(reply, ReplyBody::PeerNotifier { .. }), "{reply:?}");
    fds.remove(0)
}

/// The server resets what the opener leaves behind, and notifies the accepter.
pub(crate) fn die_beside_a_clogged_notifier(path: &Path) {
    let (mut opener, mut accepter) = (hostile_library(path), hostile_library(path));
    let (opened, mut accepted) = introduce(&mut opener, &mut accepter);
    let notifier = notifier_of_peer(&mut opener, opened.id);
    clog(notifier.as_fd());
    accepted.sleep();
    drop((opened, opener));
}

/// The server recalls the session from the holder.
pub(crate) fn have_a_clogged_holder_recalled(
    path: &Path,
    peer: SocketAddr,
) -> (Library, Library, Near) {
    let (mut holder, mut other) = (hostile_library(path), hostile_library(path));
    let (session, near, slot) = holder.open(peer);
    clog(holder.recall_event.as_fd());
    other
        .client
        .send(RequestBody::Cache { session, slot }, &[near.0.as_fd()]);
    (holder, other, near)
}

#[test]
fn a_clogged_notifier_of_a_program_does_not_block_the_server() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    die_beside_a_clogged_notifier(&path);
    assert_prompt(&path);
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn a_clogged_alert_does_not_block_the_server() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut victim = Victim::unmetered(&bed, &path);
    let listener = bed.b.enter(|| TcpListener::bind((Bed::B4, 0))).unwrap();
    let _programs = have_a_clogged_holder_recalled(&path, listener.local_addr().unwrap());
    assert_prompt(&path);
    victim.assert_unharmed();
    meter.finish();
}

#[test]
fn a_peer_that_ends_its_side_of_a_notifier_does_not_silence_it_for_others() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let mut accepter = Library::start(&path);
    let (mut hostile, mut honest) = (hostile_library(&path), Library::start(&path));
    let (spoiled, _first) = introduce(&mut hostile, &mut accepter);
    let (opened, _second) = introduce(&mut honest, &mut accepter);
    let notifier = notifier_of_peer(&mut hostile, spoiled.id);
    clog(notifier.as_fd());
    let _ = rustix::net::shutdown(&notifier, Shutdown::Both);
    let notifier = notifier_of_peer(&mut honest, opened.id);
    accepter.wake_receiver.drain();
    rustix::net::send(&notifier, &[], SendFlags::DONTWAIT).unwrap();
    assert!(accepter.wake_receiver.is_notified());
    meter.finish_but_for_starts();
}

/// Both programs are user nobody's: one makes its own notifier block, the other notifies it.
#[test]
fn a_program_that_rings_a_clogged_notifier_does_not_wait() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let (mut honest, mut hostile) = (Library::start(&path), hostile_library(&path));
    let (opened, accepted) = introduce(&mut honest, &mut hostile);
    clog(notifier_of_peer(&mut honest, opened.id).as_fd());
    let wake_sender =
        portolan_sys::wait::WakeSender::from_fd(notifier_of_peer(&mut honest, opened.id));
    let start = clock::now();
    for _ in 0..1000 {
        wake_sender.wake();
    }
    assert!(clock::now().since(start) < PROMPT);
    drop(accepted);
}
