//! Plays one script on a bed.

mod calls;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::agent::{Agent, AgentError, Answer};
use crate::bed::{Bed, Stack};
use crate::script::{Action, Family, Packet, Place, Script, Step, Time};
use crate::segment::{Content, Flow, Reassembly, Scope, Seen, SeenOption, build, compare, show};
use crate::wire::now;

/// The tolerance of times in each direction.
#[derive(Clone, Copy, Debug)]
struct Tolerance {
    early: Duration,
    late: Duration,
}

impl Tolerance {
    fn of(stack: Stack) -> Tolerance {
        let (early, late) = match stack {
            // One tick of the kernel's clock at 100 Hz.
            Stack::Linux => (10, 0),
            // A program may be descheduled between reading the clock and sending its packet, and
            // between the arrival of a packet and reading the ring.
            Stack::Portolan => (60, 300),
        };
        Tolerance {
            early: Duration::from_millis(early),
            late: Duration::from_millis(late),
        }
    }
}

/// Time limit of an expectation without an upper bound. The machine may be busy.
const TIMEOUT: Duration = Duration::from_millis(3000);
/// Time limit of a call.
const CALL_PATIENCE: Duration = Duration::from_secs(10);

/// The addresses that a script uses, unique on its bed.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub family: Family,
    /// Number of the run on this bed.
    pub number: u16,
}

/// Why a script failed.
#[derive(Clone, Debug)]
pub struct Failure {
    pub place: Option<Place>,
    pub message: String,
    /// All events, one per line.
    pub trace: Vec<String>,
    /// The largest delay of the runner's own actions after their time in the script.
    pub runner_late: Duration,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(place) = &self.place {
            writeln!(f, "  {place}")?;
        }
        writeln!(f, "  {}", self.message)?;
        let late = self.runner_late.as_secs_f64();
        writeln!(f, "  the runner was at most {late:.3} s late")?;
        for line in &self.trace {
            writeln!(f, "    {line}")?;
        }
        Ok(())
    }
}

/// Plays `script`. The caller measures the time it takes.
pub fn play(script: &Script, bed: &Bed, setting: Setting) -> Result<(), Box<Failure>> {
    let outer = |message: String| {
        Box::new(Failure {
            place: None,
            message,
            trace: Vec::new(),
            runner_late: Duration::ZERO,
        })
    };
    let before = change(bed, &script.sysctls).map_err(outer)?;
    bed.wire.drain();
    let result = match Agent::start(bed.agent()) {
        Ok(agent) => Player::new(script, bed, agent, setting).play(script),
        Err(error) => Err(outer(error.to_string())),
    };
    change(bed, &before).map_err(outer)?;
    result
}

/// Sets kernel parameters and returns their previous values.
fn change(bed: &Bed, sysctls: &[(String, String)]) -> Result<Vec<(String, String)>, String> {
    if sysctls.is_empty() {
        return Ok(Vec::new());
    }
    bed.host.enter(|| {
        let mut before = Vec::new();
        for (name, value) in sysctls {
            let path = name.replace('.', "/");
            let old = portolan_sys::sysctl::read_value(&path).map_err(|e| e.to_string())?;
            portolan_sys::sysctl::write(&path, value).map_err(|e| e.to_string())?;
            before.push((name.clone(), old));
        }
        before.reverse();
        Ok(before)
    })
}

/// The error says why a step failed.
type Stepped = Result<(), String>;

struct Player<'a> {
    bed: &'a Bed,
    agent: Agent,
    family: Family,
    /// The port on which the stack under test listens.
    port: u16,
    scope: Scope,
    flows: HashMap<String, Flow>,
    reassembly: Reassembly,
    started: HashMap<String, u32>,
    /// The position in the pattern of each stream's next byte; None after bytes that are not from the pattern.
    read_so_far: HashMap<i64, Option<u64>>,
    datagram_sockets: Vec<i64>,
    /// The time at which the last step was fulfilled, or at which it began, if it has a duration.
    cursor: Duration,
    /// The time at which the last step was fulfilled for certain.
    done: Duration,
    start: Duration,
    late: Duration,
    /// The delay of the calls since the last packet. A timer that one of these calls or the packet has
    /// set may expire earlier by this, relative to the last call.
    slack: Duration,
    trace: Vec<(Duration, String)>,
}

/// The port of the first remote end; each flow has a different one.
const REMOTE_PORT: u16 = 40_000;
/// The first port of the stack under test.
const LOCAL_PORT: u16 = 5_000;

impl<'a> Player<'a> {
    fn new(script: &Script, bed: &'a Bed, agent: Agent, setting: Setting) -> Player<'a> {
        let Setting { family, number } = setting;
        let mut flows = HashMap::new();
        for name in flow_names(script) {
            let index = flows.len() as u16;
            let flow = Flow {
                local: SocketAddr::new(Bed::local(family), LOCAL_PORT + number),
                local_is_known: false,
                remote: SocketAddr::new(Bed::remote(family, number), REMOTE_PORT + index),
                // Near the maximum, so that every longer stream wraps.
                remote_isn: u32::MAX - 1000 - u32::from(index),
                local_isn: None,
                timestamp: 0,
            };
            flows.insert(name, flow);
        }
        let start = now();
        Player {
            bed,
            agent,
            family,
            port: LOCAL_PORT + number,
            scope: Scope {
                family,
                variables: HashMap::new(),
                cookie: Vec::new(),
            },
            flows,
            reassembly: Reassembly::default(),
            started: HashMap::new(),
            read_so_far: HashMap::new(),
            datagram_sockets: Vec::new(),
            cursor: start,
            done: start,
            start,
            late: Duration::ZERO,
            slack: Duration::ZERO,
            trace: Vec::new(),
        }
    }

    fn play(mut self, script: &Script) -> Result<(), Box<Failure>> {
        let mut allowed = Vec::new();
        for step in &script.steps {
            if let Action::Allow(packet) = &step.action {
                allowed.push(packet);
                continue;
            }
            self.step(step, &allowed).map_err(|message| {
                self.note_the_rest();
                Box::new(Failure {
                    place: Some(step.place.clone()),
                    message,
                    trace: self.told(),
                    runner_late: self.late,
                })
            })?;
            if matches!(step.action, Action::Expect(_) | Action::Quiet(_)) {
                allowed.clear();
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step, allowed: &[&Packet]) -> Stepped {
        match &step.action {
            Action::Inject(packet) => self.inject(packet, step.time),
            Action::Expect(packet) => self.expect(packet, step.time, allowed),
            Action::Allow(_) => Ok(()),
            Action::Quiet(length) => self.quiet(*length, allowed),
            Action::Call { call, result } => {
                self.wait_until(self.cursor + step.time.earliest);
                let id = self.request(call)?;
                let answer = self.answer(id, now() + CALL_PATIENCE)?;
                let planned = self.cursor + step.time.earliest;
                let late = answer.started.saturating_sub(planned);
                self.late = self.late.max(late);
                self.slack += late;
                (self.cursor, self.done) = (answer.started, answer.ended);
                self.judge(call, &answer, result)
            }
            Action::Start { name, call } => {
                self.wait_until(self.cursor + step.time.earliest);
                let id = self.request(call)?;
                self.started.insert(name.clone(), id);
                self.reach(now());
                Ok(())
            }
            Action::Await { name, result } => {
                let id = self.id(name)?;
                let answer = self.answer(id, self.deadline(step.time))?;
                self.in_time(answer.ended, step.time)?;
                self.reach(answer.ended);
                self.judge_answer(&answer, result)
            }
            Action::Pending(name) => {
                self.wait_until(self.cursor + step.time.earliest);
                let id = self.id(name)?;
                match self.agent.answer(id, now()) {
                    Err(AgentError::Late) => Ok(()),
                    Err(error) => Err(error.to_string()),
                    Ok(answer) => Err(format!("the call has returned {:?}", answer.result)),
                }
            }
        }
    }

    fn id(&self, name: &str) -> Result<u32, String> {
        let id = self.started.get(name).copied();
        id.ok_or_else(|| format!("no call {name:?} was started"))
    }

    fn answer(&mut self, id: u32, deadline: Duration) -> Result<Answer, String> {
        let answer = self.agent.answer(id, deadline);
        answer.map_err(|error| error.to_string())
    }

    fn wait_until(&mut self, moment: Duration) {
        std::thread::sleep(moment.saturating_sub(now()));
        self.late = self.late.max(now().saturating_sub(moment));
    }

    fn deadline(&self, time: Time) -> Duration {
        let latest = time.latest.unwrap_or(time.earliest + TIMEOUT);
        let late = Tolerance::of(self.bed.stack).late;
        (self.done + latest + late).max(now())
    }

    fn in_time(&self, at: Duration, time: Time) -> Stepped {
        let tolerance = Tolerance::of(self.bed.stack);
        let at_most = at.saturating_sub(self.cursor);
        let at_least = at.saturating_sub(self.done);
        if !time.earliest.is_zero() && at_most + tolerance.early + self.slack < time.earliest {
            return Err(format!("too early: after {:.3} s", at_most.as_secs_f64()));
        }
        match time.latest {
            Some(latest) if at_least > latest + tolerance.late => {
                Err(format!("too late: after {:.3} s", at_least.as_secs_f64()))
            }
            _ => Ok(()),
        }
    }

    /// Records that a step was fulfilled at `moment`.
    fn reach(&mut self, moment: Duration) {
        self.cursor = moment;
        self.done = moment;
    }

    fn flow(&self, packet: &Packet) -> Result<&Flow, String> {
        let flow = self.flows.get(&packet.flow);
        flow.ok_or_else(|| format!("there is no flow {:?}", packet.flow))
    }

    fn inject(&mut self, packet: &Packet, time: Time) -> Stepped {
        self.wait_until(self.cursor + time.earliest);
        let flow = self.flow(packet)?.clone();
        let bytes = build(packet, &flow, &self.scope).map_err(|error| error.to_string())?;
        self.cursor = now();
        self.slack = Duration::ZERO;
        let shown = crate::segment::read(&bytes, self.cursor);
        let shown = shown.map_or("part of a packet".to_owned(), |seen| {
            show(&seen, &flow, false)
        });
        let name = flow_tag(&packet.flow);
        self.trace.push((self.cursor, format!("< {name}{shown}")));
        let sent = self.bed.wire.send(&bytes);
        self.done = now();
        sent.map_err(|error| error.to_string())
    }

    fn expect(&mut self, packet: &Packet, time: Time, allowed: &[&Packet]) -> Stepped {
        let deadline = self.deadline(time);
        loop {
            let Some((name, seen)) = self.next_packet(deadline) else {
                return Err("nothing came".to_owned());
            };
            match self.fits(packet, &name, &seen) {
                Ok(()) => {
                    self.in_time(seen.at, time)?;
                    self.reach(seen.at.max(self.cursor));
                    self.slack = Duration::ZERO;
                    return Ok(());
                }
                Err(_) if self.is_allowed(allowed, &name, &seen) => {}
                Err(reason) => {
                    let got = show(&seen, self.flow(packet)?, true);
                    return Err(format!("{reason}\n  got: > {}{got}", flow_tag(&name)));
                }
            }
        }
    }

    fn is_allowed(&mut self, allowed: &[&Packet], name: &str, seen: &Seen) -> bool {
        allowed
            .iter()
            .any(|packet| self.fits(packet, name, seen).is_ok())
    }

    fn fits(&mut self, packet: &Packet, name: &str, seen: &Seen) -> Stepped {
        if packet.flow != name {
            return Err(format!("it is of flow {name:?}"));
        }
        let Some(flow) = self.flows.get(name) else {
            return Err(format!("there is no flow {name:?}"));
        };
        compare(packet, seen, flow, &mut self.scope)
    }

    fn quiet(&mut self, length: Duration, allowed: &[&Packet]) -> Stepped {
        let end = self.cursor + length;
        while let Some((name, seen)) = self.next_packet(end) {
            if !self.is_allowed(allowed, &name, &seen) {
                let flow = self.flows.get(&name);
                let got = flow.map(|flow| show(&seen, flow, true)).unwrap_or_default();
                return Err(format!("got: > {}{got}", flow_tag(&name)));
            }
        }
        self.reach(end);
        Ok(())
    }

    /// Returns the next packet of this script and the name of its flow; None if none arrives until `deadline`.
    fn next_packet(&mut self, deadline: Duration) -> Option<(String, Seen)> {
        loop {
            let (at, packet) = self.bed.wire.receive(deadline)?;
            let Some(seen) = self.reassembly.take(&packet, at) else {
                continue;
            };
            let Some(name) = self.flow_of(&seen) else {
                continue;
            };
            self.learn(&name, &seen);
            let shown = self.flows.get(&name).map(|flow| show(&seen, flow, true));
            let line = format!("> {}{}", flow_tag(&name), shown.unwrap_or_default());
            self.trace.push((seen.at, line));
            if at > deadline {
                return None;
            }
            return Some((name, seen));
        }
    }

    fn flow_of(&self, seen: &Seen) -> Option<String> {
        let (local, remote) = match &seen.content {
            Content::Icmp(icmp) => {
                let (_, source, destination) = icmp.about?;
                (destination, source)
            }
            _ => (seen.from, seen.to),
        };
        let is_mine =
            |flow: &Flow| flow.remote == remote && (!flow.local_is_known || flow.local == local);
        let found = self.flows.iter().find(|(_, flow)| is_mine(flow));
        found.map(|(name, _)| name.clone())
    }

    /// Records the choices of the stack under test: its port, its initial sequence number, timestamps.
    fn learn(&mut self, name: &str, seen: &Seen) {
        let Some(flow) = self.flows.get_mut(name) else {
            return;
        };
        if !matches!(seen.content, Content::Icmp(_)) {
            flow.local = seen.from;
        }
        if let Content::Tcp(tcp) = &seen.content {
            if tcp.flags & 2 != 0 && tcp.flags & 4 == 0 {
                flow.local_isn = Some(tcp.sequence);
            }
            for option in &tcp.options {
                match option {
                    SeenOption::Timestamps(value, _) => flow.timestamp = *value,
                    SeenOption::FastOpen(cookie) => self.scope.cookie.clone_from(cookie),
                    _ => {}
                }
            }
        }
    }

    /// After a failure, adds the remaining packets to the trace.
    fn note_the_rest(&mut self) {
        while self.next_packet(now()).is_some() {}
    }

    fn told(&self) -> Vec<String> {
        let mut trace = self.trace.clone();
        trace.sort_by_key(|(at, _)| *at);
        let line = |(at, text): &(Duration, String)| {
            format!("{:8.4} {text}", at.saturating_sub(self.start).as_secs_f64())
        };
        trace.iter().map(line).collect()
    }
}

fn flow_tag(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!("[{name}] "),
    }
}

/// Returns all flows of a script, the one without a name first.
fn flow_names(script: &Script) -> Vec<String> {
    let mut names = vec![String::new()];
    for step in &script.steps {
        let name = match &step.action {
            Action::Inject(packet) | Action::Expect(packet) | Action::Allow(packet) => {
                packet.flow.clone()
            }
            Action::Call { call, .. } | Action::Start { call, .. } => {
                calls::flow_name(call).unwrap_or_default()
            }
            _ => continue,
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}
