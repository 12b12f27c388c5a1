//! Round trips and the packet filter's time by the number of endpoints that it distinguishes (MS Fig. 20).
//! The endpoints are connections of another program on the receiving host, whose peers use the kernel's sockets.

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::rc::Rc;

use super::super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7400;
const CROWD_PORT: u16 = 7401;

/// Numbers of endpoints, including the measured one.
const ENDPOINTS: [usize; 5] = [1, 16, 256, 4096, 16_384];
const MOST: usize = ENDPOINTS[ENDPOINTS.len() - 1];

/// Bytes of payload, as in the paper.
const PAYLOAD: &str = "1400";

/// The sysctl that has the kernel count the run time of all eBPF programs.
const STATISTICS: &str = "/proc/sys/kernel/bpf_stats_enabled";

const TRAFFIC: &str = "portolan-traffic";

/// The algorithm that finds receivers.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    settings: &'static str,
    paper: Option<&'static str>,
    /// Whether the cost must not depend on the number of endpoints.
    is_flat: bool,
}

pub(crate) const WAYS: [Way; 3] = [
    Way {
        name: "linear",
        settings: "[filter]\nalgorithm = \"linear\"\n",
        paper: Some("grows with the endpoints"),
        is_flat: false,
    },
    Way {
        name: "hash",
        settings: "[filter]\nalgorithm = \"hash\"\n",
        paper: None,
        is_flat: true,
    },
    Way {
        name: "active",
        settings: "[demux]\nactive = true\n",
        paper: Some("flat"),
        is_flat: true,
    },
];

/// The factor by which a flat curve may rise.
const NOISE: f64 = 1.1;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    WAYS.into_iter()
        .flat_map(|way| Sweep::new(way, effort).into_cases(effort))
        .collect()
}

/// The result for one number of endpoints.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) endpoints: usize,
    pub(crate) round_trip_us: f64,
    /// The packet filter's time per packet; 0 for the kernel's sockets, whose packets it passes on.
    pub(crate) filter_ns: f64,
}

struct Curve(Vec<Point>);

impl Curve {
    fn at(&self, endpoints: usize) -> Point {
        let found = self.0.iter().find(|point| point.endpoints == endpoints);
        *found.expect("cases name what is measured")
    }

    fn growth(&self, of: fn(Point) -> f64) -> f64 {
        of(self.at(MOST)) / of(self.at(1))
    }
}

/// The curves of one algorithm, each measured once for all its figures.
struct Sweep {
    way: Way,
    count: usize,
    curves: RefCell<Vec<Curve>>,
}

impl Sweep {
    fn new(way: Way, effort: Effort) -> Rc<Sweep> {
        Rc::new(Sweep {
            way,
            count: effort.scaled(20_000.0) as usize,
            curves: RefCell::default(),
        })
    }

    fn into_cases(self: Rc<Sweep>, effort: Effort) -> Vec<Case> {
        let Way { name, paper, .. } = self.way;
        let mut cases = Vec::new();
        let name = format!("ms-fig20-{name}");
        for (suffix, of) in [
            ("", (|point| point.round_trip_us) as fn(Point) -> f64),
            ("-filter", |point| point.filter_ns),
        ] {
            let unit = if suffix.is_empty() { "us" } else { "ns" };
            for endpoints in ENDPOINTS {
                // A quick run shows the ends of the curve only by their ratio.
                if !effort.quick {
                    let name = format!("{name}-{endpoints}{suffix}");
                    let take = move |curve: &Curve| of(curve.at(endpoints));
                    cases.push(self.case(&name, unit, take));
                }
            }
            let name = format!("{name}-{MOST}-over-1{suffix}");
            let mut growth = self.case(&name, "", move |curve| curve.growth(of));
            growth.paper = paper;
            cases.push(if self.way.is_flat && suffix.is_empty() {
                growth.with_bar(NOISE)
            } else {
                growth
            });
        }
        cases
    }

    fn case(
        self: &Rc<Sweep>,
        name: &str,
        unit: &'static str,
        take: impl Fn(&Curve) -> f64 + 'static,
    ) -> Case {
        let sweep = Rc::clone(self);
        let runs = Cell::new(0);
        Case::of_portolan(name, unit, Better::Lower, move |_| {
            let run = runs.replace(runs.get() + 1);
            if sweep.curves.borrow().len() == run {
                let curve = sweep.measure()?;
                sweep.curves.borrow_mut().push(curve);
            }
            Ok(take(&sweep.curves.borrow()[run]))
        })
    }

    fn measure(&self) -> Result<Curve, MeasureError> {
        curve(Stack::Portolan, self.way, &ENDPOINTS, self.count).map(Curve)
    }
}

/// Measures on one bed with an increasing number of endpoints, with `count` round trips at each.
pub(crate) fn curve(
    stack: Stack,
    way: Way,
    numbers: &[usize],
    count: usize,
) -> Result<Vec<Point>, MeasureError> {
    let mut bed = Bed::bare(portolan_netns::Bed::veth())?;
    bed.set_settings(way.settings);
    bed.start_daemon(Side::Client)?;
    bed.start_daemon(Side::Server)?;
    let gathering = bed.endpoint(CROWD_PORT).to_string();
    let gather = ["gather", &gathering];
    let _gathered = bed.serve(stack, CROWD_PORT, TRAFFIC, &gather)?;
    let mut crowds = Vec::new();
    let mut endpoints = 1;
    let mut points = Vec::new();
    for &wanted in numbers {
        if wanted > endpoints {
            crowds.push(crowd(&bed, wanted - endpoints)?);
            endpoints = wanted;
        }
        points.push(point(&bed, stack, endpoints, count)?);
    }
    Ok(points)
}

/// The measured connection is opened last, so that a linear search compares it last.
fn point(bed: &Bed, stack: Stack, endpoints: usize, count: usize) -> Result<Point, MeasureError> {
    let round_trip_us = ping(bed, stack, count)?;
    if stack == Stack::Kernel {
        return Ok(Point {
            endpoints,
            round_trip_us,
            filter_ns: 0.0,
        });
    }
    let before = FilterTime::read(bed)?;
    let statistics = Statistics::count()?;
    ping(bed, stack, count)?;
    drop(statistics);
    let after = FilterTime::read(bed)?;
    Ok(Point {
        endpoints,
        round_trip_us,
        filter_ns: (after.nanoseconds - before.nanoseconds) / (after.runs - before.runs),
    })
}

fn ping(bed: &Bed, stack: Stack, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let options = [endpoint.as_str(), "--size", PAYLOAD, "--spin"];
    let echo = [&["echo", "tcp"], &options[..]].concat();
    let _server = bed.serve(stack, PORT, TRAFFIC, &echo)?;
    let mut client = bed.command(Side::Client, stack, TRAFFIC);
    let count = count.to_string();
    client.args(["ping", "tcp"]).args(options);
    number(
        TRAFFIC,
        &run(client.args(["--count", &count]))?,
        &["p50_us"],
    )
}

/// Adds `count` endpoints on the server host, which exist while the returned program of their peers runs.
fn crowd(bed: &Bed, count: usize) -> Result<Background, MeasureError> {
    let endpoint = bed.endpoint(CROWD_PORT).to_string();
    let mut command = bed.command(Side::Client, Stack::Kernel, TRAFFIC);
    command.args(["crowd", &endpoint, "--count", &count.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut crowd = Background::start_with_output(&mut command)?;
    let mut said = String::new();
    if let Some(output) = crowd.output() {
        // A read error leaves the text empty, which is an error below.
        let _ = BufReader::new(output).read_line(&mut said);
    }
    match said.trim().parse::<usize>() {
        Ok(opened) if count == opened => Ok(crowd),
        _ => Err(MeasureError::Output {
            program: TRAFFIC,
            output: said,
        }),
    }
}

/// The packet filter's time on the server host, as counted by the kernel.
struct FilterTime {
    runs: f64,
    nanoseconds: f64,
}

impl FilterTime {
    fn read(bed: &Bed) -> Result<FilterTime, MeasureError> {
        let status = bed.portolan(Side::Server, &["status", "--json"])?;
        let field = |name| number("portolan", &status, &["filter", name]);
        Ok(FilterTime {
            runs: field("runs")?,
            nanoseconds: field("nanoseconds")?,
        })
    }
}

/// Has the kernel count until it is dropped.
struct Statistics {
    before: String,
}

impl Statistics {
    fn count() -> Result<Statistics, MeasureError> {
        let before = fs::read_to_string(STATISTICS).map_err(unset)?;
        fs::write(STATISTICS, "1").map_err(unset)?;
        Ok(Statistics { before })
    }
}

impl Drop for Statistics {
    fn drop(&mut self) {
        if let Err(source) = fs::write(STATISTICS, &self.before) {
            eprintln!("portolan: {}", unset(source));
        }
    }
}

fn unset(source: std::io::Error) -> MeasureError {
    MeasureError::File {
        path: STATISTICS.to_owned(),
        source,
    }
}
