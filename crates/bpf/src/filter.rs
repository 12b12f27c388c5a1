//! The loaded filters.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use libbpf_rs::MapHandle;
use portolan_proto::filter::{
    ADDRESS_BROADCAST, ADDRESS_OWN, BindingKey, Budget, FilterChannel, FilterInterface, FilterKey,
    FilterSettings, FilterTap, FlowRow, Lasting, Losses, MAX_INTERFACES, MemberKey, RawKey,
    SenderKey, ShareKey, mapped,
};
use portolan_types::{ChannelId, FlowKey};

use crate::channel::{ChannelMaps, Maps};
use crate::counters::{self, Counter};
use crate::driver::{self, DriverError, DriverHook, DriverLink, DriverPrograms};
use crate::error::{AttachError, ChannelError, LoadError, TableError};
use crate::extensions::Extensions;
use crate::floods::Floods;
use crate::handles::HandleTable;
use crate::hook::Hook;
use crate::linear::LinearTable;
use crate::map_builder::MapBuilder;
use crate::objects::Objects;
use crate::predecessor::Predecessor;
use crate::run_time::RunTime;
use crate::table::Table;

/// Sizes of the tables; their memory is allocated when they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub flows: u32,
    pub bindings: u32,
    /// Bindings shared by several sockets.
    pub shared: u32,
    /// Lists of groups' members.
    pub groups: u32,
    pub channels: u32,
}

/// The packet filter and the transmit filter with their tables. The programs stay attached until
/// they are detached or their device is removed; the tables live as long as the programs.
pub struct Filter {
    packet_filter: OwnedFd,
    inject_filter: OwnedFd,
    driver_programs: DriverPrograms,
    hooks: HashMap<u32, Hook>,
    driver_links: HashMap<u32, DriverLink>,

    pub(crate) flows: Table<FilterKey, FlowRow>,
    /// The same flows for linear search, if that is configured.
    linear: Option<RefCell<LinearTable>>,
    /// For packets that name their flow themselves, if that is configured.
    handles: Option<RefCell<HandleTable>>,
    pub(crate) bindings: Table<BindingKey, FlowRow>,
    pub(crate) shares: Table<ShareKey, FlowRow>,
    pub(crate) senders: Table<SenderKey, u16>,
    raw_flows: Table<RawKey, FlowRow>,
    members: Table<MemberKey, FlowRow>,
    interfaces: Table<u32, [FilterInterface; MAX_INTERFACES]>,
    local_addresses: Table<[u8; 16], u8>,
    pub(crate) taps: Table<u32, FilterTap>,
    pub(crate) channels: Table<u32, FilterChannel>,
    losses: Table<u32, Losses>,
    /// Keeps the timers' map: timers run only while a program has it.
    _attentions: MapHandle,
    budgets: Table<u32, Budget>,
    policy: Table<u32, u32>,
    lasting: Table<u32, Lasting>,
    pub(crate) map_builder: Arc<MapBuilder>,
    /// What programs install in the packets' path.
    pub extensions: Extensions,
    /// The listeners under a flood of SYNs.
    pub floods: Floods,
    counters: MapHandle,
    /// The contents of `local_addresses`.
    addresses: HashMap<IpAddr, u8>,
    tap_of: HashMap<ChannelId, u32>,
    /// What the next server needs of these.
    heritage: Vec<OwnedFd>,
}

/// The result of restoring the packet filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    Back,
    /// The device is not, or no longer, filtered.
    NotOurs,
}

impl Filter {
    pub fn load(limits: &Limits, settings: &FilterSettings) -> Result<Filter, LoadError> {
        let objects = Objects::load(limits, settings, None)?;
        Filter::of(&objects, limits, settings)
    }

    /// Loads the programs so that they share the tables of flows and channels with those of a dead server, which stay
    /// attached until these replace them. [`Filter::take_over`] must follow.
    pub fn load_beside(
        predecessor: &Predecessor,
        (limits, settings): (&Limits, &FilterSettings),
    ) -> Result<Filter, LoadError> {
        let objects = Objects::load(limits, settings, Some(predecessor))?;
        Filter::of(&objects, limits, settings)
    }

    /// Takes descriptors that keep the programs and maps loaded.
    pub(crate) fn of(
        objects: &Objects,
        limits: &Limits,
        settings: &FilterSettings,
    ) -> Result<Filter, LoadError> {
        let linear = match settings.algorithm {
            FilterSettings::LINEAR => {
                Some(RefCell::new(LinearTable::of(objects, limits.flows + 1)?))
            }
            _ => None,
        };
        let handles = match settings.marker {
            0 => None,
            _ => Some(RefCell::new(HandleTable::of(objects)?)),
        };
        Ok(Filter {
            packet_filter: objects.program("packet_filter")?,
            inject_filter: objects.program("inject_filter")?,
            driver_programs: DriverPrograms::of(objects)?,
            hooks: HashMap::new(),
            driver_links: HashMap::new(),
            flows: Table::of(objects, "flows")?,
            linear,
            handles,
            bindings: Table::of(objects, "bindings")?,
            shares: Table::of(objects, "shares")?,
            senders: Table::of(objects, "senders")?,
            raw_flows: Table::of(objects, "raw_flows")?,
            members: Table::of(objects, "members")?,
            interfaces: Table::of(objects, "interfaces")?,
            local_addresses: Table::of(objects, "local_addresses")?,
            taps: Table::of(objects, "taps")?,
            channels: Table::of(objects, "channels")?,
            losses: Table::of(objects, "losses")?,
            _attentions: objects.map("attentions")?,
            budgets: Table::of(objects, "budgets")?,
            policy: Table::of(objects, ".data.policy")?,
            lasting: Table::of(objects, ".data.lasting")?,
            map_builder: Arc::new(MapBuilder::of(objects, limits)?),
            extensions: Extensions::of(objects)?,
            floods: Floods::of(objects)?,
            counters: objects.map("counters")?,
            addresses: HashMap::new(),
            tap_of: HashMap::new(),
            heritage: objects.heritage()?,
        })
    }

    /// Returns the secret that the servers of this host have had, or has this one chosen. Called before the filter is
    /// attached.
    pub fn secret_or(&self, chosen: [u8; 16]) -> Result<[u8; 16], TableError> {
        let lasting = self.lasting.read(&0).unwrap_or_default();
        if lasting.secret != [0; 16] {
            return Ok(lasting.secret);
        }
        let secret = chosen;
        self.lasting.set(&0, &Lasting { secret, ..lasting })?;
        Ok(secret)
    }

    /// Returns descriptors by which the next server may take over the tables, if somebody keeps them for it.
    pub fn heritage(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.heritage.iter().map(AsFd::as_fd)
    }

    /// Attaches the packet filter at the ingress of a device. Replaces the filter of a dead server; those of
    /// others stay.
    pub fn attach_interface(&mut self, ifindex: u32) -> Result<(), AttachError> {
        if self.hooks.contains_key(&ifindex) {
            return Ok(());
        }
        self.hook(ifindex)
    }

    /// Attaches the packet filter again to a device from which somebody removed it. Not to other devices.
    pub fn restore_interface(&mut self, ifindex: u32) -> Result<Restored, AttachError> {
        if !self.hooks.contains_key(&ifindex) {
            return Ok(Restored::NotOurs);
        }
        // After a failure the device stays in the table, so that it is tried again.
        self.hook(ifindex)?;
        Ok(Restored::Back)
    }

    fn hook(&mut self, ifindex: u32) -> Result<(), AttachError> {
        let hook = Hook::attach(self.packet_filter.as_fd(), ifindex)?;
        self.hooks.insert(ifindex, hook);
        Ok(())
    }

    /// Also attaches the packet filter in the device's driver, at the first of these hooks that works. It serves the
    /// sessions whose rows permit it. Does not displace another program.
    pub fn attach_driver(
        &mut self,
        ifindex: u32,
        hooks: &[DriverHook],
    ) -> Result<DriverHook, DriverError> {
        self.driver_links.remove(&ifindex);
        let mut first = None;
        for &hook in hooks {
            let program = self.driver_programs.of_hook(hook)?;
            match DriverLink::attach(program, ifindex, hook) {
                Ok(link) => {
                    self.driver_links.insert(ifindex, link);
                    return Ok(hook);
                }
                Err(error @ (DriverError::InUse | DriverError::Vlan)) => return Err(error),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or(DriverError::NotNative))
    }

    /// The hook of the filter in the device's driver, if it is attached there.
    pub fn driver_hook(&self, ifindex: u32) -> Option<DriverHook> {
        self.driver_links.get(&ifindex).map(|link| link.hook)
    }

    /// Detaches the filter from the drivers of devices that have got VLAN devices. Returns their indices.
    pub fn leave_drivers_with_vlans(&mut self) -> Vec<u32> {
        let with_vlans = self
            .driver_links
            .keys()
            .copied()
            .filter(|ifindex| driver::has_vlans(*ifindex));
        let left: Vec<u32> = with_vlans.collect();
        for ifindex in &left {
            self.driver_links.remove(ifindex);
        }
        left
    }

    /// Detaches the packet filter from a device; does nothing if it is not attached.
    pub fn detach_interface(&mut self, ifindex: u32) -> Result<(), AttachError> {
        self.driver_links.remove(&ifindex);
        match self.hooks.remove(&ifindex) {
            Some(hook) => hook.detach(self.packet_filter.as_fd()),
            None => Ok(()),
        }
    }

    /// Sets the managed devices: a channel sends through the one whose MAC address the frame carries.
    pub fn set_interfaces(&self, interfaces: &[FilterInterface]) -> Result<(), TableError> {
        let mut table = [FilterInterface::default(); MAX_INTERFACES];
        table
            .get_mut(..interfaces.len())
            .ok_or(TableError::Full {
                table: "interfaces",
            })?
            .copy_from_slice(interfaces);
        self.interfaces.set(&0, &table)
    }

    /// Sets the addresses of this host and the broadcast addresses of its networks, replacing the
    /// former ones.
    pub fn set_local_addresses(
        &mut self,
        own: &[IpAddr],
        broadcast: &[IpAddr],
    ) -> Result<(), TableError> {
        let broadcast = broadcast
            .iter()
            .map(|&address| (address, ADDRESS_BROADCAST));
        let own = own.iter().map(|&address| (address, ADDRESS_OWN));
        let wanted: HashMap<IpAddr, u8> = broadcast.chain(own).collect();
        for (address, kind) in &wanted {
            if self.addresses.get(address) != Some(kind) {
                self.local_addresses.set(&mapped(*address), kind)?;
            }
        }
        for address in self.addresses.keys() {
            if !wanted.contains_key(address) {
                self.local_addresses.remove(&mapped(*address))?;
            }
        }
        self.addresses = wanted;
        Ok(())
    }

    /// The builder of channels, for this or another thread.
    pub fn map_builder(&self) -> Arc<MapBuilder> {
        Arc::clone(&self.map_builder)
    }

    /// Gives a channel a ring of at least `ring_size` bytes and a doorbell.
    pub fn create_channel(
        &mut self,
        channel: ChannelId,
        ring_size: u32,
    ) -> Result<ChannelMaps, ChannelError> {
        let maps = Maps::create(ring_size)?;
        self.map_builder.install(&[(channel, &maps)])?;
        maps.share()
    }

    /// Attaches the transmit filter at the ingress of a channel's tap, which is new and down. The program is removed with the tap.
    pub fn attach_tap(&mut self, channel: ChannelId, tap_ifindex: u32) -> Result<(), AttachError> {
        self.register_tap(channel, tap_ifindex)?;
        self.map_builder.prepare_tap(tap_ifindex)?;
        self.map_builder.attach_tap(tap_ifindex)
    }

    /// Attaches the packet filter at the ingress of the tap through which the server re-injects frames, which is new and
    /// down.
    pub fn attach_inject_tap(&mut self, tap_ifindex: u32) -> Result<(), AttachError> {
        Hook::attach_to_new(self.inject_filter.as_fd(), tap_ifindex)?;
        Ok(())
    }

    /// Removes a channel's additional tap from the tables.
    pub fn remove_tx_queue(&self, tap_ifindex: u32) -> Result<(), TableError> {
        self.taps.remove(&tap_ifindex)
    }

    /// Removes a channel: its tap can no longer send, and frames directed to it are soon dropped. The
    /// owner's mappings stay valid.
    pub fn remove_channel(&mut self, channel: ChannelId) -> Result<(), TableError> {
        if let Some(tap) = self.tap_of.remove(&channel) {
            self.taps.remove(&tap)?;
            self.channels.set(&channel.0, &FilterChannel::default())?;
        }
        self.map_builder.remove(channel);
        Ok(())
    }

    /// Directs the packets of a flow to a row's owner, atomically if they had another direction before.
    pub fn steer(&self, flow: &FlowKey, row: FlowRow) -> Result<(), TableError> {
        let key = FilterKey::new(flow);
        self.flows.set(&key, &row)?;
        if let Some(handles) = &self.handles {
            handles.borrow_mut().follow(&key, row)?;
        }
        match &self.linear {
            Some(linear) => linear.borrow_mut().set(&key, row),
            None => Ok(()),
        }
    }

    /// Removes a flow, whose packets then go to bindings or to the kernel.
    pub fn unsteer(&self, flow: &FlowKey) -> Result<(), TableError> {
        let key = FilterKey::new(flow);
        self.flows.remove(&key)?;
        if let Some(handles) = &self.handles {
            handles.borrow_mut().revoke(&key)?;
        }
        match &self.linear {
            Some(linear) => linear.borrow_mut().remove(&key),
            None => Ok(()),
        }
    }

    /// Creates a handle by which packets find the flow's present row: its index. The handle is revoked when the flow is
    /// steered elsewhere. `None` if there are no handles, or all are in use.
    pub fn give_handle(
        &self,
        flow: &FlowKey,
        row: FlowRow,
        nonce: u64,
    ) -> Result<Option<u16>, TableError> {
        match &self.handles {
            Some(handles) => handles.borrow_mut().give(&FilterKey::new(flow), row, nonce),
            None => Ok(None),
        }
    }

    /// Sets whether the host has a policy of its own: then packets of no flow go to the kernel's stack.
    pub fn set_policy(&self, is_there: bool) -> Result<(), TableError> {
        self.policy.set(&0, &u32::from(is_there))
    }

    /// Directs packets to a local endpoint that belong to no flow.
    pub fn bind(&self, binding: &BindingKey, row: FlowRow) -> Result<(), TableError> {
        self.bindings.set(binding, &row)
    }

    pub fn unbind(&self, binding: &BindingKey) -> Result<(), TableError> {
        self.bindings.remove(binding)
    }

    /// Assigns a bucket of a binding that several sockets share.
    pub fn deal(&self, share: &ShareKey, row: FlowRow) -> Result<(), TableError> {
        self.shares.set(share, &row)
    }

    pub fn undeal(&self, share: &ShareKey) -> Result<(), TableError> {
        self.shares.remove(share)
    }

    /// Permits a channel to send from a shared binding, in a class, or in its channel's (0).
    pub fn allow_sender(&self, sender: &SenderKey, class: u16) -> Result<(), TableError> {
        self.senders.set(sender, &class)
    }

    pub fn forbid_sender(&self, sender: &SenderKey) -> Result<(), TableError> {
        self.senders.remove(sender)
    }

    /// Gives a channel all packets of a protocol, and permits it to send them.
    pub fn claim(&self, guard: &RawKey, row: FlowRow) -> Result<(), TableError> {
        self.raw_flows.set(guard, &row)
    }

    pub fn unclaim(&self, guard: &RawKey) -> Result<(), TableError> {
        self.raw_flows.remove(guard)
    }

    /// Sets a socket that gets copies of datagrams to a group.
    pub fn set_member(&self, member: &MemberKey, row: FlowRow) -> Result<(), TableError> {
        self.members.set(member, &row)
    }

    pub fn remove_member(&self, member: &MemberKey) -> Result<(), TableError> {
        self.members.remove(member)
    }

    /// Sets the parameters of a budget. Keeps its counters and clocks, except for concurrent updates.
    pub fn set_budget(&self, index: u16, terms: &Budget) -> Result<(), TableError> {
        let now = self.budget(index);
        let next = Budget {
            packet_price: terms.packet_price,
            byte_price: terms.byte_price,
            burst: terms.burst,
            priority: terms.priority,
            ..now
        };
        self.budgets.set(&index.into(), &next)
    }

    /// Resets a budget, so that its number can be reused.
    pub fn clear_budget(&self, index: u16) -> Result<(), TableError> {
        self.budgets.set(&index.into(), &Budget::default())
    }

    pub fn budget(&self, index: u16) -> Budget {
        self.budgets.read(&index.into()).unwrap_or_default()
    }

    /// What the owner of a channel has lost since it was created.
    pub fn losses(&self, channel: ChannelId) -> Losses {
        self.losses.read(&channel.0).unwrap_or_default()
    }

    /// CPU time used by the packet filter, while the kernel counts it.
    pub fn run_time(&self) -> RunTime {
        RunTime::of(self.packet_filter.as_fd())
    }

    /// The counters of all verdicts of both filters.
    pub fn counters(&self) -> Vec<Counter> {
        counters::read(&self.counters)
    }

    /// Registers a tap as the channel's with the transmit filter.
    pub fn register_tap(&mut self, channel: ChannelId, tap_ifindex: u32) -> Result<(), TableError> {
        let spare = FilterChannel::spare(tap_ifindex);
        self.channels.set(&channel.0, &spare)?;
        self.losses.set(&channel.0, &Losses::default())?;
        self.set_tap(channel, tap_ifindex, 0)?;
        self.tap_of.insert(channel, tap_ifindex);
        Ok(())
    }

    /// Records whose the channel is, for the next server.
    pub fn set_owner(&self, channel: ChannelId, uid: u32) -> Result<(), TableError> {
        let tap = self.tap_of.get(&channel).copied().unwrap_or_default();
        let owned = FilterChannel::spare(tap).owned_by(uid);
        self.channels.set(&channel.0, &owned)
    }

    /// Sets the class of what the channel sends through that tap, for rows without one.
    pub fn set_tap(
        &self,
        channel: ChannelId,
        tap_ifindex: u32,
        class: u16,
    ) -> Result<(), TableError> {
        let tap = FilterTap {
            channel: channel.0,
            class,
            reserved: 0,
        };
        self.taps.set(&tap_ifindex, &tap)
    }
}
