//! Shares of a link (NE §5.1). Senders are processes that send as fast as possible; each one's arrivals are
//! recorded on the other host, by kernel sockets of a program with priority.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

use portolan_proto::qos::{QosRequest, Rate, Scope, Slack, Transmit};
use serde::Deserialize;

use super::super::{Better, Case};
use crate::bed::{Bed, INTERFACE, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7300;
/// The port that the sender with the tag of a flood sends to, so that its losses count separately.
const FLOOD_PORT: u16 = 7301;
const FLOOD: u16 = 100;

/// The window over which bandwidths are integrated (NE §5.1).
const WINDOW: Duration = Duration::from_millis(200);
/// The period of every guarantee.
const PERIOD: Duration = Duration::from_millis(100);
/// A part of a period, for the time at which a guarantee begins to hold.
const FINE: Duration = Duration::from_millis(20);

/// The share of a guarantee that must arrive for it to count as reached.
const REACHED: f64 = 0.97;

/// Wire bytes per payload byte of a stream: full segments with timestamps.
const STREAM_OVERHEAD: f64 = 1514.0 / 1448.0;

pub(crate) const MEGABIT: u64 = 1_000_000;

/// How long processes may take to register and to connect before they send.
const SETTLE: Duration = Duration::from_millis(500);

/// How late a recording may end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Time after the first byte that is not measured, because of accumulated bursts.
const WARM_UP: Duration = Duration::from_millis(600);

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let ethernet = Link::new(100 * MEGABIT);
    let mut cases = vec![
        shares(&ethernet, effort),
        means(&ethernet, effort),
        joins(&ethernet, effort),
        slack_use(&ethernet, effort),
        smoothness(&ethernet, effort),
    ];
    for (name, megabits) in [("qos-1g", 1_000), ("qos-5g", 5_000)] {
        let link = Link::new(megabits * MEGABIT);
        cases.push(mixed_error(name, &link, effort));
        cases.push(mixed_drops(name, &link, effort));
    }
    cases
}

/// Fig. 5 (a): each window of each sender.
fn shares(link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    Case::of_portolan("ne-fig5a-worst-share-error", "", Better::Lower, move |_| {
        let shares = Shares::measure(&link, effort)?;
        Ok(worst(shares.errors_of_windows()))
    })
    .with_bar(0.03)
    .of_paper("stable, in proportion")
}

/// Fig. 5 (a): each sender's mean.
fn means(link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    Case::of_portolan("ne-fig5a-worst-mean-error", "", Better::Lower, move |_| {
        let shares = Shares::measure(&link, effort)?;
        Ok(worst(shares.errors_of_means()))
    })
    .with_bar(0.03)
    .of_paper("stable, in proportion")
}

/// Fig. 5 (b): the time that a stream needs to reach its guarantee after it joined.
fn joins(link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    let name = "ne-fig5b-worst-join-periods";
    Case::of_portolan(name, "periods", Better::Lower, move |_| {
        Ok(worst(Joins::measure(&link, effort)?.periods()))
    })
    .with_bar(1.0)
    .of_paper("at once")
}

/// Fig. 5 (b): the first sender's share of the capacity that is not guaranteed.
fn slack_use(link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    Case::of_portolan("ne-fig5b-slack-use", "", Better::Higher, move |_| {
        Ok(Joins::measure(&link, effort)?.slack_use())
    })
    .with_bar(0.95)
    .of_paper("the rest of the line")
}

/// Fig. 6: two senders without guarantees, beside two on the kernel's stack on the same link.
fn smoothness(link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    let duration = Duration::from_secs_f64(effort.scaled(6.0));
    let measure = move |_: &Bed, stack| {
        let traces = best_effort(&link, stack, duration)?;
        Ok(worst((1..=2).map(|tag| variation(traces.steady(tag)))))
    };
    Case::new("ne-fig6-smoothness", "cv", Better::Lower, measure)
        .of_paper("46.1 Mb/s, smoother than Linux 2.0 at 44.1")
}

/// Measures two senders, with the tags 1 and 2, without guarantees.
pub(crate) fn best_effort(
    link: &Link,
    stack: Stack,
    duration: Duration,
) -> Result<Traces, MeasureError> {
    let mut run = Run::on(link, Plan::at_once(duration))?;
    for tag in 1..=2 {
        run.add(stack, "udp", tag)?;
    }
    run.record()
}

/// How well guarantees of streams and datagrams are kept beside a flood without a guarantee.
fn mixed_error(name: &str, link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    let name = format!("{name}-worst-guarantee-error");
    Case::of_portolan(name, "", Better::Lower, move |_| {
        let mixed = Mixed::measure(&link, effort)?;
        Ok(worst(mixed.errors()))
    })
    .with_bar(0.05)
}

/// How much of the guaranteed traffic is lost.
fn mixed_drops(name: &str, link: &Rc<Link>, effort: Effort) -> Case {
    let link = Rc::clone(link);
    let name = format!("{name}-drops-of-guaranteed");
    Case::of_portolan(name, "packets", Better::Lower, move |_| {
        Ok(Mixed::measure(&link, effort)?.traces.drops() as f64)
    })
    .with_bar(0.0)
}

/// Six senders with 4, 8 … 24 ms in each 100 ms.
pub(crate) struct Shares {
    link: u64,
    pub(crate) traces: Traces,
}

impl Shares {
    pub(crate) const COUNT: u16 = 6;

    fn measure(link: &Link, effort: Effort) -> Result<Shares, MeasureError> {
        Shares::measure_on(link, Stack::Portolan, effort)
    }

    /// Measures on either stack; on the kernel's, the senders have no guarantees.
    pub(crate) fn measure_on(
        link: &Link,
        stack: Stack,
        effort: Effort,
    ) -> Result<Shares, MeasureError> {
        let duration = Duration::from_secs_f64(effort.scaled(8.0));
        let mut run = Run::on(link, Plan::at_once(duration))?;
        for tag in 1..=Shares::COUNT {
            run.add_on(stack, tag, slice(4 * u32::from(tag)))?;
        }
        let traces = run.record()?;
        Ok(Shares {
            link: link.rate,
            traces,
        })
    }

    /// Returns the bytes that a sender should have in each window.
    fn share(&self, tag: u16) -> f64 {
        bytes(self.link * 4 * u64::from(tag) / 100, WINDOW)
    }

    pub(crate) fn errors_of_windows(&self) -> impl Iterator<Item = f64> {
        (1..=Shares::COUNT).flat_map(|tag| {
            let (windows, share) = (self.traces.steady(tag), self.share(tag));
            let errors = windows.iter().map(move |window| error(*window, share));
            // A sender without arrivals had none of its share.
            errors.chain(windows.is_empty().then_some(1.0))
        })
    }

    fn errors_of_means(&self) -> impl Iterator<Item = f64> {
        (1..=Shares::COUNT).map(|tag| error(mean(self.traces.steady(tag)), self.share(tag)))
    }
}

/// One sender without a guarantee, which others with 6, 7 … 9 ms join one after the other.
pub(crate) struct Joins {
    link: u64,
    every: Duration,
    pub(crate) traces: Traces,
}

impl Joins {
    /// A tag that [`Shares`] does not use: the kernel may still deliver data of its senders here.
    pub(crate) const SLACK_USER: u16 = 10;
    pub(crate) const FIRST_MS: u32 = 6;
    pub(crate) const LAST_MS: u32 = 9;

    pub(crate) fn tag(slice_ms: u32) -> u16 {
        Joins::SLACK_USER + slice_ms as u16
    }

    fn measure(link: &Link, effort: Effort) -> Result<Joins, MeasureError> {
        Joins::measure_on(link, Stack::Portolan, effort)
    }

    /// Measures on either stack; on the kernel's, the senders have no guarantees.
    pub(crate) fn measure_on(
        link: &Link,
        stack: Stack,
        effort: Effort,
    ) -> Result<Joins, MeasureError> {
        let every = Duration::from_secs_f64(if effort.quick { 1.0 } else { 5.0 });
        let plan = Plan {
            duration: every * (2 + Joins::LAST_MS - Joins::FIRST_MS),
            window: FINE,
            every,
        };
        let mut run = Run::on(link, plan)?;
        run.add(stack, "udp", Joins::SLACK_USER)?;
        for slice_ms in Joins::FIRST_MS..=Joins::LAST_MS {
            run.add_on(stack, Joins::tag(slice_ms), slice(slice_ms))?;
        }
        let traces = run.record()?;
        Ok(Joins {
            link: link.rate,
            every,
            traces,
        })
    }

    /// Returns, for each sender that joined, the periods from its first byte to the end of the first full one.
    pub(crate) fn periods(&self) -> impl Iterator<Item = f64> {
        (Joins::FIRST_MS..=Joins::LAST_MS).map(|slice_ms| {
            let full = bytes(self.link * u64::from(slice_ms) / 100, PERIOD);
            let parts = (PERIOD.as_nanos() / FINE.as_nanos()) as usize;
            let trace = self.traces.of(Joins::tag(slice_ms));
            let reached = trace
                .windows(parts)
                .position(|period| period.iter().sum::<f64>() >= REACHED * full);
            reached.map_or(f64::INFINITY, |at| 1.0 + at as f64 / parts as f64)
        })
    }

    /// Returns the share of the remaining capacity that the first sender used between the last join and the end.
    pub(crate) fn slack_use(&self) -> f64 {
        let guaranteed: u64 = (Joins::FIRST_MS..=Joins::LAST_MS).map(u64::from).sum();
        let rest = bytes(self.link * (100 - guaranteed) / 100, FINE);
        let trace = self.traces.of(Joins::SLACK_USER);
        let last = (self.every.as_nanos() / FINE.as_nanos()) as usize;
        // The last window is incomplete.
        let end = trace.len().saturating_sub(1);
        mean(&trace[end.saturating_sub(last * 3 / 4)..end]) / rest
    }
}

/// Guaranteed streams and datagrams, and a process that floods.
struct Mixed {
    link: u64,
    traces: Traces,
}

impl Mixed {
    fn measure(link: &Link, effort: Effort) -> Result<Mixed, MeasureError> {
        let duration = Duration::from_secs_f64(effort.scaled(5.0));
        let mut run = Run::on(link, Plan::at_once(duration))?;
        for ((protocol, rate), tag) in Mixed::guarantees(link.rate).into_iter().zip(1..) {
            run.add_guaranteed(protocol, tag, Rate::Bits(rate))?;
        }
        run.add(Stack::Portolan, "udp", FLOOD)?;
        Ok(Mixed {
            link: link.rate,
            traces: run.record()?,
        })
    }

    /// Protocol and rate of each sender, indexed by its tag less one. A program that sends each datagram by a separate
    /// call fills less than a tenth of a fast link.
    fn guarantees(link: u64) -> [(&'static str, u64); 4] {
        let (large, small) = (link * 30 / 100, link * 15 / 100);
        [
            ("tcp", large),
            ("tcp", small),
            ("udp", 100 * MEGABIT),
            ("udp", 50 * MEGABIT),
        ]
    }

    fn errors(&self) -> impl Iterator<Item = f64> {
        let guarantees = Mixed::guarantees(self.link).into_iter().zip(1..);
        guarantees.map(|((protocol, rate), tag)| {
            let overhead = match protocol {
                "tcp" => STREAM_OVERHEAD,
                _ => 1.0,
            };
            let arrived = mean(self.traces.steady(tag)) * overhead;
            error(arrived, bytes(rate, WINDOW))
        })
    }
}

/// A bed whose device has a configured rate, made at the first use.
pub(crate) struct Link {
    rate: u64,
    bed: OnceCell<Bed>,
}

impl Link {
    pub(crate) fn new(rate: u64) -> Rc<Link> {
        let bed = OnceCell::new();
        Rc::new(Link { rate, bed })
    }

    fn bed(&self) -> Result<&Bed, MeasureError> {
        if let Some(bed) = self.bed.get() {
            return Ok(bed);
        }
        let mut bed = Bed::bare(portolan_netns::Bed::veth())?;
        let rate = self.rate;
        bed.set_settings(&format!(
            "[[qos.link]]\ndevice = \"{INTERFACE}\"\nrate = \"{rate}bit\"\n"
        ));
        bed.start_daemon(Side::Client)?;
        // Packets sent before the neighbour is resolved may be lost, as with the kernel's stack.
        let neighbour = bed.server.address.to_string();
        run(bed
            .namespace(Side::Client)
            .exec("ping")
            .args(["-c", "1", &neighbour]))?;
        Ok(self.bed.get_or_init(|| bed))
    }
}

fn reserve(bed: &Bed, scope: Scope, rate: Rate) -> Result<(), MeasureError> {
    let spec = Transmit {
        device: None,
        rate,
        burst: None,
        slack: Slack::None,
    };
    bed.ask_qos(Side::Client, QosRequest::Transmit { scope, spec })?;
    Ok(())
}

fn slice(slice_ms: u32) -> Rate {
    Rate::Slice {
        slice_us: slice_ms * 1000,
        period_us: PERIOD.as_micros() as u32,
    }
}

/// Senders on the client host, which wait, and their receivers on the other host.
struct Run<'a> {
    bed: &'a Bed,
    plan: Plan,
    gauge: Background,
    /// Receives the flood, which is not recorded.
    _sink: Background,
    senders: Vec<Background>,
}

/// Duration of the recording, length of its windows, and interval between the starts of senders.
#[derive(Clone, Copy)]
struct Plan {
    duration: Duration,
    window: Duration,
    every: Duration,
}

impl Plan {
    fn at_once(duration: Duration) -> Plan {
        Plan {
            duration,
            window: WINDOW,
            every: Duration::ZERO,
        }
    }
}

impl<'a> Run<'a> {
    fn on(link: &'a Link, plan: Plan) -> Result<Run<'a>, MeasureError> {
        let bed = link.bed()?;
        Ok(Run {
            bed,
            plan,
            gauge: receiver(bed, PORT, plan)?,
            _sink: receiver(bed, FLOOD_PORT, plan)?,
            senders: Vec::new(),
        })
    }

    /// Starts a sender, which waits, and returns its process ID.
    fn add(&mut self, stack: Stack, protocol: &str, tag: u16) -> Result<u32, MeasureError> {
        let port = if tag == FLOOD { FLOOD_PORT } else { PORT };
        let to = self.bed.endpoint(port).to_string();
        let tag = tag.to_string();
        let mut command = self.bed.command(Side::Client, stack, "portolan-traffic");
        command.args(["pour", protocol, &to, "--tag", &tag]);
        command.args(["--seconds", "600", "--gate"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let sender = Background::start_with_output(&mut command)?;
        let pid = sender.pid();
        self.senders.push(sender);
        Ok(pid)
    }

    /// Adds a sender of datagrams, with a guarantee if the stack has guarantees.
    fn add_on(&mut self, stack: Stack, tag: u16, rate: Rate) -> Result<(), MeasureError> {
        match stack {
            Stack::Kernel => self.add(stack, "udp", tag).map(drop),
            Stack::Portolan => self.add_guaranteed("udp", tag, rate),
        }
    }

    /// Adds a sender with a guarantee.
    fn add_guaranteed(&mut self, protocol: &str, tag: u16, rate: Rate) -> Result<(), MeasureError> {
        let pid = self.add(Stack::Portolan, protocol, tag)?;
        reserve(self.bed, Scope::Process { pid }, rate)
    }

    /// Has all senders send, and returns the recording.
    fn record(mut self) -> Result<Traces, MeasureError> {
        sleep(SETTLE);
        for sender in &mut self.senders {
            sender.end_input();
            sleep(self.plan.every);
        }
        self.gauge.wait(self.plan.duration + TIMEOUT);
        let path = self.bed.file(&output_of(PORT));
        let text = fs::read_to_string(&path).map_err(|source| unreadable(path, source))?;
        let traces = serde_json::from_str::<Traces>(&text);
        let traces = traces.map_err(|_| MeasureError::Output {
            program: "portolan-traffic",
            output: text,
        })?;
        Ok(Traces {
            dropped: dropped(self.bed)?,
            ..traces
        })
    }
}

/// Returns the packets that the classes of all reservations have dropped.
fn dropped(bed: &Bed) -> Result<u64, MeasureError> {
    let output = bed.portolan(Side::Client, &["qos", "show", "--json"])?;
    let report = serde_json::from_str::<serde_json::Value>(&output);
    let classes = report
        .ok()
        .and_then(|report| Some(report.get("transmit")?.as_array()?.clone()));
    let drops = |class: &serde_json::Value| class["traffic"]["drops"].as_u64();
    classes
        .and_then(|classes| classes.iter().map(drops).sum())
        .ok_or(MeasureError::Output {
            program: "portolan",
            output,
        })
}

fn receiver(bed: &Bed, port: u16, plan: Plan) -> Result<Background, MeasureError> {
    let path = bed.file(&output_of(port));
    let output = File::create(&path).map_err(|source| unreadable(path, source))?;
    let address = bed.endpoint(port).to_string();
    let seconds = plan.duration.as_secs_f64().to_string();
    let window = plan.window.as_millis().to_string();
    let arguments = [
        "gauge",
        &address,
        "--seconds",
        &seconds,
        "--window-ms",
        &window,
    ];
    Ok(bed.observe(port, &arguments, output)?)
}

fn output_of(port: u16) -> String {
    format!("gauge-{port}.json")
}

fn unreadable(path: PathBuf, source: std::io::Error) -> MeasureError {
    let path = path.display().to_string();
    MeasureError::File { path, source }
}

/// The receiver's recording.
#[derive(Deserialize)]
pub(crate) struct Traces {
    pub(crate) window_ms: u64,
    senders: Vec<Trace>,
    /// Packets dropped by the classes of guaranteed senders.
    #[serde(skip)]
    dropped: u64,
}

#[derive(Clone, Deserialize)]
struct Trace {
    tag: u16,
    bytes: Vec<f64>,
    lost: u64,
    first_ms: f64,
}

impl Traces {
    /// Returns the seconds and Mb/s of a sender's arrivals in each whole window, including those before its first byte.
    pub(crate) fn bandwidth(&self, tag: u16) -> Vec<(f64, f64)> {
        let window = self.window_ms as f64 / 1e3;
        let trace = self.senders.iter().find(|sender| sender.tag == tag);
        let whole = trace.map_or(&[][..], |trace| {
            &trace.bytes[..trace.bytes.len().saturating_sub(1)]
        });
        let point =
            |(number, bytes): (usize, &f64)| (number as f64 * window, bytes * 8.0 / window / 1e6);
        whole.iter().enumerate().map(point).collect()
    }

    /// Returns a sender's arrivals from its first byte on.
    fn of(&self, tag: u16) -> &[f64] {
        let trace = self.senders.iter().find(|sender| sender.tag == tag);
        trace.map_or(&[], |trace| {
            let first = (trace.first_ms / self.window_ms as f64) as usize;
            &trace.bytes[first.min(trace.bytes.len())..]
        })
    }

    /// Returns a sender's arrivals without the warm-up, and without the last window, which is incomplete.
    pub(crate) fn steady(&self, tag: u16) -> &[f64] {
        let trace = self.of(tag);
        let first = WARM_UP.as_millis() as usize / self.window_ms as usize;
        let end = trace.len().saturating_sub(1);
        &trace[first.min(end)..end]
    }

    /// Returns the packets that were dropped, or the datagrams that did not arrive.
    fn drops(&self) -> u64 {
        let lost: u64 = self.senders.iter().map(|sender| sender.lost).sum();
        self.dropped.max(lost)
    }
}

/// Returns the bytes of a rate in a time.
fn bytes(bits_per_second: u64, time: Duration) -> f64 {
    bits_per_second as f64 / 8.0 * time.as_secs_f64()
}

/// Returns the relative error; one if there are no bytes.
fn error(bytes: f64, share: f64) -> f64 {
    (bytes / share - 1.0).abs()
}

pub(crate) fn worst(errors: impl Iterator<Item = f64>) -> f64 {
    errors.fold(0.0, f64::max)
}

pub(crate) fn mean(windows: &[f64]) -> f64 {
    windows.iter().sum::<f64>() / windows.len().max(1) as f64
}

/// Returns the coefficient of variation; one for a sender that sent nothing.
pub(crate) fn variation(windows: &[f64]) -> f64 {
    let mean = mean(windows);
    if mean == 0.0 {
        return 1.0;
    }
    let squares: f64 = windows.iter().map(|bytes| (bytes - mean).powi(2)).sum();
    (squares / windows.len() as f64).sqrt() / mean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces(bytes: &[f64]) -> Traces {
        let sender = Trace {
            tag: 1,
            bytes: bytes.to_vec(),
            lost: 0,
            first_ms: 250.0,
        };
        Traces {
            window_ms: 200,
            senders: vec![sender],
            dropped: 0,
        }
    }

    #[test]
    fn a_trace_is_steady_after_its_beginning_and_before_its_end() {
        let traces = traces(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(traces.of(1), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(traces.steady(1), [4.0, 5.0]);
        assert!(traces.of(2).is_empty());
        assert!(traces.steady(2).is_empty());
    }

    #[test]
    fn bandwidth_is_that_of_whole_windows() {
        let traces = traces(&[0.0, 25_000.0, 1.0]);
        assert_eq!(traces.bandwidth(1), [(0.0, 0.0), (0.2, 1.0)]);
        assert!(traces.bandwidth(2).is_empty());
    }

    #[test]
    fn a_sender_of_whom_nothing_came_is_wrong_by_all_of_its_share() {
        let shares = Shares {
            link: 100 * MEGABIT,
            traces: traces(&[0.0; 9]),
        };
        assert_eq!(worst(shares.errors_of_windows()), 1.0);
        assert_eq!(worst(shares.errors_of_means()), 1.0);
    }

    #[test]
    fn what_varies_not_is_smooth() {
        assert_eq!(variation(&[3.0, 3.0]), 0.0);
        assert_eq!(variation(&[2.0, 4.0]), 1.0 / 3.0);
        assert_eq!(variation(&[]), 1.0);
    }
}
