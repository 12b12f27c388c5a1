//! Descriptors in messages whose last close blocks: the server never blocks.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::{
    AfterFlush, FastOpenMode, HandshakeOptions, Reader, ReplyBody, Request, RequestBody, SessionRef,
};
use portolan_proto::encode;
use portolan_sys::unix::{self, PairKind};
use portolan_types::{Protocol, Slot};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Pid, Signal, kill_process};

use crate::budgets::idle;
use crate::common::{Client, await_some, control_path, start_server};
use crate::{Victim, as_nobody, assert_prompt, counter, hostile_library, open_to_b};

const LINGER: Duration = Duration::from_secs(8);

/// Returns a connection with bytes that its peer does not read, whose last close waits for that; and its peer.
pub(crate) fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&stream, Some(LINGER)).unwrap();
    (stream, peer)
}

fn answers_promptly_after(action: impl FnOnce(&Client, &[BorrowedFd<'_>])) {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let hostile = as_nobody(|| Client::connect(&path));
    let (stream, _peer) = lingering();
    action(&hostile, &[stream.as_fd()]);
    drop(stream);
    drop(hostile);
    assert_prompt(&path);
    victim.assert_unharmed();
}

/// Sends arbitrary bytes with descriptors.
pub(crate) fn send(client: &Client, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let pieces = [std::io::IoSlice::new(bytes)];
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(fds)));
    let flags = rustix::net::SendFlags::DONTWAIT;
    rustix::net::sendmsg(client, &pieces, &mut ancillary, flags)
}

#[test]
fn a_socket_that_lingers_does_not_hold_the_server_up() {
    answers_promptly_after(|client, fds| {
        send(client, b"rubbish", fds).unwrap();
    });
}

#[test]
fn nor_do_more_descriptors_than_any_request_carries() {
    answers_promptly_after(|client, fds| {
        send(client, b"rubbish", &[fds[0]; 253]).unwrap();
    });
}

#[test]
fn nor_do_messages_that_nobody_reads() {
    answers_promptly_after(|client, fds| {
        send(client, b"rubbish", &[]).unwrap();
        for _ in 0..3 {
            // The server may have hung up by now.
            let _ = send(client, b"behind it", fds);
        }
    });
}

/// A program's connection goes on when hundreds of its user's end.
#[test]
fn nor_do_they_end_the_connections_of_others_of_their_user() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    as_nobody(|| {
        let mut client = Client::connect(&path);
        let memory = memfd_create("shown", MemfdFlags::CLOEXEC).unwrap();
        let probe = encode(&Request {
            id: 1,
            body: RequestBody::Probe,
        });
        for _ in 0..20 {
            let others = idle(&path, 100);
            for other in &others {
                other.send(&probe, &[memory.as_fd()]).unwrap();
            }
            drop(others);
            let reply = client.ask(RequestBody::ReadStatus);
            assert!(matches!(reply, ReplyBody::Status(_)), "{reply:?}");
        }
    });
    assert_eq!(counter(&path, "server", "malformed_messages"), 0);
}

/// Descriptors queued in the far end before the server gets it would be closed by the reader of the queue.
#[test]
fn nor_do_descriptors_in_a_new_session() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let listener = bed
        .b
        .enter(|| TcpListener::bind(SocketAddr::new(Bed::B4, 0)))
        .unwrap();
    let (stream, _peer) = lingering();
    let (far, near) = unix::socket_pair(PairKind::Stream).unwrap();
    unix::send(&near, b"x", &[stream.as_fd()]).unwrap();
    drop(stream);
    let body = RequestBody::Connect {
        session: SessionRef::New,
        protocol: Protocol::Tcp,
        remote: listener.local_addr().unwrap(),
        slot: Slot(0),
        options: HandshakeOptions::default(),
        early: FastOpenMode::No,
    };
    let (reply, _) = hostile.client.ask_with(body, &[far.as_fd(), near.as_fd()]);
    drop(far);
    if let ReplyBody::Connecting { session, .. } = &reply {
        // The server reads it.
        await_some("the connection", || {
            let reader = Reader::Other;
            let session = *session;
            let relay = RequestBody::Relay { session, reader };
            let (reply, _) = hostile.client.ask_with(relay, &[near.as_fd()]);
            matches!(reply, ReplyBody::Relayed).then_some(())
        });
    }
    assert_prompt(&path);
    let is_refused = matches!(
        reply,
        ReplyBody::Error {
            errno: libc::EINVAL
        }
    );
    assert!(is_refused, "{reply:?}");
    victim.assert_unharmed();
}

/// Messages sent on a refused connection stay in its queue, and are closed with it.
#[test]
fn nor_do_messages_in_connections_that_are_refused() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let pid = Pid::from_raw(server.pid() as i32).unwrap();
    // The limit of one user.
    let _idle = as_nobody(|| idle(&path, 300));
    let streams: Vec<_> = (0..20).map(|_| lingering()).collect();
    // A client that gets an answer was accepted after them: the queue has room for the next ones.
    assert_prompt(&path);
    kill_process(pid, Signal::STOP).unwrap();
    as_nobody(|| {
        for (stream, _) in &streams {
            let client = Client::connect(&path);
            send(&client, b"before it is let in", &[stream.as_fd()]).unwrap();
        }
    });
    let _peers: Vec<TcpStream> = streams.into_iter().map(|(_, peer)| peer).collect();
    kill_process(pid, Signal::CONT).unwrap();
    assert_prompt(&path);
    victim.assert_unharmed();
}

/// The server reads a relayed session's descriptor, which takes no descriptors since Linux 6.16: else their last close would be
/// the server's.
#[test]
fn nor_do_descriptors_sent_to_a_relayed_session() {
    let bed = Bed::veth();
    let _server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let mut victim = Victim::start(&bed, &path);
    let mut hostile = hostile_library(&path);
    let (id, near, slot, mut peer) = open_to_b(&bed, &mut hostile);
    hostile.flush(id, slot, AfterFlush::Relay(Reader::Sender));
    let (stream, _peer) = lingering();
    let (reference, refuses) = unix::socket_pair(PairKind::Stream).unwrap();
    let has_option = unix::refuse_descriptors(&refuses);
    let sent = unix::send(&near.0, b"with", &[stream.as_fd()]);
    assert_eq!(sent.is_err(), has_option, "{sent:?}");
    drop((stream, reference));
    rustix::io::write(&near.0, b"without").unwrap();
    let mut heard = vec![0; if has_option { 7 } else { 11 }];
    std::io::Read::read_exact(&mut peer, &mut heard).unwrap();
    assert!(heard.ends_with(b"without"));
    victim.assert_unharmed();
}
