//! Loaded filters with the channels of two libraries, a way to run frames through them, and access to
//! the results.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapFlags, Object, ProgramInput, RingBufferBuilder};
use portolan_proto::filter::{
    BindingKey, Doorbell, FilterInterface, FilterSettings, FlowRow, RecordHeader, SenderKey,
};
use portolan_types::{ChannelId, FlowKey, MacAddr, Protocol};
use zerocopy::{FromBytes, IntoBytes};

use crate::channel::Maps;
use crate::filter::{Filter, Limits};
use crate::objects::Objects;

/// Verdicts of linux/pkt_cls.h.
pub(super) const UNSPEC: i32 = -1;
pub(super) const SHOT: i32 = 2;
pub(super) const STOLEN: i32 = 4;
pub(super) const REDIRECT: i32 = 7;

/// The input device of frames in a test run: it must exist, so it is lo.
pub(super) const IFINDEX: u32 = 1;
pub(super) const OWN_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(super) const EGRESS: u32 = 7;
/// The channel under test, and another one.
pub(super) const CHANNEL: ChannelId = ChannelId(1);
pub(super) const OTHER_CHANNEL: ChannelId = ChannelId(2);

const RING_SIZE: u32 = 1024 * 1024;

/// How much longer a program may make a frame.
const GROWTH: usize = 64;

pub(super) struct Bed {
    pub filter: Filter,
    objects: RefCell<Objects>,
    /// Loaded with its first use.
    driver_filter: RefCell<Option<Object>>,
    pub(super) maps: Maps,
    counted: RefCell<BTreeMap<(&'static str, &'static str), u64>>,
}

/// The result of running a program on a frame.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub verdict: i32,
    /// The counters that were incremented by one.
    pub counted: Vec<&'static str>,
}

/// Builds an outcome in one line.
pub(super) fn outcome(verdict: i32, counted: &[&'static str]) -> Outcome {
    Outcome {
        verdict,
        counted: counted.to_vec(),
    }
}

pub(super) fn row(channel: ChannelId) -> FlowRow {
    FlowRow {
        channel: channel.0,
        slot: 77,
        generation: 5,
        ..FlowRow::default()
    }
}

/// A row of a shared port that belongs to another channel.
pub(super) fn shared_row() -> FlowRow {
    FlowRow {
        flags: FlowRow::SHARED,
        ..row(OTHER_CHANNEL)
    }
}

/// The right of the channel under test to send from such a port.
pub(super) fn sender(binding: BindingKey) -> SenderKey {
    SenderKey {
        binding,
        channel: CHANNEL.0,
    }
}

/// One flow of each family, for `protocol`.
pub(super) fn flows(protocol: Protocol) -> [FlowKey; 2] {
    let flow = |local: &str, remote: &str| FlowKey {
        protocol,
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
    };
    [
        flow("10.0.0.1:80", "10.0.0.2:40000"),
        flow("[fd00::1]:80", "[fd00::2]:40000"),
    ]
}

pub(super) fn local_addresses() -> [IpAddr; 2] {
    flows(Protocol::Tcp).map(|flow| flow.local.ip())
}

/// The unspecified address of the flow's family with its local port.
pub(super) fn any_address(flow: &FlowKey) -> SocketAddr {
    let unspecified = if flow.local.is_ipv4() {
        "0.0.0.0"
    } else {
        "::"
    };
    SocketAddr::new(unspecified.parse().unwrap(), flow.local.port())
}

pub(super) const LIMITS: Limits = Limits {
    flows: 1024,
    bindings: 64,
    shared: 8,
    groups: 8,
    channels: 8,
};

impl Bed {
    pub(super) fn new() -> Bed {
        Bed::with(FilterSettings::default())
    }

    pub(super) fn with(settings: FilterSettings) -> Bed {
        let limits = LIMITS;
        let objects = Objects::load(&limits, &settings, None).expect("the tests run as root");
        let mut filter = Filter::of(&objects, &limits, &settings).unwrap();
        let maps = Maps::create(RING_SIZE).unwrap();
        filter.map_builder().install(&[(CHANNEL, &maps)]).unwrap();
        filter.register_tap(CHANNEL, IFINDEX).unwrap();
        let interface = FilterInterface {
            ifindex: EGRESS,
            mac: OWN_MAC.0,
            reserved: [0; 2],
        };
        let other = FilterInterface {
            ifindex: 3,
            mac: [9; 6],
            reserved: [0; 2],
        };
        filter.set_interfaces(&[other, interface]).unwrap();
        filter.set_local_addresses(&local_addresses(), &[]).unwrap();
        Bed {
            filter,
            objects: RefCell::new(objects),
            driver_filter: RefCell::default(),
            maps,
            counted: RefCell::default(),
        }
    }

    /// Runs one frame through a program.
    pub(super) fn run(&self, program: &str, frame: &[u8]) -> Outcome {
        self.run_with(program, frame, &mut Context::default())
    }

    pub(super) fn run_with(&self, program: &str, frame: &[u8], context: &mut Context) -> Outcome {
        self.run_and_see(program, frame, context).0
    }

    /// Like [`Bed::run`], for a program at XDP, where a frame has no context but its device.
    pub(super) fn run_in_driver(&self, program: &str, frame: &[u8]) -> Outcome {
        self.newly_counted();
        let object = self.driver_filter();
        let mut programs = object.progs_mut();
        let program = programs.find(|candidate| candidate.name() == program);
        let input = ProgramInput {
            data_in: Some(frame),
            ..ProgramInput::default()
        };
        let verdict = program.unwrap().test_run(input).unwrap().return_value as i32;
        Outcome {
            verdict,
            counted: self.newly_counted(),
        }
    }

    /// Also returns the frame as the program left it.
    pub(super) fn run_and_see(
        &self,
        program: &str,
        frame: &[u8],
        context: &mut Context,
    ) -> (Outcome, Vec<u8>) {
        self.newly_counted();
        let mut left = vec![0; frame.len() + GROWTH];
        let verdict = self.test_run(program, frame, context, 1, Some(&mut left)).0;
        let outcome = Outcome {
            verdict,
            counted: self.newly_counted(),
        };
        (outcome, left)
    }

    /// Has the packet filter see the same frame many times in a row, without delay. Returns by how much the counter grew.
    pub(super) fn times_counted(&self, name: &str, frame: &[u8], times: u32) -> u64 {
        let count = || {
            let mut counters = self.filter.counters().into_iter();
            counters
                .find(|counter| counter.name == name)
                .map_or(0, |counter| counter.value)
        };
        let before = count();
        self.test_run("packet_filter", frame, &mut Context::default(), times, None);
        let seen = self.filter.counters().into_iter();
        *self.counted.borrow_mut() = seen
            .map(|counter| ((counter.group, counter.name), counter.value))
            .collect();
        count() - before
    }

    /// Mean duration over many runs; `after` is called between batches, to drain the ring.
    pub(super) fn time(&self, program: &str, frame: &[u8], mut after: impl FnMut()) -> Duration {
        const BATCHES: u32 = 50;
        let total: Duration = (0..BATCHES)
            .map(|_| {
                let (_, duration) =
                    self.test_run(program, frame, &mut Context::default(), 100, None);
                after();
                duration
            })
            .sum();
        total / BATCHES
    }

    /// Takes all records out of the channel's ring.
    pub(super) fn records(&self) -> Vec<(RecordHeader, Vec<u8>)> {
        records_of(&self.maps)
    }

    /// Adds a ring with a doorbell.
    pub(super) fn add_ring(&self, number: ChannelId) -> Maps {
        let maps = Maps::create(RING_SIZE).unwrap();
        self.filter
            .map_builder()
            .install(&[(number, &maps)])
            .unwrap();
        maps
    }

    pub(super) fn doorbell(&self) -> Doorbell {
        doorbell_of(&self.maps)
    }

    pub(super) fn set_doorbell(&self, state: u32) {
        let doorbell = Doorbell {
            state,
            ..Doorbell::default()
        };
        self.maps
            .doorbell
            .update(&[0; 4], doorbell.as_bytes(), MapFlags::ANY)
            .unwrap();
    }

    /// The channel's owner is awake, last polled at that time, and must be woken for frames that it does not poll.
    pub(super) fn want_attention(&self, attended_at: u64) {
        let doorbell = Doorbell {
            attended_at,
            wants_attention: 1,
            ..Doorbell::default()
        };
        self.maps
            .doorbell
            .update(&[0; 4], doorbell.as_bytes(), MapFlags::ANY)
            .unwrap();
    }

    /// Like [`Bed::want_attention`], for an owner limited by a window.
    pub(super) fn await_window(&self) {
        let doorbell = Doorbell {
            wants_attention: 1,
            awaits_window: 1,
            ..Doorbell::default()
        };
        self.maps
            .doorbell
            .update(&[0; 4], doorbell.as_bytes(), MapFlags::ANY)
            .unwrap();
    }

    fn driver_filter(&self) -> RefMut<'_, Object> {
        let object = self.driver_filter.borrow_mut();
        RefMut::map(object, |object| {
            object.get_or_insert_with(|| {
                let prepared = self.objects.borrow().driver_filter().unwrap();
                prepared.load().unwrap()
            })
        })
    }

    /// Each program's number of instructions, and how many the verifier processed.
    pub(super) fn program_sizes(&self) -> Vec<(String, usize, u32)> {
        let driver_filter = self.driver_filter();
        let mut objects = self.objects.borrow_mut();
        let size = |program: libbpf_rs::ProgramMut<'_>| {
            let id = libbpf_rs::Program::id_from_fd(program.as_fd()).unwrap();
            let with_code = ProgInfoQueryOptions::default().include_xlated_prog_insns(true);
            let info = ProgInfoIter::with_query_opts(with_code)
                .find(|info| info.id == id)
                .unwrap();
            (
                program.name().to_str().unwrap().to_owned(),
                info.xlated_prog_insns.len() / 8,
                info.verified_insns,
            )
        };
        objects
            .programs_mut()
            .chain(driver_filter.progs_mut())
            .map(size)
            .collect()
    }

    pub(super) fn test_run(
        &self,
        program: &str,
        frame: &[u8],
        context: &mut Context,
        repeat: u32,
        left: Option<&mut Vec<u8>>,
    ) -> (i32, Duration) {
        let mut objects = self.objects.borrow_mut();
        let program = objects
            .programs_mut()
            .find(|candidate| candidate.name() == program)
            .unwrap();
        let mut context_left = context.0;
        let mut nothing = Vec::new();
        let left = left.unwrap_or(&mut nothing);
        let input = ProgramInput {
            data_in: Some(frame),
            context_in: Some(&mut context.0),
            context_out: Some(&mut context_left),
            repeat,
            data_out: Some(left.as_mut_slice()).filter(|left| !left.is_empty()),
            ..ProgramInput::default()
        };
        let output = program.test_run(input).unwrap();
        let (verdict, duration) = (output.return_value as i32, output.duration);
        let length = output.data.map_or(0, |data| data.len());
        left.truncate(length);
        context.0 = context_left;
        (verdict, duration)
    }

    /// Names of the counters incremented by one since the last call; a larger increment is a bug.
    fn newly_counted(&self) -> Vec<&'static str> {
        let mut before = self.counted.borrow_mut();
        let mut names = Vec::new();
        for counter in self.filter.counters() {
            let old = before
                .insert((counter.group, counter.name), counter.value)
                .unwrap_or(0);
            assert!(counter.value - old <= 1, "{} counted twice", counter.name);
            if counter.value != old {
                names.push(counter.name);
            }
        }
        names
    }
}

pub(super) fn records_of(maps: &Maps) -> Vec<(RecordHeader, Vec<u8>)> {
    let records = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&records);
    let mut builder = RingBufferBuilder::new();
    builder
        .add(&maps.ring, move |record: &[u8]| {
            let (header, rest) = RecordHeader::read_from_prefix(record).unwrap();
            sink.borrow_mut()
                .push((header, rest[..header.length as usize].to_vec()));
            0
        })
        .unwrap();
    let ring = builder.build().unwrap();
    ring.consume().unwrap();
    drop(ring);
    records.take()
}

pub(super) fn doorbell_of(maps: &Maps) -> Doorbell {
    let page = maps.doorbell.lookup(&[0; 4], MapFlags::ANY).unwrap();
    Doorbell::read_from_bytes(&page.unwrap()).unwrap()
}

/// `struct __sk_buff` of linux/bpf.h, of which a test run uses a few fields.
pub(super) struct Context([u8; 192]);

impl Default for Context {
    fn default() -> Context {
        let mut context = Context([0; 192]);
        context.set(40, IFINDEX);
        context
    }
}

impl Context {
    /// The priority after the last run.
    pub(super) fn priority(&self) -> u32 {
        u32::from_ne_bytes(self.0[32..36].try_into().unwrap())
    }

    pub(super) fn with_gso_size(gso_size: u32) -> Context {
        let mut context = Context::default();
        context.set(176, gso_size);
        context
    }

    pub(super) fn with_mark(mark: u32) -> Context {
        let mut context = Context::default();
        context.set(8, mark);
        context
    }

    fn set(&mut self, offset: usize, value: u32) {
        self.0[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    }
}
