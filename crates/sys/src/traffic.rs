//! Traffic control: installs HTB on a device, changes its classes, reads their counters, and saves a user's
//! configuration for restoring. Messages are built by hand, since what is saved must be kept exactly as the kernel gave
//! it.

mod message;

use rustix::io::Errno;

use message::{Attributes, Kernel, Reader};

#[cfg(test)]
mod tests;

/// "po": major number of Portolan's qdisc, by which a leftover is recognised.
pub const HANDLE: u16 = portolan_proto::filter::TRAFFIC_HANDLE;
/// The class of the whole link, and its child for all traffic without a reservation.
pub const WHOLE: u16 = 1;
pub const BEST_EFFORT: u16 = portolan_proto::filter::BEST_EFFORT_CLASS;

const NEW_QDISC: u16 = 36;
const DELETE_QDISC: u16 = 37;
const GET_QDISC: u16 = 38;
const NEW_CLASS: u16 = 40;
const DELETE_CLASS: u16 = 41;
const GET_CLASS: u16 = 42;
const GET_FILTER: u16 = 46;

const ROOT: u32 = 0xffff_ffff;
/// Parent of ingress and clsact, which do not affect output.
const INGRESS: u32 = 0xffff_fff1;

/// Attributes of linux/rtnetlink.h and linux/pkt_sched.h.
const KIND: u16 = 1;
const OPTIONS: u16 = 2;
const STATS2: u16 = 7;
const STATS_BASIC: u16 = 1;
const STATS_QUEUE: u16 = 3;
const STATS_PACKETS64: u16 = 8;
const HTB_PARMS: u16 = 1;
const HTB_INIT: u16 = 2;
const HTB_DIRECT_QLEN: u16 = 5;
const HTB_RATE64: u16 = 6;
const HTB_CEIL64: u16 = 7;

const HTB_VERSION: u32 = 3;
const LINK_LAYER_ETHERNET: u8 = 1;
/// Nanoseconds in the unit of times in `tc_htb_opt`.
const TICK_NS: u128 = 64;

/// Limit of frames queued in a class. The limit in bytes holds senders back long before.
const FRAMES_WAITING: u32 = 16_384;

/// Qdiscs that can be restored from what the kernel reports of them.
const RESTORABLE: [&str; 11] = [
    "bfifo",
    "cake",
    "codel",
    "fq",
    "fq_codel",
    "fq_pie",
    "htb",
    "pfifo",
    "pfifo_fast",
    "pie",
    "sfq",
];

/// A class: rates in bits per second, bursts in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    pub minor: u16,
    pub parent: u16,
    pub rate: u64,
    pub ceiling: u64,
    pub burst: u32,
    pub ceiling_burst: u32,
    /// Share in the distribution of unused bandwidth.
    pub quantum: u32,
    /// Lower values go first.
    pub priority: u32,
}

/// Counters of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub bytes: u64,
    pub packets: u64,
    pub drops: u32,
    /// Bytes queued.
    pub backlog: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum TrafficError {
    #[error("cannot open a netlink socket: {0}")]
    Open(Errno),
    #[error("cannot {what}: {errno}")]
    Kernel { what: &'static str, errno: Errno },
    #[error("somebody else has the lock of the network's configuration")]
    Held,
    #[error(
        "the queueing discipline {kind} {handle:x}: is there; `replace = true` of the link would take its place"
    )]
    InTheWay { kind: String, handle: u16 },
    #[error("the queueing discipline {kind} {handle:x}: cannot be put back afterwards: {why}")]
    NotRestorable {
        kind: String,
        handle: u16,
        why: &'static str,
    },
}

/// What to do with a qdisc that a user has put on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    Keep,
    Replace,
}

/// A qdisc or a class as reported by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    handle: u32,
    parent: u32,
    kind: String,
    options: Vec<u8>,
}

/// The former state of a device: nothing, or a user's qdiscs and classes, parents first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Before {
    disciplines: Vec<Told>,
    classes: Vec<Told>,
}

impl Before {
    /// The name as `tc qdisc show` prints it.
    pub fn name(&self) -> Option<String> {
        let root = self.disciplines.first()?;
        Some(format!("{} {:x}:", root.kind, root.handle >> 16))
    }

    /// Encodes it as one word, for [`Before::parse`] in another process.
    pub fn record(&self) -> String {
        let line = |tag: char, told: &Told| {
            let options: String = told
                .options
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            format!(
                "{tag}:{:x}:{:x}:{}:{options}",
                told.handle, told.parent, told.kind
            )
        };
        let disciplines = self.disciplines.iter().map(|told| line('q', told));
        let classes = self.classes.iter().map(|told| line('c', told));
        disciplines.chain(classes).collect::<Vec<_>>().join(",")
    }

    /// Skips what it does not understand.
    pub fn parse(record: &str) -> Before {
        let mut before = Before::default();
        for entry in record.split(',') {
            let Some((tag, told)) = parse_told(entry) else {
                continue;
            };
            match tag {
                "q" => before.disciplines.push(told),
                _ => before.classes.push(told),
            }
        }
        before
    }
}

fn parse_told(entry: &str) -> Option<(&str, Told)> {
    let fields: Vec<&str> = entry.split(':').collect();
    let [tag, handle, parent, kind, options] = fields[..] else {
        return None;
    };
    let options = (0..options.len() / 2)
        .map(|at| u8::from_str_radix(options.get(at * 2..at * 2 + 2)?, 16).ok());
    let told = Told {
        handle: u32::from_str_radix(handle, 16).ok()?,
        parent: u32::from_str_radix(parent, 16).ok()?,
        kind: kind.to_owned(),
        options: options.collect::<Option<Vec<u8>>>()?,
    };
    Some((tag, told))
}

/// A socket for requests to the kernel, in the namespace in which it was opened.
#[derive(Debug)]
pub struct Traffic {
    kernel: Kernel,
}

impl Traffic {
    pub fn open() -> Result<Traffic, TrafficError> {
        let kernel = Kernel::open().map_err(TrafficError::Open)?;
        Ok(Traffic { kernel })
    }

    /// Whether the device has a server's qdisc, possibly of a dead one.
    pub fn is_ours(&mut self, ifindex: u32) -> Result<bool, TrafficError> {
        let disciplines = self.disciplines(ifindex)?;
        Ok(disciplines
            .iter()
            .any(|told| told.parent == ROOT && is_ours(told)))
    }

    /// Examines a device; fails if its qdisc must stay or could not be restored. A leftover of Portolan is ignored.
    pub fn look(&mut self, ifindex: u32, foreign: Foreign) -> Result<Before, TrafficError> {
        let mut disciplines = self.disciplines(ifindex)?;
        disciplines.retain(|told| told.parent != INGRESS && told.handle != 0);
        let Some(root) = disciplines.iter().find(|told| told.parent == ROOT) else {
            return Ok(Before::default());
        };
        let (kind, handle) = (root.kind.clone(), (root.handle >> 16) as u16);
        if is_ours(root) {
            return Ok(Before::default());
        }
        if foreign == Foreign::Keep {
            return Err(TrafficError::InTheWay { kind, handle });
        }
        let not_restorable = |why| TrafficError::NotRestorable {
            kind: kind.clone(),
            handle,
            why,
        };
        if let Some(other) = disciplines
            .iter()
            .find(|told| !RESTORABLE.contains(&told.kind.as_str()))
        {
            return Err(TrafficError::NotRestorable {
                kind: other.kind.clone(),
                handle: (other.handle >> 16) as u16,
                why: "its settings cannot be read back whole",
            });
        }
        let mut classes = self.classes(ifindex)?;
        classes.retain(|told| told.kind == "htb");
        for told in disciplines.iter().chain(&classes) {
            if self.has_filters(ifindex, told.handle)? {
                return Err(not_restorable("it has filters"));
            }
        }
        disciplines.sort_by_key(|told| told.parent != ROOT);
        for told in disciplines.iter_mut().filter(|told| told.kind == "htb") {
            told.options = repeatable(&told.options);
        }
        Ok(Before {
            disciplines,
            classes: parents_first(classes),
        })
    }

    /// Replaces the root qdisc of a device by Portolan's HTB.
    pub fn put(&mut self, ifindex: u32) -> Result<(), TrafficError> {
        let mut init = Vec::new();
        for word in [HTB_VERSION, 10, u32::from(BEST_EFFORT), 0, 0] {
            init.extend(word.to_ne_bytes());
        }
        let options = Attributes::default().with(HTB_INIT, &init);
        let told = Told {
            handle: u32::from(HANDLE) << 16,
            parent: ROOT,
            kind: "htb".to_owned(),
            options: options.bytes(),
        };
        self.remove(ifindex)?;
        self.create(NEW_QDISC, ifindex, &told)
            .map_err(|errno| failed("put HTB on the device", errno))
    }

    /// Removes the root qdisc of a device, which gets the kernel's default again.
    pub fn remove(&mut self, ifindex: u32) -> Result<(), TrafficError> {
        match self.kernel.change(DELETE_QDISC, 0, ifindex, (0, ROOT), &[]) {
            // The device has only the default, or no longer exists.
            Ok(()) | Err(Errno::NOENT | Errno::INVAL | Errno::NODEV) => Ok(()),
            Err(errno) => Err(failed("take a queueing discipline off", errno)),
        }
    }

    /// Restores the former qdiscs and classes.
    pub fn restore(&mut self, ifindex: u32, before: &Before) -> Result<(), TrafficError> {
        self.remove(ifindex)?;
        let is_root = |told: &&Told| told.parent == ROOT;
        let put_back = |errno| failed("put the former queueing discipline back", errno);
        for told in before.disciplines.iter().filter(is_root) {
            self.create(NEW_QDISC, ifindex, told).map_err(put_back)?;
        }
        for told in &before.classes {
            self.create(NEW_CLASS, ifindex, told).map_err(put_back)?;
        }
        for told in before.disciplines.iter().filter(|told| !is_root(told)) {
            self.create(NEW_QDISC, ifindex, told).map_err(put_back)?;
        }
        Ok(())
    }

    /// Gives a leaf class a queue with room for the frames of many senders.
    pub fn set_queue(&mut self, ifindex: u32, minor: u16) -> Result<(), TrafficError> {
        let told = Told {
            handle: 0,
            parent: number(minor),
            kind: "pfifo".to_owned(),
            options: FRAMES_WAITING.to_ne_bytes().to_vec(),
        };
        self.create(NEW_QDISC, ifindex, &told)
            .map_err(|errno| failed("set the queue of a class", errno))
    }

    /// Creates or changes one of Portolan's classes, which may be in use.
    pub fn set_class(&mut self, ifindex: u32, class: &Class) -> Result<(), TrafficError> {
        let told = Told {
            handle: number(class.minor),
            parent: match class.parent {
                0 => u32::from(HANDLE) << 16,
                parent => number(parent),
            },
            kind: "htb".to_owned(),
            options: options_of(class),
        };
        self.create(NEW_CLASS, ifindex, &told)
            .map_err(|errno| failed("set a class", errno))
    }

    /// Removes one of Portolan's classes with its queue. Succeeds if it does not exist.
    pub fn delete_class(&mut self, ifindex: u32, minor: u16) -> Result<(), TrafficError> {
        match self
            .kernel
            .change(DELETE_CLASS, 0, ifindex, (number(minor), 0), &[])
        {
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::INVAL) => Ok(()),
            Err(errno) => Err(failed("remove a class", errno)),
        }
    }

    /// The counters of the classes of Portolan's qdisc on a device, by minor number.
    pub fn counts(&mut self, ifindex: u32) -> Result<Vec<(u16, Counts)>, TrafficError> {
        let mut counts = Vec::new();
        self.kernel
            .dump(GET_CLASS, ifindex, 0, |header, attributes| {
                if header.handle >> 16 == u32::from(HANDLE) {
                    counts.push((header.handle as u16, counts_of(attributes)));
                }
            })
            .map_err(|errno| failed("read the classes", errno))?;
        Ok(counts)
    }

    fn disciplines(&mut self, ifindex: u32) -> Result<Vec<Told>, TrafficError> {
        self.table(GET_QDISC, ifindex, 0)
    }

    fn classes(&mut self, ifindex: u32) -> Result<Vec<Told>, TrafficError> {
        self.table(GET_CLASS, ifindex, 0)
    }

    fn has_filters(&mut self, ifindex: u32, parent: u32) -> Result<bool, TrafficError> {
        match self.table(GET_FILTER, ifindex, parent) {
            Ok(filters) => Ok(!filters.is_empty()),
            // Some qdiscs do not support filters.
            Err(TrafficError::Kernel {
                errno: Errno::INVAL | Errno::OPNOTSUPP | Errno::NOENT,
                ..
            }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn table(
        &mut self,
        message: u16,
        ifindex: u32,
        parent: u32,
    ) -> Result<Vec<Told>, TrafficError> {
        let mut table = Vec::new();
        self.kernel
            .dump(message, ifindex, parent, |header, attributes| {
                if header.ifindex == ifindex {
                    table.push(Told {
                        handle: header.handle,
                        parent: header.parent,
                        kind: attributes.text(KIND),
                        options: attributes.bytes(OPTIONS).to_vec(),
                    });
                }
            })
            .map_err(|errno| failed("read the queueing disciplines", errno))?;
        Ok(table)
    }

    fn create(&mut self, message: u16, ifindex: u32, told: &Told) -> Result<(), Errno> {
        let mut attributes = Attributes::default().with(KIND, &terminated(&told.kind));
        if !told.options.is_empty() {
            attributes = attributes.with(OPTIONS, &told.options);
        }
        let names = (told.handle, told.parent);
        self.kernel.change(
            message,
            message::CREATE,
            ifindex,
            names,
            &attributes.bytes(),
        )
    }
}

fn is_ours(told: &Told) -> bool {
    told.kind == "htb" && told.handle == u32::from(HANDLE) << 16
}

/// The options of an HTB in the form that the kernel accepts: it reports a longer one.
fn repeatable(options: &[u8]) -> Vec<u8> {
    let options = Reader::of(options);
    let mut init = options.bytes(HTB_INIT).to_vec();
    if let Some(version) = init.first_chunk_mut() {
        *version = HTB_VERSION.to_ne_bytes();
    }
    Attributes::default()
        .with(HTB_INIT, &init)
        .with(HTB_DIRECT_QLEN, options.bytes(HTB_DIRECT_QLEN))
        .bytes()
}

fn failed(what: &'static str, errno: Errno) -> TrafficError {
    TrafficError::Kernel { what, errno }
}

fn number(minor: u16) -> u32 {
    u32::from(HANDLE) << 16 | u32::from(minor)
}

fn terminated(kind: &str) -> Vec<u8> {
    kind.bytes().chain([0]).collect()
}

/// Sorts each class behind its parent.
fn parents_first(mut classes: Vec<Told>) -> Vec<Told> {
    let mut sorted: Vec<Told> = Vec::new();
    while !classes.is_empty() {
        let waits = |told: &Told| classes.iter().any(|other| other.handle == told.parent);
        let (later, now): (Vec<Told>, Vec<Told>) = classes.iter().cloned().partition(waits);
        if now.is_empty() {
            // A cycle, which the kernel does not create.
            return sorted;
        }
        sorted.extend(now);
        classes = later;
    }
    sorted
}

/// `tc_htb_opt`, whose rates have only 32 bits, with the full rates beside it.
fn options_of(class: &Class) -> Vec<u8> {
    let (rate, ceiling) = (class.rate / 8, class.ceiling / 8);
    let mut parms = Vec::new();
    for bytes in [rate, ceiling] {
        let short = u32::try_from(bytes).unwrap_or(u32::MAX);
        parms.extend([0, LINK_LAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
        parms.extend(short.to_ne_bytes());
    }
    let buffers = [
        ticks(class.burst, rate),
        ticks(class.ceiling_burst, ceiling),
    ];
    for word in buffers
        .into_iter()
        .chain([class.quantum, 0, class.priority])
    {
        parms.extend(word.to_ne_bytes());
    }
    Attributes::default()
        .with(HTB_PARMS, &parms)
        .with(HTB_RATE64, &rate.to_ne_bytes())
        .with(HTB_CEIL64, &ceiling.to_ne_bytes())
        .bytes()
}

/// The time that `bytes` take at `rate` bytes per second, in ticks.
fn ticks(bytes: u32, rate: u64) -> u32 {
    let ticks = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1)) / TICK_NS;
    u32::try_from(ticks).unwrap_or(u32::MAX).max(1)
}

fn counts_of(attributes: &Reader<'_>) -> Counts {
    let stats = attributes.nested(STATS2);
    let (basic, queue) = (stats.bytes(STATS_BASIC), stats.bytes(STATS_QUEUE));
    let long = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 8)?;
        bytes.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
    };
    let short = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 4)?;
        bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
    };
    Counts {
        bytes: long(basic, 0).unwrap_or(0),
        packets: long(stats.bytes(STATS_PACKETS64), 0)
            .or(short(basic, 8).map(u64::from))
            .unwrap_or(0),
        backlog: short(queue, 4).unwrap_or(0),
        drops: short(queue, 8).unwrap_or(0),
    }
}
