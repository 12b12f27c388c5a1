//! The path between the hosts: runs a program step by step, and checks both hosts after each step.

use core::time::Duration;
use std::collections::VecDeque;

use bolero::TypeGenerator;
use portolan_proto::filter::RecordHeader;
use portolan_tcp::{Config, CongestionKind, EcnMode};
use portolan_types::Instant;

use crate::device::{Flying, too_big};
use crate::host::Host;

const START: Instant = Instant::from_millis(1_000_000);
const DELAY: Duration = Duration::from_millis(5);
/// The longest pause of a live connection is a time-out of two minutes.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Both ends become idle: after TIME-WAIT, or R2 if the peer is gone.
const FOREVER: Duration = Duration::from_secs(4 * 3600);
const EVENTS: usize = 100_000;
/// Path MTUs of routers: at least 552 bytes for IPv4, and 1280 for IPv6.
const WIDTHS: [u32; 4] = [1280, 1300, 1400, 1499];
/// Where the checksums' coverage begins: behind the Ethernet header, and the first words of the IPv6 header.
const COVERED_V4: usize = 14;
const COVERED_V6: usize = 22;

#[derive(Clone, Debug, TypeGenerator)]
pub(crate) struct Setup {
    family: u8,
    flags: u8,
    congestion: u8,
    buffers: (u8, u8),
    /// The handshake is completed before the hostility begins.
    established: bool,
}

impl Setup {
    pub(crate) const fn plain(family: u8) -> Setup {
        Setup {
            family,
            flags: 0,
            congestion: 0,
            buffers: (7, 7),
            established: true,
        }
    }

    fn config(&self) -> Config {
        let size = |code: u8| 2048usize << (code % 8);
        let (send, receive) = (size(self.buffers.0), size(self.buffers.1));
        Config {
            mss: if self.family.is_multiple_of(2) {
                1460
            } else {
                1440
            },
            send_buffer: send,
            send_buffer_max: 2 * send,
            receive_buffer: receive,
            receive_buffer_max: 2 * receive,
            timestamps: self.flags & 1 == 0,
            sack: self.flags & 2 == 0,
            window_scaling: self.flags & 4 == 0,
            ecn: match self.flags & 8 {
                0 => EcnMode::Accept,
                _ => EcnMode::Request,
            },
            congestion: CongestionKind::ALL[usize::from(self.congestion % 3)],
            ..Config::default()
        }
    }
}

/// `who` is true for the second host.
#[derive(Clone, Debug, TypeGenerator)]
pub(crate) enum Step {
    Write {
        who: bool,
        bytes: u16,
    },
    Read {
        who: bool,
        bytes: u16,
    },
    /// The packet at that place in the queue of those in flight from `who` arrives.
    Deliver {
        who: bool,
        place: u8,
    },
    DeliverAll(bool),
    Drop {
        who: bool,
        place: u8,
    },
    Duplicate {
        who: bool,
        place: u8,
    },
    /// One of its bits flips.
    Damage {
        who: bool,
        place: u8,
        bit: u16,
    },
    /// A router reduces its MTU.
    Narrow(u8),
    /// The session migrates to the other holder, after that many frames were delivered to the old one.
    Move {
        who: bool,
        waiting: u8,
    },
    Wait(u8),
    /// Everything arrives and is read, a few times.
    Calm(u8),
}

pub(crate) struct Arena {
    now: Instant,
    hosts: [Host; 2],
    width: u32,
    reports: u32,
}

impl Arena {
    pub(crate) fn new(setup: &Setup) -> Arena {
        let (one, two) = match setup.family % 2 {
            0 => ("10.0.0.1:1000", "10.0.0.2:2000"),
            _ => ("[fd00::1]:1000", "[fd00::2]:2000"),
        };
        let parse = |text: &str| text.parse().expect("an address");
        let (one, two) = (parse(one), parse(two));
        let mut arena = Arena {
            now: START,
            hosts: [
                Host::new(START, one, two, setup.config()),
                Host::new(START, two, one, setup.config()),
            ],
            width: u32::MAX,
            reports: 0,
        };
        arena.hosts[0].connect(START);
        arena.hosts[0].output(START);
        if setup.established {
            arena.calm(3);
        }
        arena
    }

    pub(crate) fn strays(&self) -> u32 {
        self.hosts[0].strays + self.hosts[1].strays
    }

    pub(crate) fn reports(&self) -> u32 {
        self.reports
    }

    /// Bytes that the second host has read.
    pub(crate) fn delivered(&self) -> u64 {
        self.hosts[1].read
    }

    pub(crate) fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.apply(step);
            for host in &mut self.hosts {
                host.output(self.now);
                host.check();
            }
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write { who, bytes } => self.write(who.into(), bytes.into()),
            Step::Read { who, bytes } => self.read(who.into(), bytes.into()),
            Step::Deliver { who, place } => {
                if let Some(packet) = self.take(who.into(), place) {
                    self.pass(who.into(), packet);
                    self.poll();
                }
            }
            Step::DeliverAll(who) => self.deliver_all(who.into()),
            Step::Drop { who, place } => drop(self.take(who.into(), place)),
            Step::Duplicate { who, place } => {
                if let Some(packet) = self.take(who.into(), place) {
                    let flying = &mut self.hosts[usize::from(who)].flying;
                    flying.extend([packet.clone(), packet]);
                }
            }
            Step::Damage { who, place, bit } => {
                if let Some(packet) = self.take(who.into(), place) {
                    self.damage(who.into(), packet.frame, bit.into());
                }
            }
            Step::Narrow(code) => self.width = WIDTHS[usize::from(code) % WIDTHS.len()],
            Step::Move { who, waiting } => self.move_session(who.into(), waiting % 8),
            Step::Wait(millis) => {
                self.now += Duration::from_millis(u64::from(millis).pow(2) / 8);
                self.run_timers();
            }
            Step::Calm(times) => self.calm(times % 8),
        }
    }

    // ---- the users ----

    fn write(&mut self, who: usize, bytes: usize) {
        let now = self.now;
        let host = &mut self.hosts[who];
        let data: Vec<u8> = (host.written..host.written + bytes as u64)
            .map(|position| host.byte(position))
            .collect();
        let Some(connection) = host.connection().filter(|c| !c.is_closed()) else {
            return;
        };
        let count = connection.send(now, &data);
        host.written += count as u64;
        host.touch();
        host.output(now);
    }

    fn read(&mut self, who: usize, bytes: usize) {
        let now = self.now;
        let host = &mut self.hosts[who];
        let mut buffer = vec![0; bytes];
        let Some(connection) = host.connection() else {
            return;
        };
        let count = connection.recv(now, &mut buffer);
        let from = host.read;
        host.read += count as u64;
        host.touch();
        let peer = &self.hosts[1 - who];
        for (byte, position) in buffer[..count].iter().zip(from..) {
            assert!(position < peer.written, "a byte that nobody wrote");
            assert_eq!(*byte, peer.byte(position), "byte {position}");
        }
        self.hosts[who].output(now);
    }

    fn close(&mut self, who: usize) {
        let now = self.now;
        let host = &mut self.hosts[who];
        if let Some(connection) = host.connection() {
            connection.shutdown_send(now);
            host.touch();
            host.output(now);
        }
    }

    fn move_session(&mut self, who: usize, waiting: u8) {
        for _ in 0..waiting {
            if let Some(packet) = self.take(1 - who, 0) {
                self.pass(1 - who, packet);
            }
        }
        let now = self.now;
        self.hosts[who].move_session(now);
        self.poll();
        // Frames that were filtered again.
        self.poll();
    }

    // ---- the path ----

    fn take(&mut self, from: usize, place: u8) -> Option<Flying> {
        let flying = &mut self.hosts[from].flying;
        (!flying.is_empty()).then(|| flying.remove(usize::from(place) % flying.len()))
    }

    /// The packet reaches the other host, unless it is too large for the router.
    fn pass(&mut self, from: usize, packet: Flying) {
        let now = self.now;
        if packet.length() > self.width as usize {
            self.reports += 1;
            let report = too_big(&packet, self.width);
            self.hosts[from].filter(now, report, RecordHeader::ICMP_ERROR);
            return;
        }
        let scale = self.hosts[from].scale;
        let to = &mut self.hosts[1 - from];
        to.note_arrived(scale, &packet);
        to.filter(now, packet.frame, 0);
    }

    fn damage(&mut self, from: usize, mut frame: Vec<u8>, bit: usize) {
        let covered = if self.hosts[0].flow.local.is_ipv6() {
            COVERED_V6
        } else {
            COVERED_V4
        };
        let at = covered + bit / 8 % (frame.len() - covered);
        frame[at] ^= 1 << (bit % 8);
        self.hosts[1 - from].filter(self.now, frame, 0);
        self.poll();
    }

    fn poll(&mut self) {
        for host in &mut self.hosts {
            host.poll(self.now);
        }
    }

    fn deliver_all(&mut self, from: usize) {
        for packet in core::mem::take(&mut self.hosts[from].flying) {
            self.pass(from, packet);
            self.poll();
        }
    }

    fn run_timers(&mut self) {
        for host in &mut self.hosts {
            if host.deadline().is_some_and(|at| at <= self.now) {
                host.expire(self.now);
            }
        }
    }

    fn calm(&mut self, times: u8) {
        for _ in 0..times {
            self.now += Duration::from_millis(1);
            self.run_timers();
            for who in [0, 1] {
                self.deliver_all(who);
                self.read(1 - who, 1 << 16);
            }
        }
    }

    // ---- rest ----

    /// The path stays narrow but is otherwise reliable; the users read, then close.
    pub(crate) fn settle(&mut self) {
        let mut wire = VecDeque::new();
        self.go_on(&mut wire, TIMEOUT, Arena::is_delivered, "the streams");
        for who in [0, 1] {
            self.close(who);
        }
        self.go_on(&mut wire, FOREVER, Arena::is_over, "the end");
        let [one, two] = &self.hosts;
        assert_eq!((one.written, two.written), (two.read, one.read));
    }

    fn go_on(
        &mut self,
        wire: &mut VecDeque<(Instant, usize, Flying)>,
        limit: Duration,
        done: fn(&mut Arena) -> bool,
        what: &str,
    ) {
        let until = self.now + limit;
        for _ in 0..EVENTS {
            for who in [0, 1] {
                self.read(who, 1 << 17);
                let leaving = core::mem::take(&mut self.hosts[who].flying);
                let arrival = self.now + DELAY;
                wire.extend(leaving.into_iter().map(|packet| (arrival, who, packet)));
            }
            if done(self) {
                return;
            }
            let timers = self.hosts.iter().filter_map(Host::deadline).min();
            let next = wire
                .front()
                .map(|(at, ..)| *at)
                .into_iter()
                .chain(timers)
                .min();
            let next = next.unwrap_or_else(|| panic!("{what}: nothing will ever happen"));
            self.now = self.now.max(next);
            assert!(self.now < until, "{what}: not within {limit:?}");
            self.run_timers();
            while wire.front().is_some_and(|(at, ..)| *at <= self.now) {
                if let Some((_, from, packet)) = wire.pop_front() {
                    self.pass(from, packet);
                    self.poll();
                }
            }
        }
        panic!("{what}: endless events");
    }

    fn is_delivered(&mut self) -> bool {
        let [one, two] = &mut self.hosts;
        let opened = two.connection().is_some() && one.connection().is_some();
        opened && one.written == two.read && two.written == one.read
    }

    fn is_over(&mut self) -> bool {
        self.hosts
            .iter_mut()
            .all(|host| host.connection().is_none())
    }
}
