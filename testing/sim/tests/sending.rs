//! When segments are sent: probes of a lost tail, bursts that wait for larger ones, and windows of applications
//! that do not fill them.

use core::time::Duration;

use portolan_sim::{Pair, Side};
use portolan_tcp::{Config, Connection, EVENTS};

const MS: Duration = Duration::from_millis(1);

fn count(connection: &Connection, name: &str) -> u32 {
    let index = EVENTS.iter().position(|(known, _)| *known == name);
    connection.counts()[index.unwrap_or_else(|| panic!("nothing is called {name}"))]
}

fn established(delay: Duration) -> Pair {
    let mut pair = Pair::new(5, delay, &Config::default());
    pair.links(|link| link.rate = 10_000_000_000);
    pair.establish();
    pair.run_for(100 * MS);
    pair
}

fn write(pair: &mut Pair, count: usize) {
    let now = pair.now;
    assert_eq!(pair.a.tcp().send(now, &vec![7; count]), count);
    pair.flush(Side::A);
}

fn read(pair: &mut Pair) {
    let now = pair.now;
    let mut bytes = vec![0; 1 << 20];
    pair.b.tcp().recv(now, &mut bytes);
}

// RFC 8985 §7.2: PTO = min(PTO, RTO). On short paths the time-out expires before the delayed acknowledgement of a
// single segment is due.
#[test]
fn a_lost_segment_that_is_alone_is_probed_when_its_time_out_is_due() {
    let mut pair = established(MS);
    let before = pair.a.tcp().tcp_info();
    pair.a_to_b.loss = 1000;
    write(&mut pair, 1000);
    pair.a_to_b.loss = 0;
    pair.run_for(before.rto + 5 * MS);
    assert_eq!(pair.b.tcp().readable(), 1000);
    let a = pair.a.tcp();
    assert_eq!((count(a, "tail_probes"), count(a, "timeouts")), (1, 0));
    assert_eq!(a.tcp_info().backoff, 0);
    assert!(a.tcp_info().cwnd > a.tcp_info().mss);
}

#[test]
fn a_time_out_follows_a_probe_without_an_answer() {
    let mut pair = established(MS);
    let rto = pair.a.tcp().tcp_info().rto;
    pair.links(|link| link.loss = 1000);
    write(&mut pair, 1000);
    pair.run_for(2 * rto + 5 * MS);
    let a = pair.a.tcp();
    assert_eq!((count(a, "tail_probes"), count(a, "timeouts")), (1, 1));
}

#[test]
fn who_writes_all_the_time_learns_of_a_loss_no_later() {
    let mut pair = established(50 * MS);
    let rto = pair.a.tcp().tcp_info().rto;
    pair.links(|link| link.loss = 1000);
    let until = pair.now + rto + 20 * MS;
    while pair.now < until {
        write(&mut pair, 10);
        pair.run_for(20 * MS);
    }
    assert_eq!(count(pair.a.tcp(), "tail_probes"), 1);
}

// Linux's tcp_tso_should_defer: sending is not deferred for an acknowledgement that is two milliseconds away.
#[test]
fn the_first_window_leaves_whole_on_a_path_of_two_milliseconds() {
    let mut pair = established(MS);
    let mss = pair.a.tcp().tcp_info().mss;
    write(&mut pair, 60_000);
    assert_eq!(pair.a.tcp().tcp_info().unacknowledged, 10 * mss);
}

#[test]
fn a_small_part_of_a_window_does_not_wait_where_acknowledgements_are_far() {
    for delay in [MS, 20 * MS, 100 * MS] {
        let mut pair = established(delay);
        let mss = pair.a.tcp().tcp_info().mss;
        // Three quarters of the window, and shortly afterwards more than the rest.
        write(&mut pair, 8 * mss as usize);
        pair.run_for(MS / 10);
        write(&mut pair, 60_000);
        let figures = pair.a.tcp().tcp_info();
        assert_eq!(figures.unacknowledged, 10 * mss, "{delay:?}");
    }
}

#[test]
fn a_small_part_of_a_window_waits_for_an_acknowledgement_that_is_about_to_come() {
    let mut pair = established(MS / 10);
    let mss = pair.a.tcp().tcp_info().mss;
    write(&mut pair, 8 * mss as usize);
    pair.run_for(MS * 3 / 20);
    write(&mut pair, 60_000);
    assert_eq!(pair.a.tcp().tcp_info().unacknowledged, 8 * mss);
    pair.run_for(2 * MS);
    read(&mut pair);
    assert!(pair.a.tcp().tcp_info().bytes_acknowledged >= 20_000);
}

// Linux's tcp_cwnd_validate: in slow start the window grows to twice the maximum in flight in a round trip,
// however many acknowledgements arrive.
#[test]
fn the_window_of_an_application_that_does_not_fill_it_grows_to_twice_its_flights() {
    for segments in [8_u32, 12, 40] {
        let mut pair = established(10 * MS);
        pair.b.gro = false;
        let mss = pair.a.tcp().tcp_info().mss;
        for _ in 0..40 {
            write(&mut pair, (segments * mss) as usize);
            pair.run_for(100 * MS);
            read(&mut pair);
        }
        let cwnd = pair.a.tcp().tcp_info().cwnd / mss;
        assert!(
            (2 * segments - 1..=2 * segments + 1).contains(&cwnd),
            "{segments} segments at a time: {cwnd}"
        );
    }
}
