//! Programs that start and end in a loop: others start as usual, and nothing piles up.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use portolan_netns::Bed;
use portolan_proto::control::ReplyBody;
use portolan_sys::clock;

use crate::as_nobody;
use crate::common::{Client, Configuration, Library, control_path, start_server};
use crate::meter::Meter;

/// Number of concurrent attackers.
const LOOPS: usize = 4;

const ATTACK: Duration = Duration::from_secs(4);

/// Interval between starts of the victim.
const PAUSE: Duration = Duration::from_millis(100);

/// Starts measured before the attack.
const QUIET: usize = 20;

/// Lower bound of the limit under attack: the time without one may be shorter than a turn of the scheduler.
const PROMPT: Duration = Duration::from_millis(20);

/// Descriptors of the channels that one user may have, and of those made in advance.
const DESCRIPTORS: usize = 700;

/// Returns the time from `Hello` to the channel.
fn start(path: &Path) -> Duration {
    let start = clock::now();
    let _library = Library::start(path);
    clock::now().since(start)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns how often it was served.
pub(crate) fn start_and_leave(path: &Path, is_over: impl Fn() -> bool) -> u32 {
    let mut served = 0;
    while !is_over() {
        let mut client = Client::greeting(path);
        let (reply, _) = client.receive().unwrap();
        served += u32::from(matches!(reply.body, ReplyBody::Welcome { .. }));
    }
    served
}

#[test]
fn programs_that_come_and_go_in_a_loop_wait_for_themselves_only() {
    let bed = Bed::veth();
    let server = start_server(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let descriptors = || {
        let directory = format!("/proc/{}/fd", server.pid());
        std::fs::read_dir(directory).unwrap().count()
    };
    let paced = |_| {
        sleep(PAUSE);
        start(&path)
    };
    let quiet = median((0..QUIET).map(paced).collect());
    let before = descriptors();
    let stop = AtomicBool::new(false);
    let served = AtomicU32::new(0);
    let (times, most) = std::thread::scope(|scope| {
        for _ in 0..LOOPS {
            scope.spawn(|| {
                let is_over = || stop.load(Ordering::Relaxed);
                let count = as_nobody(|| start_and_leave(&path, is_over));
                served.fetch_add(count, Ordering::Relaxed);
            });
        }
        let begun = clock::now();
        let (mut times, mut most) = (Vec::new(), 0);
        while clock::now().since(begun) < ATTACK {
            times.push(paced(0));
            most = most.max(descriptors());
        }
        stop.store(true, Ordering::Relaxed);
        (times, most)
    });
    let under_attack = median(times.clone());
    eprintln!(
        "{quiet:?} quiet, {under_attack:?} under attack ({:?} at most), {} other starts, \
         {before} descriptors before, {most} at most",
        times.iter().max(),
        served.load(Ordering::Relaxed),
    );
    assert!(most < DESCRIPTORS, "{most} descriptors");
    assert!(
        under_attack < (2 * quiet).max(PROMPT),
        "{under_attack:?} instead of {quiet:?}"
    );
    // The programs in the loop are still served.
    assert!(served.load(Ordering::Relaxed) > 50);
    meter.finish_but_for_starts();
}

#[test]
fn who_has_no_room_but_its_own_leaving_programs_waits_for_them() {
    let bed = Bed::veth();
    let limits = "[limits]\nprocesses_per_user = 4";
    let _server = Configuration::new(&bed.a, limits).start(&bed.a);
    let path = control_path(&bed.a);
    let meter = Meter::start(&bed);
    let start = |_| {
        let mut client = Client::greeting(&path);
        let (reply, _) = client.receive().unwrap();
        matches!(reply.body, ReplyBody::Welcome { .. }).then_some(client)
    };
    // Each exits when it is served.
    let served = as_nobody(|| (0..60).filter_map(start).count());
    assert_eq!(served, 60);
    // Programs that stay are not waited for.
    let staying = as_nobody(|| (0..6).filter_map(start).collect::<Vec<_>>());
    assert_eq!(staying.len(), 4);
    meter.finish_but_for_starts();
}
