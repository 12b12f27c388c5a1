//! Connections of the previous server's time: the kernel's tables still have their rows, and the processes that hold them
//! their state (ADR 34). A process shows the ring of its channel, gets the channel back, and names its connections, each
//! of which the row of its flow confirms. What nobody has named after a while is reset.

mod ends;
mod handover;
mod held;
pub(crate) mod left_ends;
mod serve;
pub(crate) mod unpaired;
mod within_host;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_bpf::{
    Filter, InheritError, Inheritance as Left, InheritedChannel, Limits, LoadError, Predecessor,
    TableError,
};
use portolan_proto::filter::{BindingKey, FilterKey, FilterSettings, FlowRow};
use portolan_sys::device;
use portolan_sys::sched::LongSlice;
use portolan_types::{ChannelId, FlowKey, Generation, Instant, Protocol, SessionId, Slot};
use tracing::{info, warn};

use crate::adoption::held::{LeftConnection, Leftovers};
use crate::adoption::left_ends::Ends;
use crate::supervisor;

/// How long processes may take to come and name what they hold. They look for a server at intervals of at most 250 ms.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The performer of each bucket, and its slot.
pub(crate) type Buckets = BTreeMap<u32, (ChannelId, Slot)>;

/// What has not been named yet.
#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    channels: HashMap<ChannelId, InheritedChannel>,
    /// Channels that their processes have.
    claimed: BTreeSet<ChannelId>,
    flows: HashMap<FilterKey, FlowRow>,
    /// Ports with connections that only their processes know.
    ports: HashMap<BindingKey, FlowRow>,
    /// Of those ports whose flows are dealt, the buckets that processes have.
    buckets: HashMap<BindingKey, Buckets>,
    /// Connections that the previous server itself held.
    held: Vec<LeftConnection>,
    /// Where these and the ends are for another start, if this one fails.
    messages: Option<OwnedFd>,
    /// Of connections that processes hold.
    pub(crate) ends: Ends,
    /// Those of them that wait for their listeners.
    queued: HashMap<SessionId, Vec<SessionId>>,
    /// To be reset.
    abandoned: VecDeque<(FilterKey, FlowRow)>,
    until: Option<Instant>,
}

impl Inheritance {
    /// Connections whose process has gone meanwhile, and its tap with it, are reset first.
    fn new(
        left: Left,
        (leftovers, messages): (Leftovers, Option<OwnedFd>),
        now: Instant,
    ) -> Inheritance {
        let is_there =
            |channel: &InheritedChannel| channel.taps.iter().any(|tap| device::exists(*tap));
        let gone: BTreeSet<ChannelId> = left
            .channels
            .iter()
            .filter(|(_, channel)| !is_there(channel))
            .map(|(number, _)| *number)
            .collect();
        let (abandoned, flows): (HashMap<_, _>, _) = left
            .flows
            .into_iter()
            .partition(|(_, row)| gone.contains(&ChannelId(row.channel)));
        let is_gone = |row: &FlowRow| gone.contains(&ChannelId(row.channel));
        let buckets: HashMap<BindingKey, Buckets> = left
            .buckets
            .into_iter()
            .map(|(key, rows)| {
                let there = rows.into_iter().filter(|(_, row)| !is_gone(row));
                let place = |row: FlowRow| (ChannelId(row.channel), Slot(row.slot));
                let there = there.map(|(bucket, row)| (bucket, place(row)));
                (key, there.collect::<Buckets>())
            })
            .filter(|(_, there)| !there.is_empty())
            .collect();
        let mut ports = left.ports;
        ports.retain(|key, row| !is_gone(row) || buckets.contains_key(key));
        let Leftovers {
            connections: held,
            ends,
        } = leftovers;
        let is_none = left.channels.is_empty() && held.is_empty() && ends.is_empty();
        Inheritance {
            until: (!is_none).then(|| now + TIMEOUT),
            ends: Ends::new(ends),
            channels: left.channels,
            claimed: BTreeSet::new(),
            flows,
            ports,
            buckets,
            held,
            messages,
            queued: HashMap::new(),
            abandoned: abandoned.into_iter().collect(),
        }
    }

    /// May processes still come, and name what they hold?
    pub(crate) fn is_open(&self) -> bool {
        self.until.is_some()
    }

    /// Is there anything that a process may still name?
    pub(crate) fn has_flows(&self) -> bool {
        !self.flows.is_empty()
    }

    /// Returns the channel whose ring the process has shown, unless another process has it already.
    fn claim(&mut self, ring: u32, uid: u32) -> Option<ChannelId> {
        let found = self.channels.iter().find(|(_, it)| it.ring == ring);
        let (number, channel) = found?;
        (channel.uid == uid && self.claimed.insert(*number)).then_some(*number)
    }

    /// The process has gone before it had the channel.
    pub(crate) fn give_back(&mut self, channel: Option<ChannelId>) {
        if let Some(channel) = channel {
            self.claimed.remove(&channel);
        }
    }

    /// Returns the user of a row's process.
    fn uid_of(&self, row: &FlowRow) -> u32 {
        let channel = self.channels.get(&ChannelId(row.channel));
        channel.map_or(0, |channel| channel.uid)
    }

    /// Was the process entitled to open connections on the port?
    fn entitles(&self, channel: ChannelId, local: SocketAddr) -> bool {
        let row = self.ports.get(&BindingKey::new(Protocol::Tcp, local));
        row.is_some_and(|row| row.channel == channel.0)
    }

    pub(crate) fn ports(&self) -> &HashMap<BindingKey, FlowRow> {
        &self.ports
    }

    /// A listener decides on the port's row from now on. Returns none if that has not led to a process until now; else, of a
    /// port whose flows are dealt, the buckets.
    pub(crate) fn leave_port(&mut self, key: &BindingKey) -> Option<Buckets> {
        self.ports.remove(key)?;
        Some(self.buckets.remove(key).unwrap_or_default())
    }

    fn take_queue(&mut self, listener: SessionId) -> Vec<SessionId> {
        self.queued.remove(&listener).unwrap_or_default()
    }

    /// Does the row of the flow say that the connection is there?
    fn confirms(
        &self,
        channel: ChannelId,
        flow: &FlowKey,
        (slot, generation): (Slot, Generation),
    ) -> bool {
        let row = self.flows.get(&FilterKey::new(flow));
        row.is_some_and(|row| {
            (row.channel, row.slot, row.generation) == (channel.0, slot.0, generation.0)
        })
    }
}

/// The filter, and what is left of a dead server's.
pub(crate) struct Loaded {
    pub filter: Filter,
    pub inheritance: Inheritance,
    /// There was a filter whose tables cannot be taken over.
    pub is_refused: bool,
}

/// Why there is nothing to continue with.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Inherit(#[from] InheritError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Loads the filter, with the tables of a dead server if that has left one on these devices.
pub(crate) fn load(
    devices: &BTreeSet<u32>,
    (limits, settings): (&Limits, &FilterSettings),
    now: Instant,
) -> Result<Loaded, LoadError> {
    // It takes long, and programs go on meanwhile.
    let _long_slice = LongSlice::begin();
    let supervisor::Inherited {
        tables,
        connections,
    } = supervisor::take_kept();
    let leftovers = connections
        .as_ref()
        .map_or_else(Leftovers::default, held::read);
    let flows = leftovers
        .connections
        .iter()
        .map(|left| FilterKey::new(left.flow()));
    let inherited = inherit(devices, (limits, settings), (&tables, &flows.collect()));
    let is_refused = inherited.is_err();
    let inherited = inherited.unwrap_or_else(|reason| {
        warn!(%reason, "connections of the previous server are reset");
        None
    });
    let (filter, left) = match inherited {
        Some(inherited) => inherited,
        None => (Filter::load(limits, settings)?, Left::default()),
    };
    if !left.channels.is_empty() {
        info!(
            connections = left.flows.len(),
            processes = left.channels.len(),
            "left by the previous server"
        );
    }
    Ok(Loaded {
        filter,
        inheritance: Inheritance::new(left, (leftovers, connections), now),
        is_refused,
    })
}

fn inherit(
    devices: &BTreeSet<u32>,
    with: (&Limits, &FilterSettings),
    (tables, held): (&[OwnedFd], &HashSet<FilterKey>),
) -> Result<Option<(Filter, Left)>, Refusal> {
    let Some(predecessor) = Predecessor::find(devices.iter().copied(), tables, with)? else {
        return Ok(None);
    };
    let mut filter = Filter::load_beside(&predecessor, with)?;
    let left = filter.take_over(held)?;
    Ok(Some((filter, left)))
}
