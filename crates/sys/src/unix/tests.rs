//! Messages arrive complete with their descriptors, or the receiver learns why not.

use std::os::fd::AsFd;

use super::*;
use crate::testing::last_close;

fn pair() -> (Connection, Connection) {
    let (a, b) = socket_pair(PairKind::SeqPacket).unwrap();
    (a.into(), b.into())
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir()
        .join(format!("portolan-unix-{}-{name}", std::process::id()))
        .join("nested/control")
}

#[test]
fn a_message_keeps_its_boundary_and_its_descriptors() {
    let (a, b) = pair();
    let (one, two) = socket_pair(PairKind::Stream).unwrap();
    a.send(b"first", &[one.as_fd(), two.as_fd()]).unwrap();
    a.send(b"second", &[]).unwrap();

    let mut buffer = [0; 64];
    let first = b.receive(&mut buffer).unwrap();
    assert_eq!(&buffer[..first.length], b"first");
    let cookies: Vec<u64> = first.fds.iter().map(|fd| cookie(fd).unwrap()).collect();
    assert_eq!(cookies, [cookie(&one).unwrap(), cookie(&two).unwrap()]);

    let second = b.receive(&mut buffer).unwrap();
    assert_eq!(&buffer[..second.length], b"second");
    assert!(second.fds.is_empty());
    assert_eq!(b.receive(&mut buffer).unwrap_err(), ReceiveError::Blocked);
}

#[test]
fn the_longest_control_message_passes() {
    let (a, b) = pair();
    let message = vec![7; portolan_proto::MAX_MESSAGE];
    a.send(&message, &[]).unwrap();
    let mut buffer = vec![0; message.len()];
    assert_eq!(b.receive(&mut buffer).unwrap().length, message.len());
    assert_eq!(buffer, message);
}

#[test]
fn a_message_longer_than_the_buffer_is_an_error() {
    let (a, b) = pair();
    a.send(&[1; 100], &[a.as_fd()]).unwrap();
    assert_eq!(
        b.receive(&mut [0; 99]).unwrap_err(),
        ReceiveError::Truncated
    );
}

#[test]
fn more_descriptors_than_allowed_are_not_sent() {
    let (a, _b) = pair();
    let fds = [a.as_fd(); MAX_FDS + 3];
    assert_eq!(a.send(b"x", &fds), Err(SendError::TooManyFds));
    assert_eq!(a.send(b"x", &fds[..MAX_FDS]), Ok(()));
}

#[test]
fn a_slow_reader_blocks_the_sender_until_it_reads() {
    let (a, b) = pair();
    let message = [0; 4096];
    while a.send(&message, &[]) != Err(SendError::Blocked) {}
    let mut buffer = [0; 4096];
    while b.receive(&mut buffer).is_ok() {}
    assert_eq!(a.send(&message, &[]), Ok(()));
}

#[test]
fn a_peer_that_has_gone_is_closed_on_both_calls() {
    let (a, b) = pair();
    last_close(b);
    assert_eq!(a.send(b"x", &[]), Err(SendError::Closed));
    assert_eq!(a.receive(&mut [0; 8]).unwrap_err(), ReceiveError::Closed);
}

#[test]
fn a_server_learns_who_connects() {
    let path = path("credentials");
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(listener.accept().unwrap_err(), AcceptError::Blocked);
    let client = Connection::connect(&path).unwrap();
    let (server, credentials) = listener.accept().unwrap();
    assert_eq!(credentials.pid, std::process::id());
    assert_eq!(credentials.uid, 0, "tests run as root");
    client.send(b"hello", &[]).unwrap();
    assert_eq!(server.receive(&mut [0; 8]).unwrap().length, 5);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_dead_servers_socket_is_replaced_and_a_live_one_is_not() {
    let path = path("leftover");
    assert_eq!(
        Connection::connect(&path).unwrap_err(),
        ConnectError::NoServer
    );
    let dead = Listener::bind(&path).unwrap();
    assert!(matches!(Listener::bind(&path), Err(BindError::InUse(_))));
    // A killed server does not unlink its path.
    let Listener { ref fd, .. } = dead;
    rustix::net::shutdown(fd, rustix::net::Shutdown::Both).unwrap();
    let live = Listener::bind(&path).unwrap();
    assert!(Connection::connect(&path).is_ok());
    drop(live);
}

#[test]
fn ends_of_a_pair_are_told_from_connections_and_other_sockets() {
    let (one, two) = socket_pair(PairKind::Stream).unwrap();
    assert!(is_pair_end(&one) && is_pair_end(&two));
    last_close(two);
    assert!(is_pair_end(&one), "also when the other end is closed");

    let path = path("pair-end");
    let listener = Listener::bind(&path).unwrap();
    let client = Connection::connect(&path).unwrap();
    let (server, _) = listener.accept().unwrap();
    assert!(!is_pair_end(&client) && !is_pair_end(&server) && !is_pair_end(&listener));
    assert!(!is_pair_end(
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap()
    ));
    assert!(!is_pair_end(std::fs::File::open("/dev/null").unwrap()));
}

#[test]
fn an_end_whose_peer_has_gone_is_empty_unless_the_peer_left_something() {
    for kind in [PairKind::Stream, PairKind::SeqPacket] {
        let (near, far) = socket_pair(kind).unwrap();
        assert!(is_empty(&far) && closes_at_once(&far));
        rustix::net::send(&near, b"left", SendFlags::empty()).unwrap();
        assert!(!is_empty(&far));
        last_close(near);
        assert!(!is_empty(&far));
    }
    let (near, far) = socket_pair(PairKind::Stream).unwrap();
    last_close(near);
    assert!(is_empty(&far));
    // An empty message may carry descriptors, and reads like the end.
    let (near, far) = socket_pair(PairKind::SeqPacket).unwrap();
    last_close(near);
    assert!(!is_empty(&far));
}

#[test]
fn another_file_in_a_sockets_place_stays() {
    let path = path("occupied");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "kept").unwrap();
    let refused = Listener::bind(&path).unwrap_err();
    assert!(matches!(refused, BindError::Occupied(_)), "{refused}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
    std::fs::remove_dir_all(path.ancestors().nth(2).unwrap()).unwrap();
}

/// Returns whether nothing is left of what `send` has sent; the peer has closed its end if `has_gone`.
fn is_all_discarded(has_gone: bool, send: impl FnOnce(&Connection)) -> bool {
    let (a, b) = pair();
    send(&a);
    if has_gone {
        last_close(a);
        return b.discard_unread();
    }
    let discarded = b.discard_unread();
    assert_eq!(a.send(b"more", &[]), Err(SendError::Closed));
    discarded
}

#[test]
fn all_is_discarded_but_what_carries_descriptors() {
    let empty = |from: &Connection| {
        rustix::net::send(from, b"", SendFlags::DONTWAIT).unwrap();
    };
    for has_gone in [false, true] {
        assert!(is_all_discarded(has_gone, |_| ()));
        assert!(is_all_discarded(has_gone, |from| {
            from.send(b"first", &[]).unwrap();
            empty(from);
            from.send(b"third", &[]).unwrap();
        }));
        let (shown, other) = socket_pair(PairKind::Stream).unwrap();
        assert!(!is_all_discarded(has_gone, |from| {
            empty(from);
            from.send(b"second", &[shown.as_fd()]).unwrap();
        }));
        // It was closed with the queue, and nobody had a copy.
        last_close(shown);
        assert!(has_hung_up(&other));
    }
}
