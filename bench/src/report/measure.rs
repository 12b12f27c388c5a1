//! Measurements for exhibits: systems side by side on one bed, alternating, several times.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use portolan::layers::Layer;
use portolan_sys::probes::read_totals;
use serde_json::Value;

use super::model::Source;
use crate::bed::{Bed, Side, Stack};
use crate::figure::Spread;
use crate::process::{Background, run};
use crate::suites::qos::transmit;
use crate::{Effort, MeasureError};

const TRAFFIC: &str = "portolan-traffic";
const NATIVE: &str = "portolan-native";
const PORT: u16 = 7500;

/// Time until a datagram echo, whose socket cannot be observed to listen, is ready.
const SETTLE: Duration = Duration::from_millis(300);

/// The stack and the environment that programs run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct System {
    pub label: &'static str,
    pub source: Source,
    program: &'static str,
    stack: Stack,
    environment: &'static [(&'static str, &'static str)],
    link: Link,
}

/// The link of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// With default settings.
    Plain,
    /// With the packet filter in the drivers of both ends, which disables segmentation offload on a veth.
    Hooked,
}

const fn portolan(
    label: &'static str,
    environment: &'static [(&'static str, &'static str)],
) -> System {
    System {
        label,
        source: Source::Portolan,
        program: TRAFFIC,
        stack: Stack::Portolan,
        environment,
        link: Link::Plain,
    }
}

pub(super) const KERNEL: System = System {
    label: "kernel sockets",
    source: Source::Kernel,
    program: TRAFFIC,
    stack: Stack::Kernel,
    environment: &[],
    link: Link::Plain,
};

pub(super) const SERVER: System = System {
    source: Source::Server,
    ..portolan("Portolan, server", &[("PORTOLAN_DELIVERY", "server")])
};

pub(super) const IPC: System = portolan("Portolan, ipc", &[("PORTOLAN_DELIVERY", "ipc")]);
pub(super) const SHM: System = portolan("Portolan, shm", &[("PORTOLAN_DELIVERY", "shm")]);
/// Portolan by shared buffers, without a preloaded library.
const fn shared_buffers(
    label: &'static str,
    environment: &'static [(&'static str, &'static str)],
) -> System {
    System {
        program: NATIVE,
        stack: Stack::Kernel,
        ..portolan(label, environment)
    }
}

pub(super) const NEWAPI_IPC: System = shared_buffers(
    "Portolan, shared buffers, ipc",
    &[("PORTOLAN", "require"), ("PORTOLAN_DELIVERY", "ipc")],
);
pub(super) const NEWAPI_SHM: System = shared_buffers(
    "Portolan, shared buffers, shm",
    &[("PORTOLAN", "require"), ("PORTOLAN_DELIVERY", "shm")],
);
pub(super) const NEWAPI_SHM_IPF: System = System {
    link: Link::Hooked,
    ..shared_buffers(
        "Portolan, shared buffers, shm-ipf",
        &[("PORTOLAN", "require"), ("PORTOLAN_DELIVERY", "shm-ipf")],
    )
};

pub(super) const SHARED: System = portolan("Portolan, shared ring", &[("PORTOLAN_DIRECT", "0")]);
pub(super) const DIRECT: System = portolan("Portolan, own ring", &[("PORTOLAN_DIRECT", "1")]);

pub(super) const SHM_IPF: System = System {
    link: Link::Hooked,
    ..portolan("Portolan, shm-ipf", &[("PORTOLAN_DELIVERY", "shm-ipf")])
};

/// The kernel's stack on the link of [`SHM_IPF`].
pub(super) const KERNEL_HOOKED: System = System {
    label: "kernel sockets, filter in driver",
    link: Link::Hooked,
    ..KERNEL
};

/// Beds and results that several exhibits share.
pub(super) struct Context {
    pub effort: Effort,
    pub runs: usize,
    plain: OnceCell<Bed>,
    hooked: OnceCell<Bed>,
    ethernet: OnceCell<Rc<transmit::Link>>,
    parts: RefCell<BTreeMap<String, Rc<Runs>>>,
    micro: RefCell<BTreeMap<&'static str, Rc<Curves>>>,
}

/// Results of the program that measures single parts: by curve, the spread of all runs at each point.
pub(super) type Curves = BTreeMap<String, Vec<(f64, Spread)>>;

/// The parts of a round trip's time, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    pub round_trip: f64,
    /// Total duration of the call that sends.
    pub send_call: f64,
    /// Indexed by the number of the [`Layer`].
    pub client: [f64; Layer::ALL.len()],
    pub server: [f64; Layer::ALL.len()],
}

/// The parts of several runs.
pub(super) struct Runs(Vec<Parts>);

impl Runs {
    pub(super) fn spread(&self, of: impl Fn(&Parts) -> f64) -> Spread {
        Spread::of(&mut self.0.iter().map(of).collect::<Vec<_>>())
    }

    pub(super) fn median(&self, of: impl Fn(&Parts) -> f64) -> f64 {
        self.spread(of).median
    }

    /// Returns the time that the client's library spends in some layers.
    pub(super) fn client(&self, layers: &[Layer]) -> Spread {
        self.spread(|parts| Parts::sum(&parts.client, layers))
    }
}

impl Parts {
    pub(super) fn sum(times: &[f64], layers: &[Layer]) -> f64 {
        layers.iter().map(|layer| times[*layer as usize]).sum()
    }
}

impl Context {
    pub(super) fn new(effort: Effort) -> Context {
        Context {
            effort,
            runs: if effort.quick { 3 } else { 5 },
            plain: OnceCell::new(),
            hooked: OnceCell::new(),
            ethernet: OnceCell::new(),
            parts: RefCell::default(),
            micro: RefCell::default(),
        }
    }

    /// Returns a bed whose link has the rate of the fast link in the papers.
    pub(super) fn ethernet(&self) -> &transmit::Link {
        let link = || transmit::Link::new(100 * transmit::MEGABIT);
        self.ethernet.get_or_init(link)
    }

    pub(super) fn bed(&self) -> Result<&Bed, MeasureError> {
        if self.plain.get().is_none() {
            let bed = Bed::new()?;
            return Ok(self.plain.get_or_init(|| bed));
        }
        Ok(self.plain.get().expect("it is there"))
    }

    fn hooked(&self) -> Result<&Bed, MeasureError> {
        if let Some(bed) = self.hooked.get() {
            return Ok(bed);
        }
        let mut bed = Bed::bare(portolan_netns::Bed::veth())?;
        bed.set_settings("[delivery]\nxdp = \"native\"\n");
        bed.start_daemon(Side::Client)?;
        bed.start_daemon(Side::Server)?;
        Ok(self.hooked.get_or_init(|| bed))
    }

    fn bed_of(&self, system: &System) -> Result<&Bed, MeasureError> {
        match system.link {
            Link::Plain => self.bed(),
            Link::Hooked => self.hooked(),
        }
    }

    /// Returns `full`, or `quick` in a quick run.
    pub(super) fn count(&self, full: usize, quick: usize) -> usize {
        if self.effort.quick { quick } else { full }
    }

    /// Measures each system at each point, alternating, so that a disturbance affects all.
    pub(super) fn in_turns<S, P>(
        &self,
        runs: usize,
        systems: &[S],
        points: &[P],
        measure: impl Fn(&S, &P) -> Result<f64, MeasureError>,
    ) -> Result<Vec<Vec<Spread>>, MeasureError> {
        let mut values = vec![vec![Vec::new(); points.len()]; systems.len()];
        for _ in 0..runs {
            for (system, values) in systems.iter().zip(&mut values) {
                for (point, values) in points.iter().zip(values) {
                    values.push(measure(system, point)?);
                }
            }
        }
        let spreads = |values: Vec<Vec<f64>>| {
            let of_point = |mut values: Vec<f64>| Spread::of(&mut values);
            values.into_iter().map(of_point).collect()
        };
        Ok(values.into_iter().map(spreads).collect())
    }

    /// Returns the median round trip in microseconds; both sides sleep.
    pub(super) fn ping(
        &self,
        system: &System,
        message: &Message,
        count: usize,
    ) -> Result<f64, MeasureError> {
        if system.lacks(message.protocol) {
            return Ok(f64::NAN);
        }
        let report = self.pings(system, message, &["--count", &count.to_string()])?;
        number(&report, "p50_us")
    }

    /// Returns the report of round trips.
    pub(super) fn pings(
        &self,
        system: &System,
        message: &Message,
        options: &[&str],
    ) -> Result<Value, MeasureError> {
        let bed = self.bed_of(system)?;
        let _echo = echo(bed, system, message, None)?;
        let mut client = system.command(bed, Side::Client);
        report(client.args(message.words("ping", bed)).args(options))
    }

    /// Returns the Gb/s of a stream that is written in pieces of `size` bytes.
    pub(super) fn stream(
        &self,
        system: &System,
        size: usize,
        seconds: f64,
    ) -> Result<f64, MeasureError> {
        let bed = self.bed_of(system)?;
        let to = bed.endpoint(PORT).to_string();
        let mut sink = system.command(bed, Side::Server);
        sink.args(["sink", &to]).stdout(Stdio::null());
        let _sink = bed.serve_command(PORT, system.program, &mut sink)?;
        let (size, seconds) = (size.to_string(), seconds.to_string());
        let mut client = system.command(bed, Side::Client);
        client.args(["bulk", &to, "--size", &size, "--seconds", &seconds]);
        number(&report(&mut client)?, "gigabits_per_second")
    }

    /// Returns the Gb/s of payload received in datagrams of `size` bytes, which are sent as fast as the socket accepts.
    pub(super) fn datagrams(
        &self,
        system: &System,
        size: usize,
        seconds: f64,
    ) -> Result<f64, MeasureError> {
        /// Bytes that the receiver counts in addition to the payload.
        const HEADERS: f64 = 42.0;
        if system.lacks("udp") {
            return Ok(f64::NAN);
        }
        let bed = self.bed_of(system)?;
        let to = bed.endpoint(PORT).to_string();
        let path = bed.file("datagrams.json");
        let file = |source| MeasureError::File {
            path: path.display().to_string(),
            source,
        };
        let mut gauge = system.command(bed, Side::Server);
        gauge.args(["gauge", &to, "--seconds", &seconds.to_string()]);
        gauge.stdout(File::create(&path).map_err(file)?);
        let mut gauge = bed.serve_command(PORT, TRAFFIC, &mut gauge)?;
        let (size_word, longer) = (size.to_string(), (seconds + 0.5).to_string());
        let mut client = system.command(bed, Side::Client);
        client.args(["pour", "udp", &to, "--tag", "1", "--size", &size_word]);
        report(client.args(["--seconds", &longer]))?;
        gauge.wait(Duration::from_secs_f64(seconds + 5.0));
        let text = fs::read_to_string(&path).map_err(file)?;
        let report: Value = serde_json::from_str(&text).map_err(|_| unreadable(&text))?;
        let sender = &report["senders"][0];
        let bytes: f64 = sender["bytes"].as_array().map_or(0.0, |windows| {
            windows.iter().filter_map(Value::as_f64).sum()
        });
        let time = (number(sender, "last_ms")? - number(sender, "first_ms")?) / 1e3;
        let payload = bytes * size as f64 / (size as f64 + HEADERS);
        Ok(payload * 8.0 / time.max(1e-3) / 1e9)
    }

    /// Returns the costs of single parts; each part is measured once.
    pub(super) fn micro(&self, part: &'static str) -> Result<Rc<Curves>, MeasureError> {
        if let Some(known) = self.micro.borrow().get(part) {
            return Ok(Rc::clone(known));
        }
        let curves = Rc::new(measure_micro(self, part)?);
        self.micro.borrow_mut().insert(part, Rc::clone(&curves));
        Ok(curves)
    }

    /// Returns the layers' times of both ends; each combination is measured once.
    pub(super) fn parts(
        &self,
        system: &System,
        message: &Message,
    ) -> Result<Rc<Runs>, MeasureError> {
        let key = format!("{} {message:?}", system.label);
        if let Some(known) = self.parts.borrow().get(&key) {
            return Ok(Rc::clone(known));
        }
        let runs = (0..self.runs).map(|_| self.measure_parts(system, message));
        let runs = Rc::new(Runs(runs.collect::<Result<_, _>>()?));
        self.parts.borrow_mut().insert(key, Rc::clone(&runs));
        Ok(runs)
    }

    fn measure_parts(&self, system: &System, message: &Message) -> Result<Parts, MeasureError> {
        if system.lacks(message.protocol) {
            return Ok(Parts {
                round_trip: f64::NAN,
                send_call: f64::NAN,
                ..Parts::default()
            });
        }
        let count = self.count(10_000, 3_000);
        let words = ["--warm-up", "0", "--calls", "--count", &count.to_string()];
        let plain = self.pings(system, message, &words)?;
        let mut parts = Parts {
            round_trip: number(&plain, "p50_us")?,
            send_call: number(&plain, "send_p50_us")?,
            ..Parts::default()
        };
        if system.source != Source::Portolan {
            return Ok(parts);
        }
        let bed = self.bed_of(system)?;
        let (here, there) = (bed.file("layers-client"), bed.file("layers-server"));
        let echo = echo(bed, system, message, Some(&there))?;
        let mut client = system.command(bed, Side::Client);
        client.env("PORTOLAN_LAYERS", &here);
        client.args(message.words("ping", bed));
        report(client.args(["--warm-up", "0", "--count", &count.to_string()]))?;
        drop(echo);
        let of = |path: &std::path::Path| -> Result<[f64; Layer::ALL.len()], MeasureError> {
            let bytes = fs::read(path).map_err(|source| MeasureError::File {
                path: path.display().to_string(),
                source,
            })?;
            let mut times = [0.0; Layer::ALL.len()];
            for (time, (nanoseconds, _)) in times.iter_mut().zip(read_totals(&bytes)) {
                *time = nanoseconds as f64 / count as f64 / 1e3;
            }
            Ok(times)
        };
        (parts.client, parts.server) = (of(&here)?, of(&there)?);
        Ok(parts)
    }
}

/// A message for round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub protocol: &'static str,
    pub size: usize,
    pub spin: bool,
}

impl Message {
    /// Both ends sleep.
    pub(super) const fn tcp(size: usize) -> Message {
        Message {
            protocol: "tcp",
            size,
            spin: false,
        }
    }

    pub(super) const fn udp(size: usize) -> Message {
        Message {
            protocol: "udp",
            ..Message::tcp(size)
        }
    }

    pub(super) const fn spinning(self) -> Message {
        Message { spin: true, ..self }
    }

    pub(super) fn label(&self) -> String {
        format!("{} {} B", self.protocol.to_uppercase(), self.size)
    }

    fn words(&self, role: &str, bed: &Bed) -> Vec<String> {
        let mut words = vec![
            role.to_owned(),
            self.protocol.to_owned(),
            bed.endpoint(PORT).to_string(),
            "--size".to_owned(),
            self.size.to_string(),
        ];
        if self.spin {
            words.push("--spin".to_owned());
        }
        words
    }
}

impl System {
    /// Returns true for UDP in the server's form: the server relays streams only, and datagrams arrive by the ring.
    fn lacks(&self, protocol: &str) -> bool {
        self.source == Source::Server && protocol == "udp"
    }

    fn command(&self, bed: &Bed, side: Side) -> Command {
        let mut command = bed.command(side, self.stack, self.program);
        command.envs(self.environment.iter().copied());
        command
    }
}

fn echo(
    bed: &Bed,
    system: &System,
    message: &Message,
    layers: Option<&std::path::Path>,
) -> Result<Background, MeasureError> {
    let mut echo = system.command(bed, Side::Server);
    echo.args(message.words("echo", bed)).stdout(Stdio::null());
    if let Some(path) = layers {
        echo.env("PORTOLAN_LAYERS", path);
    }
    if message.protocol == "tcp" {
        return Ok(bed.serve_command(PORT, system.program, &mut echo)?);
    }
    let echo = Background::start(&mut echo)?;
    std::thread::sleep(SETTLE);
    Ok(echo)
}

/// Runs a program to its end and parses its JSON output.
pub(super) fn report(command: &mut Command) -> Result<Value, MeasureError> {
    let text = run(command)?;
    serde_json::from_str(&text).map_err(|_| unreadable(&text))
}

pub(super) fn number(report: &Value, field: &str) -> Result<f64, MeasureError> {
    let number = report.get(field).and_then(Value::as_f64);
    number.ok_or_else(|| unreadable(&report.to_string()))
}

pub(super) fn numbers(report: &Value, field: &str) -> Result<Vec<f64>, MeasureError> {
    let all = report.get(field).and_then(Value::as_array);
    let all = all.ok_or_else(|| unreadable(&report.to_string()))?;
    Ok(all.iter().filter_map(Value::as_f64).collect())
}

fn unreadable(output: &str) -> MeasureError {
    MeasureError::Output {
        program: TRAFFIC,
        output: output.chars().take(500).collect(),
    }
}

fn measure_micro(context: &Context, part: &str) -> Result<Curves, MeasureError> {
    let tools = crate::tools::Tools::locate().map_err(crate::bed::BedError::from)?;
    let time = context.count(50, 10).to_string();
    let mut all: BTreeMap<String, Vec<(f64, Vec<f64>)>> = BTreeMap::new();
    for _ in 0..context.runs {
        let text = run(Command::new(&tools.micro).args([part, "--milliseconds", &time]))?;
        let curves: BTreeMap<String, Vec<[f64; 2]>> =
            serde_json::from_str(&text).map_err(|_| MeasureError::Output {
                program: "portolan-micro",
                output: text.clone(),
            })?;
        for (name, points) in curves {
            let known = all
                .entry(name)
                .or_insert_with(|| points.iter().map(|[x, _]| (*x, Vec::new())).collect());
            for ((_, values), [_, value]) in known.iter_mut().zip(points) {
                values.push(value);
            }
        }
    }
    let spreads = |points: Vec<(f64, Vec<f64>)>| {
        let spread = |(x, mut values): (f64, Vec<f64>)| (x, Spread::of(&mut values));
        points.into_iter().map(spread).collect()
    };
    Ok(all
        .into_iter()
        .map(|(name, points)| (name, spreads(points)))
        .collect())
}
