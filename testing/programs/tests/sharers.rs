//! UDP sockets that several processes share, by fork or by a message: all of them send and receive by the
//! same port.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use portolan_programs::{PYTHON, bed, eventually};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/sharers.py");
const PORT: u16 = 7060;

/// Returns the processes that have answered; sends datagrams until more than `count` are answered.
fn answers(bed: &Bed, count: usize) -> BTreeSet<String> {
    let here = (bed.client.address, 0);
    let client = bed
        .namespace(Side::Client)
        .enter(|| UdpSocket::bind(here))
        .expect("a socket");
    client
        .set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a time-out");
    let mut answered = Vec::new();
    let mut got = [0; 64];
    let all_came = eventually(Duration::from_secs(15), || {
        client.send_to(b"hello", bed.endpoint(PORT)).expect("sent");
        if let Ok((length, from)) = client.recv_from(&mut got) {
            assert_eq!(from, bed.endpoint(PORT));
            let text = String::from_utf8_lossy(&got[..length]);
            let pid = text.strip_prefix("hello ").expect("what was sent");
            answered.push(pid.to_owned());
        }
        answered.len() >= count
    });
    assert!(all_came, "{answered:?}");
    answered.into_iter().collect()
}

fn served(bed: &Bed, way: &str) -> BTreeSet<String> {
    let endpoint = bed.endpoint(PORT);
    let mut command = bed.command(Side::Server, Stack::Portolan, PYTHON);
    command
        .args([FIXTURE, way])
        .args([endpoint.ip().to_string(), endpoint.port().to_string()]);
    let _server = Background::start(&mut command).expect("it starts");
    answers(bed, 12)
}

#[test]
fn children_answer_on_a_socket_that_their_parent_bound() {
    for way in ["prefork", "used"] {
        for bed in [bed(), bed().over_ipv6()] {
            assert!(!served(&bed, way).is_empty(), "{way}");
        }
    }
}

#[test]
fn a_socket_outlives_the_process_that_bound_it() {
    for way in ["daemon", "closed"] {
        let bed = bed();
        assert_eq!(served(&bed, way).len(), 1, "{way}");
    }
}

#[test]
fn a_parent_that_waits_for_events_hears_of_what_comes_later() {
    assert_eq!(served(&bed(), "waiting").len(), 1);
}

#[test]
fn who_gets_a_socket_shares_it_with_who_had_it() {
    for way in ["sent", "spawned"] {
        let bed = bed();
        assert!(!served(&bed, way).is_empty(), "{way}");
    }
}
