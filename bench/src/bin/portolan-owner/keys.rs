//! `get KEY` by UDP: a server on a socket, and a client of either that server or `values.c`.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::{Failure, TRIES, padded, print_median};

/// How long to wait for an answer before asking again, while the server may not run yet.
const TIMEOUT: Duration = Duration::from_millis(100);

/// How long an answer may take once the server runs: a busy machine is slow, but loses nothing.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Number of keys that are asked for in turn.
const KEYS: u32 = 1000;

pub(crate) fn serve(local: SocketAddr, count: u32) -> Result<(), Failure> {
    let values: HashMap<Vec<u8>, [u8; 32]> = (0..count)
        .map(|number| {
            let value = padded(&format!("v{number}"));
            (format!("k{number}").into_bytes(), value)
        })
        .collect();
    let socket = UdpSocket::bind(local)?;
    let mut buffer = [0; 2048];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        let key = buffer[..length].strip_prefix(b"get ");
        if let Some(value) = key.and_then(|key| values.get(key)) {
            socket.send_to(&[b"VALUE = ", value.as_slice()].concat(), from)?;
        }
    }
}

pub(crate) fn ask(remote: SocketAddr, count: u32) -> Result<(), Failure> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.connect(remote)?;
    // The last key is present once all are.
    for tries in 0.. {
        match ask_for(&socket, KEYS - 1) {
            Ok(()) => break,
            Err(failure) if tries == TRIES => return Err(failure),
            Err(_) => {}
        }
    }
    socket.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut times = Vec::new();
    for number in 0..count {
        let begun = Instant::now();
        ask_for(&socket, number % KEYS)?;
        times.push(begun.elapsed());
    }
    print_median(times);
    Ok(())
}

/// Asks for one key. Ignores late answers to earlier questions.
fn ask_for(socket: &UdpSocket, number: u32) -> Result<(), Failure> {
    let value = padded::<32>(&format!("v{number}"));
    let expected = [b"VALUE = ", value.as_slice()].concat();
    let mut answer = [0; 64];
    let question = format!("get k{number}");
    match socket.send(question.as_bytes()) {
        // Reports that the port was unreachable for an earlier datagram.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::thread::sleep(TIMEOUT);
            socket.send(question.as_bytes())?;
        }
        sent => drop(sent?),
    }
    while {
        let length = socket.recv(&mut answer)?;
        answer[..length] != expected[..]
    } {}
    Ok(())
}
