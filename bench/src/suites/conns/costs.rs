//! What each connection costs: requests to the servers, system calls, context switches, and CPU time of either host.
//! perf counts the programs and the servers of both hosts while wrk opens a connection for each request to nginx.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::{fs, iter};

use super::counted;
use crate::bed::{Bed, Side, Stack};
use crate::process::run;
use crate::services::file_error;
use crate::suites::http::{self, Load, Nginx};
use crate::suites::{Better, Case};
use crate::{Effort, MeasureError};

const PORT: u16 = 8083;

const PERF: &str = "perf";
const CALLS: &str = "raw_syscalls:sys_enter";
const SWITCHES: &str = "context-switches";
const CPU: &str = "task-clock";

/// More than this many requests for each connection mean that leases do not serve.
const REQUESTS_BAR: f64 = 0.05;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let load = |connections, threads| Load {
        seconds: effort.scaled(3.0),
        threads,
        connections,
        options: &["-H", "Connection: close"],
    };
    let workloads = [
        ("cost-c1", load("1", "1"), Bed::endpoint as Endpoint),
        ("cost-c64", load("64", "1"), Bed::endpoint),
        ("cost-c1000", load("1000", "1"), Bed::endpoint),
        ("cost-c64-t4", load("64", "4"), Bed::endpoint),
        ("cost-c64-ipv6", load("64", "1"), Bed::endpoint_ipv6),
    ];
    workloads
        .into_iter()
        .flat_map(|(name, load, endpoint)| cases_of(name, load, endpoint))
        .collect()
}

type Endpoint = fn(&Bed, u16) -> SocketAddr;
type Field = fn(&Costs) -> f64;

/// Makes the cases of one workload, which share its measurements.
fn cases_of(name: &str, load: Load, endpoint: Endpoint) -> Vec<Case> {
    let workload = Rc::new(Workload {
        load,
        endpoint,
        measured: RefCell::default(),
    });
    let figure = |field: Field| {
        let (workload, before) = (Rc::clone(&workload), RefCell::new(Vec::new()));
        move |bed: &Bed, stack: Stack| {
            let runs = before.borrow().iter().filter(|on| **on == stack).count();
            before.borrow_mut().push(stack);
            workload.nth(bed, stack, runs).map(|costs| field(&costs))
        }
    };
    let fields: [(&str, &str, Field); 6] = [
        ("client-calls", "calls/conn", |costs| costs.client.calls),
        ("client-switches", "1/conn", |costs| costs.client.switches),
        ("client-cpu", "us/conn", |costs| costs.client.cpu_us),
        ("server-calls", "calls/conn", |costs| costs.server.calls),
        ("server-switches", "1/conn", |costs| costs.server.switches),
        ("server-cpu", "us/conn", |costs| costs.server.cpu_us),
    ];
    let programs = ["nginx", "wrk", PERF];
    let mut cases: Vec<Case> = fields
        .into_iter()
        .map(|(field, unit, value)| {
            Case::new(
                format!("{name}-{field}"),
                unit,
                Better::Lower,
                figure(value),
            )
            .needs(programs)
        })
        .collect();
    let requests = figure(|costs| costs.requests);
    cases.push(
        Case::of_portolan(
            format!("{name}-requests"),
            "1/conn",
            Better::Lower,
            move |bed| requests(bed, Stack::Portolan),
        )
        .needs(programs)
        .with_bar(REQUESTS_BAR),
    );
    cases
}

/// What one connection costs.
#[derive(Clone, Copy)]
struct Costs {
    /// Of the program and the network server together.
    client: Usage,
    server: Usage,
    /// Requests of programs to both network servers.
    requests: f64,
}

#[derive(Clone, Copy)]
struct Usage {
    calls: f64,
    switches: f64,
    cpu_us: f64,
}

impl Usage {
    fn per(self, connections: f64) -> Usage {
        Usage {
            calls: self.calls / connections,
            switches: self.switches / connections,
            cpu_us: self.cpu_us / connections,
        }
    }
}

struct Workload {
    load: Load,
    endpoint: Endpoint,
    measured: RefCell<Vec<(Stack, Costs)>>,
}

impl Workload {
    /// Returns the n-th measurement on a stack, and measures if there is none yet.
    fn nth(&self, bed: &Bed, stack: Stack, n: usize) -> Result<Costs, MeasureError> {
        let known = self
            .measured
            .borrow()
            .iter()
            .filter(|(on, _)| *on == stack)
            .nth(n)
            .copied();
        if let Some((_, costs)) = known {
            return Ok(costs);
        }
        let costs = self.measure(bed, stack)?;
        self.measured.borrow_mut().push((stack, costs));
        Ok(costs)
    }

    fn measure(&self, bed: &Bed, stack: Stack) -> Result<Costs, MeasureError> {
        let endpoint = (self.endpoint)(bed, PORT);
        let nginx = http::serve_page(bed, stack, Nginx::OneProcess, endpoint)?;
        let wrk = http::wrk_command(bed, stack, &self.load, &format!("http://{endpoint}/"));
        let files = ["client.perf", "server.perf"].map(|name| bed.file(name));
        let [mut client, mut server] = [Vec::new(), vec![nginx.pid()]];
        client.extend(bed.daemon_pid(Side::Client));
        server.extend(bed.daemon_pid(Side::Server));
        let own = bed.file("wrk.perf");
        let words = observe(words(&wrk), &own, &[]);
        let words = observe(words, &files[0], &client);
        let words = observe(words, &files[1], &server);
        let mut command = bed.namespace(Side::Client).exec(&words[0]);
        command.args(&words[1..]);
        let requests = counted(bed, "requests")?;
        let output = run(&mut command)?;
        let requests = counted(bed, "requests")? - requests;
        let connections = connections(&output).ok_or(MeasureError::Output {
            program: "wrk",
            output,
        })?;
        let [own, client, server] = [own, files[0].clone(), files[1].clone()].map(usage);
        let (own, client) = (own?, client?);
        let client = Usage {
            calls: own.calls + client.calls,
            switches: own.switches + client.switches,
            cpu_us: own.cpu_us + client.cpu_us,
        };
        Ok(Costs {
            client: client.per(connections),
            server: server?.per(connections),
            requests: requests / connections,
        })
    }
}

fn words(command: &Command) -> Vec<OsString> {
    let program = iter::once(command.get_program());
    program
        .chain(command.get_args())
        .map(OsStr::to_owned)
        .collect()
}

/// Puts perf before a command, to count that, or some other processes while it runs.
fn observe(command: Vec<OsString>, output: &Path, pids: &[u32]) -> Vec<OsString> {
    let events = [CALLS, SWITCHES, CPU].join(",");
    let mut perf = Command::new(PERF);
    perf.args(["stat", "-x", ",", "-e", &events, "-o"]);
    perf.arg(output);
    if !pids.is_empty() {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        perf.args(["-p", &pids.join(",")]);
    }
    words(perf.arg("--").args(command))
}

fn usage(path: PathBuf) -> Result<Usage, MeasureError> {
    let text = fs::read_to_string(&path).map_err(|source| file_error(&path, source))?;
    parse(&text).ok_or(MeasureError::Output {
        program: PERF,
        output: text,
    })
}

/// Parses perf's lines `12345,,raw_syscalls:sys_enter,…` and `12.5,msec,task-clock,…`.
fn parse(csv: &str) -> Option<Usage> {
    let count = |event: &str| -> Option<f64> {
        let mut lines = csv.lines().map(|line| line.split(','));
        lines.find_map(|mut fields| {
            let (value, _, name) = (fields.next()?, fields.next()?, fields.next()?);
            (name == event).then(|| value.parse().ok()).flatten()
        })
    };
    Some(Usage {
        calls: count(CALLS)?,
        switches: count(SWITCHES)?,
        cpu_us: count(CPU)? * 1e3,
    })
}

/// Parses wrk's line `12345 requests in 2.00s, 1.5MB read`: each had a connection of its own.
fn connections(output: &str) -> Option<f64> {
    let line = output.lines().find(|line| line.contains(" requests in "))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{connections, parse};

    #[test]
    fn counts_are_read_from_what_perf_and_wrk_print() {
        let csv = "# started on\n\n123,,raw_syscalls:sys_enter,100,100.00,,\n4,,context-switches,1,100.00,,\n\
            1.5,msec,task-clock,1,100.00,0.1,CPUs utilized\n";
        let usage = parse(csv).unwrap();
        assert_eq!((usage.calls, usage.switches), (123.0, 4.0));
        assert_eq!(usage.cpu_us, 1500.0);
        assert_eq!(
            connections("  17 requests in 2.00s, 1.5MB read"),
            Some(17.0)
        );
    }

    #[test]
    fn an_event_that_could_not_be_counted_is_no_zero() {
        let csv =
            "<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n4,,context-switches,1,100.00,,\n";
        assert!(parse(csv).is_none());
        assert_eq!(connections("unable to connect"), None);
    }
}
