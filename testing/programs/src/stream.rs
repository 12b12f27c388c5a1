//! A connection on the kernel's stack to an echo server, with checks of the echo and of its end.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use portolan_bench::bed::{Bed, Side};

const SOON: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(20);

/// Connects from the client host, as soon as the server listens.
///
/// # Panics
/// If it does not listen in time.
pub fn connect(bed: &Bed, port: u16) -> TcpStream {
    let endpoint = bed.endpoint(port);
    let connected = bed.namespace(Side::Client).enter(|| {
        (0..100).find_map(|_| {
            let stream = TcpStream::connect(endpoint).ok();
            if stream.is_none() {
                std::thread::sleep(Duration::from_millis(50));
            }
            stream
        })
    });
    let stream = connected.expect("the server listens");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a time-out");
    stream
}

/// Likewise, if the server listens already.
///
/// # Panics
/// If it does not.
pub fn connect_once(bed: &Bed, port: u16) -> TcpStream {
    let endpoint = bed.endpoint(port);
    let stream = bed
        .namespace(Side::Client)
        .enter(|| TcpStream::connect_timeout(&endpoint, SOON))
        .expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("a time");
    stream
}

/// Sends a word and waits for its echo.
///
/// # Panics
/// If that is missing or differs.
pub fn assert_echoed(stream: &mut TcpStream, word: &[u8]) {
    stream.write_all(word).expect("it is connected");
    let mut answer = vec![0; word.len()];
    stream.read_exact(&mut answer).expect("it is connected");
    assert_eq!(answer, word);
}

/// Sends blocks in turn and waits for the echo of each.
///
/// # Panics
/// If an echo is missing or differs.
pub fn exchange(stream: &mut TcpStream, blocks: usize, size: usize) {
    for block in 0..blocks {
        let sent: Vec<u8> = (0..size).map(|i| (i * 7 + block) as u8).collect();
        stream.write_all(&sent).expect("it takes bytes");
        let mut got = vec![0; size];
        stream.read_exact(&mut got).expect("they come back");
        assert!(got == sent, "block {block} differs");
    }
}

/// Checks that an echo server serves the connection until the end.
///
/// # Panics
/// If it does not.
pub fn assert_served(mut stream: TcpStream) {
    exchange(&mut stream, 4, 5000);
    assert_ends_in_order(stream);
}

/// Shuts the connection down for sending, and checks that the server ends it.
///
/// # Panics
/// If it is reset, or if more data arrives.
pub fn assert_ends_in_order(mut stream: TcpStream) {
    stream.shutdown(Shutdown::Write).expect("connected");
    let rest = stream.read(&mut [0; 1]).expect("no reset");
    assert_eq!(rest, 0);
}
