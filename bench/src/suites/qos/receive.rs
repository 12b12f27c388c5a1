//! The effect of an overloaded program on others: a consumer that falls behind (NE §5.2), and floods at one program's
//! port. Both programs are on the server host. The source's own cost is the same with and without the overload.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use portolan_proto::qos::{Kind, QosRequest, Receive, Scope};
use portolan_types::Protocol;

use super::super::{Better, Case, number};
use crate::bed::{Bed, INTERFACE, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const STEADY_PORT: u16 = 7320;
const BUSY_PORT: u16 = 7321;
const FLOODED_PORT: u16 = 7322;
const ECHO_PORT: u16 = 7323;

/// Rates of the two streams (NE §5.2), in full frames.
const STEADY_RATE: f64 = 40e6 / FRAME_BITS;
const BUSY_RATE: f64 = 45e6 / FRAME_BITS;
const FRAME_BITS: f64 = 1514.0 * 8.0;
const PAYLOAD: &str = "1472";

/// The busy consumer's work on a datagram while it falls behind, at which it receives a quarter of them. With a fifth
/// of that time it keeps up.
const OVERLOAD: Duration = Duration::from_millis(1);

/// Packets per second of a flood: limited, since its source shares this machine.
const FLOOD_RATE: f64 = 20_000.0;

/// A budget that suffices for the flooded program.
const BUDGET: Receive = Receive {
    packets: Some(1000),
    bits: None,
    burst_ms: 20,
    priority: None,
};

/// How long processes may take to register.
const SETTLE: Duration = Duration::from_millis(500);

const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = vec![
        overload(
            effort,
            "ne-fig7-goodput-kept",
            (Better::Higher, 0.98),
            8.0,
            Crosstalk::goodput,
        )
        .of_paper("all of it"),
        overload(
            effort,
            "ne-fig7-p99-ratio",
            (Better::Lower, 1.02),
            30.0,
            Crosstalk::p99,
        ),
        overload(
            effort,
            "ne-fig7-losses-of-others",
            (Better::Lower, 0.0),
            8.0,
            Crosstalk::losses,
        )
        .of_paper("none"),
    ];
    for kind in [Flood::Udp, Flood::Syn] {
        cases.push(flooded(effort, kind));
        cases.push(flooded_in_budget(effort, kind));
    }
    cases.push(flooded_delegate(effort));
    cases
}

/// Fig. 7: the steady consumer's throughput while the other falls behind, relative to when it does not.
fn overload(
    effort: Effort,
    name: &str,
    (better, bar): (Better, f64),
    seconds: f64,
    figure: fn(&Crosstalk) -> f64,
) -> Case {
    let seconds = effort.scaled(seconds).ceil();
    let measure = move |bed: &Bed, stack| Ok(figure(&Crosstalk::measure(bed, stack, seconds)?));
    Case::new(name, "", better, measure).with_bar(bar)
}

/// Two streams; the consumer of one falls behind in every other half-second.
struct Crosstalk {
    /// The steady consumer's datagrams per second while the other keeps up, and while it does not.
    goodput: [f64; 2],
    p99_us: [f64; 2],
    steady_lost: f64,
    busy_lost: f64,
}

impl Crosstalk {
    fn measure(bed: &Bed, stack: Stack, seconds: f64) -> Result<Crosstalk, MeasureError> {
        let [steady, busy] = overloaded(bed, stack, seconds)?;
        let of = |report: &str, path: &[&str]| number("portolan-traffic", report, path);
        let both = |field| -> Result<[f64; 2], MeasureError> {
            Ok([
                of(&steady, &["calm", field])?,
                of(&steady, &["busy", field])?,
            ])
        };
        Ok(Crosstalk {
            goodput: both("per_second")?,
            p99_us: both("p99_us")?,
            steady_lost: of(&steady, &["lost"])?,
            busy_lost: of(&busy, &["lost"])?,
        })
    }

    fn goodput(&self) -> f64 {
        self.goodput[1] / self.goodput[0]
    }

    fn p99(&self) -> f64 {
        self.p99_us[1] / self.p99_us[0]
    }

    /// The steady stream's losses. If the busy one lost nothing either, there was no overload.
    fn losses(&self) -> f64 {
        if self.busy_lost > 0.0 {
            self.steady_lost
        } else {
            f64::INFINITY
        }
    }
}

/// Returns the reports of the steady and the busy consumer after this time.
///
/// Each consumer has a core: they compete for the receive path only. The sources and the steady consumer have priority
/// over all other programs, as those with guarantees do (NE §5.1), and the busy one has the lowest: otherwise its
/// work would keep the kernel's packet-processing thread from its core.
pub(crate) fn overloaded(
    bed: &Bed,
    stack: Stack,
    seconds: f64,
) -> Result<[String; 2], MeasureError> {
    let mut steady = bed.command(Side::Server, stack, "chrt");
    steady.args(["--fifo", "1"]).arg(&bed.tools().traffic);
    let mut busy = bed.neighbour(stack, "chrt");
    busy.args(["--idle", "0"]).arg(&bed.tools().traffic);
    let consumers = [
        consumer(bed, steady, STEADY_PORT, seconds, Duration::ZERO)?,
        consumer(bed, busy, BUSY_PORT, seconds, OVERLOAD)?,
    ];
    sleep(SETTLE);
    let _sources = [
        source(bed, STEADY_PORT, STEADY_RATE, seconds)?,
        source(bed, BUSY_PORT, BUSY_RATE, seconds)?,
    ];
    Ok(consumers.map(|consumer| end(consumer, seconds)))
}

fn consumer(
    bed: &Bed,
    mut command: std::process::Command,
    port: u16,
    seconds: f64,
    work: Duration,
) -> Result<Background, MeasureError> {
    let (endpoint, seconds) = (bed.endpoint(port).to_string(), seconds.to_string());
    let work = work.as_micros().to_string();
    command.args(["take", &endpoint, "--seconds", &seconds, "--work-us", &work]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(Background::start_with_output(&mut command)?)
}

/// Starts a source that sends for longer than the consumers receive.
fn source(bed: &Bed, port: u16, rate: f64, seconds: f64) -> Result<Background, MeasureError> {
    let (endpoint, rate) = (bed.endpoint(port).to_string(), rate.to_string());
    let seconds = (seconds + 1.0).to_string();
    let mut command = bed.command(Side::Client, Stack::Kernel, "chrt");
    command.args(["--fifo", "2"]).arg(&bed.tools().traffic);
    command.args(["pace", &endpoint, "--rate", &rate, "--size", PAYLOAD]);
    command.args(["--seconds", &seconds]);
    Ok(Background::start(&mut command)?)
}

/// Waits for the program's end and returns its output.
fn end(mut consumer: Background, seconds: f64) -> String {
    consumer.wait(Duration::from_secs_f64(seconds) + TIMEOUT);
    consumer.finish()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flood {
    Udp,
    Syn,
}

impl Flood {
    fn name(self) -> &'static str {
        match self {
            Flood::Udp => "udp",
            Flood::Syn => "syn",
        }
    }

    fn scope(self) -> Scope {
        let protocol = match self {
            Flood::Udp => Protocol::Udp,
            Flood::Syn => Protocol::Tcp,
        };
        let port = FLOODED_PORT;
        Scope::Port { protocol, port }
    }

    /// Starts the program that is flooded.
    fn victim(self, bed: &Bed, stack: Stack) -> Result<Background, MeasureError> {
        let endpoint = bed.endpoint(FLOODED_PORT).to_string();
        let arguments = match self {
            Flood::Udp => vec!["take", &endpoint, "--seconds", "600"],
            Flood::Syn => vec!["greet", &endpoint],
        };
        Ok(bed.serve(stack, FLOODED_PORT, "portolan-traffic", &arguments)?)
    }

    /// Starts the flood, which in every other half-second goes to a station that does not exist.
    fn start(self, bed: &Bed, nobody: IpAddr) -> Result<Background, MeasureError> {
        let to = bed.endpoint(FLOODED_PORT).to_string();
        let nobody = SocketAddr::new(nobody, FLOODED_PORT).to_string();
        let rate = FLOOD_RATE.to_string();
        let mut command = bed.command(Side::Client, Stack::Kernel, "portolan-traffic");
        match self {
            Flood::Udp => command.args(["pace", &to, "--size", "64"]),
            Flood::Syn => command.args(["syns", &to]),
        };
        command.args(["--in-turn-with", &nobody, "--rate", &rate]);
        command.args(["--seconds", "60"]);
        Ok(Background::start(&mut command)?)
    }
}

/// Round trips of another program while one is flooded, relative to those while the same flood goes to a station that
/// does not exist, in alternation.
fn flooded(effort: Effort, kind: Flood) -> Case {
    let name = format!("flood-{}-p99-ratio", kind.name());
    let measure = move |bed: &Bed, stack| flood_ratio(bed, stack, kind, effort);
    Case::new(name, "", Better::Lower, measure).with_bar(1.2)
}

/// The same with a receive budget for the flooded port.
fn flooded_in_budget(effort: Effort, kind: Flood) -> Case {
    let name = format!("flood-{}-budget-p99-ratio", kind.name());
    let measure = move |bed: &Bed| {
        let scope = kind.scope();
        let spec = BUDGET;
        bed.ask_qos(Side::Server, QosRequest::Receive { scope, spec })?;
        let ratio = flood_ratio(bed, Stack::Portolan, kind, effort);
        let (scope, kind) = (kind.scope(), Kind::Receive);
        bed.ask_qos(Side::Server, QosRequest::Delete { scope, kind })?;
        ratio
    };
    Case::of_portolan(name, "", Better::Lower, measure).with_bar(1.2)
}

/// A flood of SYNs at a program that performs its handshakes itself (NE §3.2).
fn flooded_delegate(effort: Effort) -> Case {
    let measure = move |bed: &Bed| {
        let endpoint = bed.endpoint(FLOODED_PORT).to_string();
        let victim = bed.serve_delegated(
            Stack::Portolan,
            FLOODED_PORT,
            "portolan-traffic",
            &["greet", &endpoint],
        )?;
        flood_ratio_beside(bed, Stack::Portolan, Flood::Syn, victim, effort)
    };
    Case::of_portolan("flood-syn-delegated-p99-ratio", "", Better::Lower, measure).with_bar(1.2)
}

fn flood_ratio(bed: &Bed, stack: Stack, kind: Flood, effort: Effort) -> Result<f64, MeasureError> {
    let victim = kind.victim(bed, stack)?;
    flood_ratio_beside(bed, stack, kind, victim, effort)
}

fn flood_ratio_beside(
    bed: &Bed,
    stack: Stack,
    kind: Flood,
    _victim: Background,
    effort: Effort,
) -> Result<f64, MeasureError> {
    let echo = bed.endpoint(ECHO_PORT).to_string();
    let _echo = bed.serve(
        stack,
        ECHO_PORT,
        "portolan-traffic",
        &["echo", "tcp", &echo],
    )?;
    let _flood = kind.start(bed, nobody(bed)?)?;
    sleep(SETTLE);
    let count = (effort.scaled(100_000.0) as usize).to_string();
    let mut ping = bed.command(Side::Client, stack, "portolan-traffic");
    ping.args(["ping", "tcp", &echo, "--count", &count]);
    let report = run(&mut ping)?;
    let p99 = |phases| number("portolan-traffic", &report, &[phases, "p99_us"]);
    Ok(p99("busy")? / p99("calm")?)
}

/// Returns an address whose frames reach the server host and are ignored there. Answers to the flood's sources are
/// dropped on the client host.
fn nobody(bed: &Bed) -> Result<IpAddr, MeasureError> {
    let nobody = Ipv4Addr::new(10, 77, 0, 77);
    let client = bed.client.address.to_string();
    let (address, station) = (nobody.to_string(), "02:00:00:00:00:77");
    let neighbour = [
        "neigh", "replace", &address, "lladdr", station, "dev", INTERFACE,
    ];
    run(bed.namespace(Side::Client).exec("ip").args(neighbour))?;
    let back = ["route", "replace", "198.18.0.0/15", "via", &client];
    run(bed.namespace(Side::Server).exec("ip").args(back))?;
    Ok(nobody.into())
}
