//! Measures how another user fares during an attack. A thread samples the actions of the victim's programs (round
//! trips, opens, starts) and the time the server takes to answer `status`, first without and then during the attack.
//! The 99th percentiles of the two are compared.
//!
//! Time for which the server or the sampler was runnable while other programs had the processors is not the server's,
//! and is subtracted.
//!
//! A sample that took long also counts for those that it has delayed: otherwise the sampler would see a server that
//! stands still for a second as one slow answer among hundreds.

use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use portolan_netns::Bed;
use portolan_proto::control::AfterFlush;
use portolan_sys::descriptor;
use portolan_types::Slot;
use rustix::net::sockopt;
use rustix::process::Uid;

use crate::common::{Client, Library, Near, control_path};
use crate::{PROMPT, TIMEOUT, echo, status};

/// Not the attacker, and without root's reserves.
pub(crate) const VICTIM: u32 = 60_001;

/// Duration of the measurement before the attack.
const QUIET: Duration = Duration::from_millis(400);

/// More descriptors than any test opens meanwhile.
const DESCRIPTOR_TABLE: u64 = 1 << 14;

/// The measured user, and the duration of the measurement before the attack.
struct Plan {
    uid: u32,
    quiet: Duration,
}

/// Interval between rounds of samples; a sample that took longer counts for several.
const INTERVAL: Duration = Duration::from_millis(5);

/// Programs do not start more often than this: each makes the server prepare a channel.
const BETWEEN_STARTS: Duration = Duration::from_millis(100);

/// The 99th percentile of fewer is that of two or three.
const STARTS_TO_JUDGE: usize = 1000;

/// Minimum during an attack, however short: the work that it leaves behind belongs to it.
const LEAST_ROUNDS: usize = 20;

/// What is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// Two threads of this process wake each other: measures the machine's lateness, whatever the server does.
    Machine,
    Status,
    RoundTrip,
    Open,
    Start,
}

impl Probe {
    const ALL: [Probe; 5] = [
        Probe::Machine,
        Probe::Status,
        Probe::RoundTrip,
        Probe::Open,
        Probe::Start,
    ];

    /// Times that are harmless, even if more than twice those without an attack. Those are 0.1 to 2 ms on an idle
    /// machine, but the kernel works at times of its own: softirq work of other tests' traffic occupies one of two
    /// processors for some milliseconds, and a start without a ready channel waits for the lock of the network
    /// configuration (rtnl), which the removal of other tests' namespaces holds for up to 200 ms. The defects to be
    /// found took 250 ms to minutes, and starts 2 to 7 s.
    fn floor(self) -> Duration {
        Duration::from_millis(match self {
            Probe::Machine | Probe::Status => 0,
            Probe::RoundTrip => 10,
            Probe::Open => 20,
            Probe::Start => 250,
        })
    }

    /// Returns the number of consecutive wake-ups it takes, each of which is as late as the machine is.
    fn wake_ups(self) -> u32 {
        match self {
            Probe::Machine | Probe::Status | Probe::RoundTrip => 1,
            Probe::Open | Probe::Start => 3,
        }
    }
}

/// Samples of each probe.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples([Vec<Duration>; Probe::ALL.len()]);

impl Samples {
    fn add(&mut self, probe: Probe, took: Duration) {
        let mut left = took;
        let samples = &mut self.0[probe as usize];
        samples.push(left);
        let interval = match probe {
            Probe::Start => BETWEEN_STARTS,
            _ => INTERVAL,
        };
        while left > interval {
            left -= interval;
            samples.push(left);
        }
    }

    fn rounds(&self) -> usize {
        self.0[Probe::Status as usize].len()
    }

    fn p99(&self, probe: Probe) -> Duration {
        percentile(&self.0[probe as usize], 99)
    }
}

/// At least one of several samples lies beyond it.
pub(crate) fn percentile(samples: &[Duration], percent: usize) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let beyond = (sorted.len() * (100 - percent)).div_ceil(100);
    let index = sorted.len().saturating_sub(1 + beyond);
    sorted.get(index).copied().unwrap_or_default()
}

/// Measurements without and during an attack.
pub(crate) struct Comparison {
    quiet: Samples,
    during: Samples,
}

impl Comparison {
    fn lateness(&self, probe: Probe) -> Duration {
        self.during.p99(Probe::Machine) * probe.wake_ups()
    }

    fn limit(&self, probe: Probe) -> Duration {
        self.lateness(probe)
            + match probe {
                Probe::Status => PROMPT,
                _ => (2 * self.quiet.p99(probe)).max(probe.floor()),
            }
    }

    fn harmed(&self) -> Vec<Probe> {
        let is_harmed = |probe: &Probe| self.during.p99(*probe) > self.limit(*probe);
        let probes = Probe::ALL.into_iter().filter(|p| *p != Probe::Machine);
        probes.filter(is_harmed).collect()
    }

    /// Opens may take `open`, plus the machine's lateness. Starts are not judged by a few.
    pub(crate) fn assert_unharmed_with_opens_of(&self, open: Duration) {
        let mut harmed = self.harmed();
        harmed.retain(|probe| match probe {
            Probe::Start => self.during.0[Probe::Start as usize].len() >= STARTS_TO_JUDGE,
            Probe::Open => self.during.p99(Probe::Open) > open + self.lateness(Probe::Open),
            _ => true,
        });
        assert!(harmed.is_empty(), "{harmed:?} of the victim:\n{self}");
    }

    fn assert_unharmed(&self) {
        let harmed = self.harmed();
        assert!(harmed.is_empty(), "{harmed:?} of the victim:\n{self}");
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for probe in Probe::ALL {
            let [quiet, during] = [&self.quiet, &self.during].map(|f| f.p99(probe));
            let count = self.during.0[probe as usize].len();
            let longest = percentile(&self.during.0[probe as usize], 100);
            writeln!(
                formatter,
                "{:10} p99 {quiet:10.2?} quiet, {during:10.2?} attacked (limit {:.2?}, {count} samples, \
                 at most {longest:.2?})",
                format!("{probe:?}"),
                self.limit(probe),
            )?;
        }
        Ok(())
    }
}

/// Another thread answers each byte.
pub(crate) struct Machine(UnixStream);

impl Machine {
    pub(crate) fn start() -> Machine {
        let (near, mut far) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut byte = [0];
            while far.read_exact(&mut byte).is_ok() && far.write_all(&byte).is_ok() {}
        });
        Machine(near)
    }

    pub(crate) fn ask(&mut self) {
        self.0.write_all(&[1]).unwrap();
        self.0.read_exact(&mut [0]).unwrap();
    }
}

/// How long a thread was runnable without running (`/proc/<pid>/task/<tid>/schedstat`).
struct RunDelay(File);

impl RunDelay {
    fn of(thread: &str) -> RunDelay {
        RunDelay(File::open(format!("/proc/{thread}/schedstat")).unwrap())
    }

    fn so_far(&self) -> Duration {
        let mut text = [0; 64];
        let length = self.0.read_at(&mut text, 0).unwrap();
        let text = std::str::from_utf8(&text[..length]).unwrap();
        let second = text.split_whitespace().nth(1).unwrap();
        Duration::from_nanos(second.parse().unwrap())
    }
}

/// Those of a server's main thread and of the thread that asks it.
pub(crate) struct RunDelays([RunDelay; 2]);

impl RunDelays {
    /// Returns those of the server that a client is connected to, and of this thread.
    pub(crate) fn with_server_of(client: &Client) -> RunDelays {
        let server = sockopt::socket_peercred(client).unwrap().pid;
        let server = server.as_raw_nonzero();
        RunDelays(
            [format!("{server}/task/{server}"), "thread-self".into()]
                .map(|thread| RunDelay::of(&thread)),
        )
    }

    fn so_far(&self) -> Duration {
        self.0.iter().map(RunDelay::so_far).sum()
    }

    /// Returns how long an action took, without the time for which others had the processors.
    pub(crate) fn without(&self, action: impl FnOnce() -> Duration) -> Duration {
        let before = self.so_far();
        let took = action();
        took.saturating_sub(self.so_far() - before)
    }
}

/// A user whose programs run during the attack.
struct Sampler {
    path: PathBuf,
    listener: TcpListener,
    machine: Machine,
    status: Client,
    library: Library,
    slot: Slot,
    _near: Near,
    peer: TcpStream,
    next_start: Instant,
}

impl Sampler {
    fn start(path: PathBuf, listener: TcpListener) -> Sampler {
        let mut library = Library::start(&path);
        let (_, near, slot) = library.open(listener.local_addr().unwrap());
        let (peer, _) = listener.accept().unwrap();
        peer.set_read_timeout(TIMEOUT).unwrap();
        Sampler {
            machine: Machine::start(),
            status: Client::connect(&path),
            path,
            listener,
            library,
            slot,
            _near: near,
            peer,
            next_start: Instant::now(),
        }
    }

    fn probe(&mut self, probe: Probe) -> Duration {
        let start = Instant::now();
        match probe {
            Probe::Machine => self.machine.ask(),
            Probe::Status => return status(&mut self.status),
            Probe::RoundTrip => echo(&mut self.library, self.slot, &mut self.peer, b"metered"),
            Probe::Open => return self.open(),
            Probe::Start => drop(Library::start(&self.path)),
        }
        start.elapsed()
    }

    /// Opens a connection and closes it; the close is not measured.
    fn open(&mut self) -> Duration {
        let start = Instant::now();
        let (id, near, slot) = self.library.open(self.listener.local_addr().unwrap());
        let took = start.elapsed();
        let (peer, _) = self.listener.accept().unwrap();
        self.library.flush(id, slot, AfterFlush::Close);
        drop(near);
        // With a reset, so that nothing stays in TIME-WAIT.
        sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        took
    }

    /// Takes one sample of each, then pauses.
    fn round(&mut self, delays: &RunDelays, figures: &mut Samples) {
        let start = Instant::now();
        for probe in Probe::ALL {
            if probe == Probe::Start {
                if start < self.next_start {
                    continue;
                }
                self.next_start = start + BETWEEN_STARTS;
            }
            let took = match probe {
                Probe::Machine => self.probe(probe),
                _ => delays.without(|| self.probe(probe)),
            };
            figures.add(probe, took);
        }
        thread::sleep(INTERVAL.saturating_sub(start.elapsed()));
    }
}

/// Does a meter measure?
static MEASURES: Mutex<bool> = Mutex::new(false);
static MEASURED: Condvar = Condvar::new();

/// Held while a meter measures: tests with one do not disturb each other.
struct Alone;

impl Alone {
    fn wait() -> Alone {
        // Another test that failed has nothing to do with this one.
        let measures = MEASURES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut measures = MEASURED
            .wait_while(measures, |measures| *measures)
            .unwrap_or_else(PoisonError::into_inner);
        *measures = true;
        Alone
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        *MEASURES.lock().unwrap_or_else(PoisonError::into_inner) = false;
        MEASURED.notify_one();
    }
}

/// Measures until it is finished.
pub(crate) struct Meter {
    _alone: Alone,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Comparison>>,
}

impl Meter {
    /// Starts with a victim of its own user on host `a`, whose server runs. Returns after the measurement before the
    /// attack.
    pub(crate) fn start(bed: &Bed) -> Meter {
        let quiet = QUIET;
        Meter::start_with(bed, Plan { uid: VICTIM, quiet })
    }

    /// Likewise, with a longer measurement before the attack.
    pub(crate) fn start_slowly(bed: &Bed, quiet: Duration) -> Meter {
        Meter::start_with(bed, Plan { uid: VICTIM, quiet })
    }

    /// Starts with root as the victim, where others may take everything but root's reserve.
    pub(crate) fn start_as_root(bed: &Bed) -> Meter {
        let quiet = QUIET;
        Meter::start_with(bed, Plan { uid: 0, quiet })
    }

    fn start_with(bed: &Bed, Plan { uid, quiet }: Plan) -> Meter {
        let alone = Alone::wait();
        // All threads wait while this process's table grows: a test that opens hundreds would measure the kernel.
        descriptor::widen_table(DESCRIPTOR_TABLE).unwrap();
        let path = control_path(&bed.a);
        let address = SocketAddr::new(Bed::B4, 0);
        let listener = bed.b.enter(|| TcpListener::bind(address)).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let (is_quiet_known, quiet_is_known) = mpsc::channel();
        let end = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let user = Some(Uid::from_raw(uid));
            rustix::thread::set_thread_res_uid(user, user, user).expect("root may");
            let mut sampler = Sampler::start(path, listener);
            let delays = RunDelays::with_server_of(&sampler.status);
            let mut before = Samples::default();
            let start = Instant::now();
            while start.elapsed() < quiet {
                sampler.round(&delays, &mut before);
            }
            // Fails only if the test has failed.
            let _ = is_quiet_known.send(());
            let mut during = Samples::default();
            while !end.load(Ordering::Relaxed) || during.rounds() < LEAST_ROUNDS {
                sampler.round(&delays, &mut during);
            }
            Comparison {
                quiet: before,
                during,
            }
        });
        let mut meter = Meter {
            _alone: alone,
            is_over,
            thread: Some(thread),
        };
        if quiet_is_known.recv().is_err() {
            meter.compare();
        }
        meter
    }

    /// Ends the measurement; fails if the attack has harmed the victim.
    pub(crate) fn finish(self) {
        let comparison = self.compared();
        eprintln!("{comparison}");
        comparison.assert_unharmed();
    }

    /// The same where the attack has nothing to do with starts: those wait for the kernel, too, wherever others make devices.
    pub(crate) fn finish_but_for_starts(self) {
        let comparison = self.compared();
        eprintln!("{comparison}");
        let mut harmed = comparison.harmed();
        harmed.retain(|probe| *probe != Probe::Start);
        assert!(harmed.is_empty(), "{harmed:?} of the victim:\n{comparison}");
    }

    /// The attack is over.
    pub(crate) fn compared(mut self) -> Comparison {
        self.compare()
    }

    /// Ends the thread; its failure fails the test.
    fn compare(&mut self) -> Comparison {
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it is ended once");
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The test has failed already.
            let _ = thread.join();
        }
    }
}

mod tests {
    use super::*;
    use crate::common::start_server;
    use rustix::process::{Pid, Signal, kill_process};

    #[test]
    fn a_server_that_stands_still_at_times_is_noticed() {
        let bed = Bed::veth();
        let server = start_server(&bed.a);
        let pid = Pid::from_raw(server.pid() as i32).unwrap();
        let mut meter = Meter::start(&bed);
        for _ in 0..5 {
            kill_process(pid, Signal::STOP).unwrap();
            thread::sleep(Duration::from_millis(250));
            kill_process(pid, Signal::CONT).unwrap();
            thread::sleep(Duration::from_millis(50));
        }
        let comparison = meter.compare();
        let harmed = comparison.harmed();
        // Which of its requests a pulse hits is random, but the sampler spends most of its time on them.
        assert!(!harmed.is_empty(), "{comparison}");
        // Data flows without the server.
        assert!(!harmed.contains(&Probe::RoundTrip), "{comparison}");
    }

    #[test]
    fn a_server_that_nobody_attacks_is_not() {
        let bed = Bed::veth();
        let _server = start_server(&bed.a);
        let meter = Meter::start(&bed);
        thread::sleep(Duration::from_millis(500));
        meter.finish();
    }

    #[test]
    fn a_long_sample_stands_for_those_that_were_not_taken() {
        let mut figures = Samples::default();
        for _ in 0..1000 {
            figures.add(Probe::Status, Duration::from_millis(1));
        }
        figures.add(Probe::Status, Duration::from_secs(1));
        let p99 = figures.p99(Probe::Status);
        assert!(p99 > Duration::from_millis(900), "{p99:?}");
        assert_eq!(
            percentile(&[Duration::from_secs(1)], 99),
            Duration::from_secs(1)
        );
    }
}
