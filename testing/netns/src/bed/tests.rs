//! The kernel's own TCP works over each kind of bed, with the requested faults.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use super::*;
use crate::daemon::{Daemon, Ready};

/// Sends `bytes` from `a` to `to` on `b` and back by the kernel's TCP.
fn echo(bed: &Bed, to: IpAddr, bytes: usize) {
    let listener = bed.b.enter(|| TcpListener::bind((to, 7)).unwrap());
    let sent: Vec<u8> = (0..bytes).map(|index| (index / 7) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = vec![0; bytes];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let mut stream = bed.a.enter(|| TcpStream::connect((to, 7)).unwrap());
        stream.write_all(&sent).unwrap();
        let mut received = vec![0; bytes];
        stream.read_exact(&mut received).unwrap();
        assert!(received == sent, "the bytes differ");
    });
}

#[test]
fn a_veth_bed_carries_both_families() {
    let bed = Bed::veth();
    echo(&bed, Bed::B4, 1_000_000);
    echo(&bed, Bed::B6, 1_000_000);
    assert_eq!(bed.counters(), Counters::default());
}

#[test]
fn beds_do_not_meet() {
    let beds = [Bed::veth(), Bed::veth()];
    let inodes = beds.each_ref().map(|bed| [bed.a.inode(), bed.b.inode()]);
    let mut all = inodes.concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4);
    for bed in &beds {
        echo(bed, Bed::B4, 1000);
    }
}

#[test]
fn an_impaired_bed_without_faults_carries_both_families() {
    let bed = Bed::impaired(Impairment::default());
    echo(&bed, Bed::B4, 10_000_000);
    echo(&bed, Bed::B6, 10_000_000);
    let counters = bed.counters();
    assert_eq!(counters.lost + counters.overflowed + counters.duplicated, 0);
    // Large frames were segmented: 20 MB in segments, twice.
    assert!(counters.forwarded > 40_000_000 / 1500, "{counters:?}");
}

#[test]
fn faults_hit_segments_and_tcp_survives_them() {
    let bed = Bed::impaired(Impairment {
        loss: 0.01,
        duplicate: 0.01,
        reorder: 0.01,
        delay: Duration::from_micros(500),
        ..Impairment::default()
    });
    echo(&bed, Bed::B4, 1_000_000);
    let counters = bed.counters();
    assert!(counters.lost > 3, "{counters:?}");
    assert!(counters.duplicated > 3, "{counters:?}");
    assert!(counters.reordered > 3, "{counters:?}");
}

#[test]
fn delay_shows_in_the_round_trip() {
    let delay = Duration::from_millis(20);
    let bed = Bed::impaired(Impairment {
        delay,
        ..Impairment::default()
    });
    let (a, b) = (SocketAddr::new(Bed::A4, 9), SocketAddr::new(Bed::B4, 9));
    let near = bed.a.enter(|| UdpSocket::bind(a).unwrap());
    let far = bed.b.enter(|| UdpSocket::bind(b).unwrap());
    far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    near.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let start = Instant::now();
    near.send_to(b"there", b).unwrap();
    far.recv(&mut [0; 8]).unwrap();
    far.send_to(b"back", a).unwrap();
    near.recv(&mut [0; 8]).unwrap();
    assert!(start.elapsed() >= 2 * delay);
}

#[test]
fn the_rate_bounds_a_transfer() {
    let bed = Bed::impaired(Impairment {
        rate: Some(80_000_000),
        ..Impairment::default()
    });
    let start = Instant::now();
    echo(&bed, Bed::B4, 1_000_000);
    // There and back at 10 MB/s, one after the other.
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[test]
fn a_daemon_in_a_host_is_ready_when_its_port_listens() {
    let bed = Bed::veth();
    let mut server = bed.b.exec("python3");
    server.args(["-m", "http.server", "8000"]);
    let _server = Daemon::start(server, Ready::TcpPort(8000));
    let mut stream = bed.a.enter(|| TcpStream::connect((Bed::B4, 8000)).unwrap());
    stream.write_all(b"HEAD / HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"));
}
