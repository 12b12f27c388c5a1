//! What a dead server has left in the tables, and what of it stays: the rows of TCP connections that processes hold, and
//! the channels that these lead to. Everything else was the dead server's own, or is made anew.

use std::collections::{BTreeMap, HashMap, HashSet};

use portolan_proto::filter::{BindingKey, FilterChannel, FilterKey, FlowRow};
use portolan_types::{ChannelId, Protocol};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::driver;
use crate::error::TableError;
use crate::filter::Filter;
use crate::table::Table;

/// What processes may continue to use, if they say so.
#[derive(Debug, Default)]
pub struct Inheritance {
    pub channels: HashMap<ChannelId, InheritedChannel>,
    pub flows: HashMap<FilterKey, FlowRow>,
    /// Ports under lease, and those of delegated listeners, with the connections that only their processes know.
    pub ports: HashMap<BindingKey, FlowRow>,
    /// Of those ports whose flows are dealt, the buckets that processes have.
    pub buckets: HashMap<BindingKey, BTreeMap<u32, FlowRow>>,
}

/// A channel that the dead server had given to a process.
#[derive(Debug)]
pub struct InheritedChannel {
    /// The user of the process.
    pub uid: u32,
    /// The number by which the kernel knows its ring; see [`map_id`](crate::map_id).
    pub ring: u32,
    /// Devices by which it may send.
    pub taps: Vec<u32>,
}

impl Filter {
    /// Removes from the shared tables what does not survive a server. Rows that stay lead to the ring of their channel:
    /// a ring of its own, a class and a budget were the dead server's to give. Rows of the flows `held` stay the server's.
    pub fn take_over(&mut self, held: &HashSet<FilterKey>) -> Result<Inheritance, TableError> {
        self.leave_listeners()?;
        let mut inheritance = Inheritance {
            channels: self.inherited_channels()?,
            flows: HashMap::new(),
            ports: HashMap::new(),
            buckets: HashMap::new(),
        };
        for key in self.bindings.keys() {
            let row = self.bindings.read(&key).filter(|row| {
                row.flags & (FlowRow::DELEGATED | FlowRow::RAW) == FlowRow::DELEGATED
                    && inheritance.channels.contains_key(&ChannelId(row.channel))
            });
            if let Some(row) = row {
                let dealt = FlowRow::SHARED | FlowRow::DEALT;
                let row = left_of(row, FlowRow::DELEGATED | FlowRow::LEASED | dealt);
                self.bindings.set(&key, &row)?;
                inheritance.ports.insert(key, row);
            }
        }
        self.take_over_buckets(&mut inheritance)?;
        for tap in self.taps.keys() {
            let channel = self.taps.read(&tap).map(|row| ChannelId(row.channel));
            match channel.and_then(|channel| inheritance.channels.get_mut(&channel)) {
                Some(channel) if !is_gone(tap) => channel.taps.push(tap),
                _ => self.taps.remove(&tap)?,
            }
        }
        for key in self.flows.keys() {
            if held.contains(&key) {
                continue;
            }
            let row = self.flows.read(&key).filter(|row| {
                key.protocol == Protocol::Tcp.number()
                    && inheritance.channels.contains_key(&ChannelId(row.channel))
            });
            let Some(row) = row else {
                self.flows.remove(&key)?;
                continue;
            };
            let row = left_of(row, FlowRow::BY_TAP);
            self.flows.set(&key, &row)?;
            inheritance.flows.insert(key, row);
        }
        Ok(inheritance)
    }

    /// A port whose flows are dealt stays as long as one of its buckets is a process's.
    fn take_over_buckets(&mut self, inheritance: &mut Inheritance) -> Result<(), TableError> {
        let Inheritance {
            channels,
            ports,
            buckets,
            ..
        } = inheritance;
        for share in self.shares.keys() {
            let row = self.shares.read(&share).filter(|row| {
                row.flags & FlowRow::DELEGATED != 0
                    && channels.contains_key(&ChannelId(row.channel))
                    && ports.contains_key(&share.binding)
            });
            if let Some(row) = row {
                let row = left_of(row, FlowRow::DELEGATED | FlowRow::SHARED);
                self.shares.set(&share, &row)?;
                let of_port = buckets.entry(share.binding).or_default();
                of_port.insert(share.bucket, row);
            }
        }
        Ok(())
    }

    /// Has SYNs to the dead server's listeners reach the kernel's stack, where their programs listen meanwhile.
    fn leave_listeners(&self) -> Result<(), TableError> {
        let is_servers = |row: &FlowRow| row.channel == ChannelId::SERVER.0;
        remove_where(&self.bindings, is_servers)?;
        remove_where(&self.shares, is_servers)
    }

    /// The programs are attached: from now on nothing is received by endpoints of before, except ports with connections
    /// that only their processes know.
    pub fn forget_endpoints(&self, ports: &HashMap<BindingKey, FlowRow>) -> Result<(), TableError> {
        for key in self.bindings.keys() {
            if !ports.contains_key(&key) {
                self.bindings.remove(&key)?;
            }
        }
        self.end_deals(|binding| !ports.contains_key(binding))
    }

    /// Ends what is left of such a port, unless another endpoint has its row by now.
    pub fn forget_port(&self, key: &BindingKey, row: &FlowRow) -> Result<(), TableError> {
        if self.bindings.read(key) != Some(*row) {
            return Ok(());
        }
        self.bindings.remove(key)?;
        if row.flags & FlowRow::DEALT != 0 {
            self.end_deals(|binding| binding == key)?;
        }
        Ok(())
    }

    fn end_deals(&self, is_over: impl Fn(&BindingKey) -> bool) -> Result<(), TableError> {
        for share in self.shares.keys() {
            if is_over(&share.binding) {
                self.shares.remove(&share)?;
            }
        }
        for sender in self.senders.keys() {
            if is_over(&sender.binding) {
                self.senders.remove(&sender)?;
            }
        }
        Ok(())
    }

    fn inherited_channels(&self) -> Result<HashMap<ChannelId, InheritedChannel>, TableError> {
        let mut channels = HashMap::new();
        for number in (1..self.map_builder.channels()).map(ChannelId) {
            let ring = self.map_builder.ring_id(number);
            let row = self.channels.read(&number.0).unwrap_or_default();
            match (row.owner(), ring) {
                (Some(uid), Some(ring)) => {
                    let taps = Vec::new();
                    channels.insert(number, InheritedChannel { uid, ring, taps });
                }
                (_, None) => {}
                (None, Some(_)) => {
                    self.channels.set(&number.0, &FilterChannel::default())?;
                    self.map_builder.remove(number);
                }
            }
        }
        Ok(channels)
    }

    /// Ends the rights of a channel whose process has not come, or of its taps of before.
    pub fn forget_taps(&self, taps: &[u32]) -> Result<(), TableError> {
        taps.iter().try_for_each(|tap| self.taps.remove(tap))
    }

    /// Removes a channel that no process continues to use.
    pub fn drop_inherited(&self, channel: ChannelId) -> Result<(), TableError> {
        self.map_builder.remove(channel);
        self.channels.set(&channel.0, &FilterChannel::default())
    }

    /// Removes a row that nobody has taken.
    pub fn drop_row(&self, key: &FilterKey) -> Result<(), TableError> {
        self.flows.remove(key)
    }
}

/// Is there no such device any more? Servers that follow each other soon would fill the table with those of processes that
/// have got others since.
fn is_gone(ifindex: u32) -> bool {
    driver::name_of(ifindex) == Err(Errno::NODEV)
}

/// Where the row leads to, with those of its flags that survive a server.
fn left_of(row: FlowRow, flags: u16) -> FlowRow {
    FlowRow {
        channel: row.channel,
        slot: row.slot,
        generation: row.generation,
        flags: row.flags & flags,
        ..FlowRow::default()
    }
}

fn remove_where<K>(
    table: &Table<K, FlowRow>,
    is_wrong: impl Fn(&FlowRow) -> bool,
) -> Result<(), TableError>
where
    K: IntoBytes + FromBytes + Immutable,
{
    for key in table.keys() {
        if table.read(&key).is_some_and(|row| is_wrong(&row)) {
            table.remove(&key)?;
        }
    }
    Ok(())
}
