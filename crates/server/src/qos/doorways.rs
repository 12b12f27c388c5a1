//! Doorways: where something is reserved for a flow or a port, the process that has such sessions gets a tap
//! for them beside its own (ADR 11). The thread that makes channels makes them; the process is told by its
//! alert, fetches the list, and says when nothing goes through one any more.
//!
//! What goes into a slow class by the process's own tap would hold up all others. So the sessions of a doorway that is
//! being made wait for it in the process, which hears of it before it has them; and those that were there when
//! something was reserved for them come into their class when the process says that they go through the doorway.
//! Neither lasts longer than [`PATIENCE`].

use std::os::fd::OwnedFd;
use std::time::Duration;

use portolan_bpf::Filter;
use portolan_control::{Holder, Session};
use portolan_proto::control::{Doorway, DoorwayState, Doorways, ReplyBody};
use portolan_proto::qos::Scope;
use portolan_sys::tap::Tap;
use portolan_types::{ChannelId, Instant, SessionId};
use tracing::{error, warn};

use super::transmit::Class;
use crate::clients::Answer;
use crate::server::Server;

/// The kernel takes milliseconds for a tap, tens of them when it is busy.
const PATIENCE: Duration = Duration::from_secs(1);

/// Those of one process.
#[derive(Debug, Default)]
pub struct DoorwaySet {
    doorways: Vec<Entry>,
    main_burst: Option<u32>,
    has_news: bool,
}

#[derive(Debug)]
struct Entry {
    number: u8,
    scope: Scope,
    class: Class,
    stage: Stage,
    meanwhile: Meanwhile,
    /// Until then; none if that is over.
    patience: Option<Instant>,
}

/// What sessions do that are to go through a doorway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    /// They are in their class, and wait in their process until it has the doorway.
    Wait,
    /// They are in no class until they go through it: they were there before it.
    GoOn,
}

#[derive(Debug)]
enum Stage {
    Ordered,
    /// The process has not fetched it yet.
    Made(Tap),
    Handed(Tap),
    /// The process is to let it go.
    Leaving(Tap),
}

impl DoorwaySet {
    pub fn has_news(&self) -> bool {
        self.has_news
    }

    /// A number for one more.
    fn free_number(&self) -> Option<u8> {
        let is_free = |number: &u8| self.doorways.iter().all(|entry| entry.number != *number);
        (1..=Doorways::MAX).find(is_free)
    }

    fn find_ordered(&mut self, number: u8) -> Option<&mut Entry> {
        let is_it =
            |entry: &&mut Entry| entry.number == number && matches!(entry.stage, Stage::Ordered);
        self.doorways.iter_mut().find(is_it)
    }

    fn of_scope(&mut self, scope: &Scope) -> Option<&mut Entry> {
        let mut entries = self.doorways.iter_mut();
        entries.find(|entry| entry.is_for(scope))
    }

    /// Ends patience where it is due; returns for how many, and when the next is.
    fn lose_patience(&mut self, now: Instant) -> (u64, Option<Instant>) {
        let mut lost = 0;
        for entry in &mut self.doorways {
            if entry.patience.is_some_and(|until| until <= now) {
                entry.patience = None;
                lost += 1;
            }
        }
        (
            lost,
            self.doorways
                .iter()
                .filter_map(|entry| entry.patience)
                .min(),
        )
    }

    /// The taps that are still the process's, to be destroyed with it.
    pub fn into_taps(self) -> impl Iterator<Item = Tap> {
        self.doorways
            .into_iter()
            .filter_map(|entry| match entry.stage {
                Stage::Ordered => None,
                Stage::Made(tap) | Stage::Handed(tap) | Stage::Leaving(tap) => Some(tap),
            })
    }
}

impl Entry {
    fn is_for(&self, scope: &Scope) -> bool {
        self.scope == *scope && !matches!(self.stage, Stage::Leaving(_))
    }

    /// What the process is told. Of one that is late it hears when it is there.
    fn state(&self) -> Option<DoorwayState> {
        match self.stage {
            Stage::Ordered => self.patience.map(|_| DoorwayState::Awaited),
            Stage::Made(_) => Some(DoorwayState::New),
            Stage::Handed(_) => Some(DoorwayState::Open),
            Stage::Leaving(_) => None,
        }
    }

    /// Shares the tap with the process.
    fn hand_over(&mut self) -> std::io::Result<Option<OwnedFd>> {
        let Stage::Made(tap) = &self.stage else {
            return Ok(None);
        };
        let fd = tap.fd.try_clone()?;
        if let Stage::Made(tap) = std::mem::replace(&mut self.stage, Stage::Ordered) {
            self.stage = Stage::Handed(tap);
        }
        if self.meanwhile == Meanwhile::Wait {
            self.patience = None;
        }
        Ok(Some(fd))
    }
}

impl Server {
    /// A session has come to a process: it may need a doorway there.
    pub(crate) fn note_arrival(&mut self, id: SessionId, channel: ChannelId) {
        if let Some((scope, class)) = self.doorway_for(id) {
            self.open_doorway(channel, (scope, class), Meanwhile::Wait);
        }
    }

    fn doorway_for(&self, id: SessionId) -> Option<(Scope, Class)> {
        let session = self.registry.session(id)?;
        let (scope, class) = self.own_reservation(session)?;
        Some((scope.clone(), class))
    }

    /// Is the session one of those that are in no class until they go through their doorway?
    pub(super) fn goes_on_as_before(&self, session: &Session, channel: ChannelId) -> bool {
        let set = self.channels.get(&channel).map(|entry| &entry.doorways);
        let goes_on =
            |entry: &&Entry| entry.meanwhile == Meanwhile::GoOn && entry.patience.is_some();
        set.is_some_and(|set| {
            let mut going = set.doorways.iter().filter(goes_on);
            going.any(|entry| {
                self.own_reservation(session)
                    .is_some_and(|(scope, _)| entry.is_for(scope))
            })
        })
    }

    /// Reservations have changed, that of `anew` being new to sessions that are there: makes doorways that are missing,
    /// and has those go that are not wanted.
    pub(super) fn refresh_doorways(&mut self, anew: Option<&Scope>) {
        let held = |session: &portolan_control::Session| match session.holder {
            Holder::Process(channel, _) => Some((session.id, channel)),
            _ => None,
        };
        let sessions: Vec<_> = self.registry.sessions().filter_map(held).collect();
        let channels: Vec<ChannelId> = self.channels.keys().copied().collect();
        for channel in channels {
            self.close_doorways(channel);
        }
        for (id, channel) in sessions {
            if let Some((scope, class)) = self.doorway_for(id) {
                let meanwhile = match anew == Some(&scope) {
                    true => Meanwhile::GoOn,
                    false => Meanwhile::Wait,
                };
                self.open_doorway(channel, (scope, class), meanwhile);
            }
        }
    }

    /// What leaves a process at once by its own tap.
    pub(super) fn tell_main_burst(&mut self, channel: ChannelId, burst: Option<u32>) {
        if let Some(entry) = self.channels.get_mut(&channel)
            && entry.doorways.main_burst != burst
        {
            entry.doorways.main_burst = burst;
            self.tell_of_doorways(channel);
        }
    }

    fn open_doorway(
        &mut self,
        channel: ChannelId,
        (scope, class): (Scope, Class),
        meanwhile: Meanwhile,
    ) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let set = &mut entry.doorways;
        if let Some(entry) = set.of_scope(&scope) {
            if entry.class == class {
                return;
            }
            entry.class = class;
            if let Stage::Made(tap) | Stage::Handed(tap) = &entry.stage {
                settle(&self.filter, channel, tap, class);
            }
            return self.tell_of_doorways(channel);
        }
        let Some(number) = set.free_number() else {
            self.counters.doorways_refused += 1;
            return;
        };
        let until = self.now + PATIENCE;
        set.doorways.push(Entry {
            number,
            scope,
            class,
            stage: Stage::Ordered,
            meanwhile,
            patience: Some(until),
        });
        let due = &mut self.qos.doorways_due;
        *due = due.map_or(Some(until), |due| Some(due.min(until)));
        self.spares.order_doorway(channel, number);
        self.tell_of_doorways(channel);
    }

    /// Looks for doorways that are late when it is time. Returns when to come back.
    pub fn drive_doorways(&mut self) -> Option<Instant> {
        if self.qos.doorways_due? > self.now {
            return self.qos.doorways_due;
        }
        let (mut late, mut next) = (Vec::new(), None);
        for (channel, entry) in &mut self.channels {
            let (lost, due) = entry.doorways.lose_patience(self.now);
            self.counters.doorways_late += lost;
            late.extend((lost > 0).then_some(*channel));
            next = [next, due].into_iter().flatten().min();
        }
        self.qos.doorways_due = next;
        for channel in late {
            self.tell_of_doorways(channel);
            self.classify_sessions_of(channel);
        }
        next
    }

    fn classify_sessions_of(&mut self, channel: ChannelId) {
        for id in self.sessions_owned_by(channel) {
            self.renew_rows(id);
        }
    }

    /// The thread has made a doorway, or could not.
    pub fn enter_doorway(&mut self, channel: ChannelId, number: u8, tap: Option<Tap>) {
        let Some(tap) = tap else {
            return self.drop_doorway(channel, number);
        };
        let entry = self.channels.get_mut(&channel);
        let ordered = entry.and_then(|entry| entry.doorways.find_ordered(number));
        match ordered {
            Some(entry) => {
                settle(&self.filter, channel, &tap, entry.class);
                entry.stage = Stage::Made(tap);
                self.tell_of_doorways(channel);
            }
            // The process has gone meanwhile, or the reservation.
            None => self.spares.destroy(tap),
        }
    }

    /// It could not be made: its sessions share their process's.
    fn drop_doorway(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        entry
            .doorways
            .doorways
            .retain(|entry| entry.number != number);
        self.counters.doorways_refused += 1;
        self.tell_of_doorways(channel);
        self.classify_sessions_of(channel);
    }

    /// Has those go for which nothing is reserved any more.
    fn close_doorways(&mut self, channel: ChannelId) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let (mut kept, mut unused, mut has_news) = (Vec::new(), Vec::new(), false);
        for mut doorway in std::mem::take(&mut entry.doorways.doorways) {
            if self.qos.transmit.has(&doorway.scope) {
                kept.push(doorway);
                continue;
            }
            match doorway.stage {
                // What comes from the thread for it is destroyed then.
                Stage::Ordered => {
                    has_news = true;
                    continue;
                }
                Stage::Made(tap) => {
                    has_news = true;
                    unused.push(tap);
                    continue;
                }
                Stage::Handed(tap) => {
                    has_news = true;
                    doorway.stage = Stage::Leaving(tap);
                }
                Stage::Leaving(_) => {}
            }
            kept.push(doorway);
        }
        entry.doorways.doorways = kept;
        for tap in unused {
            self.destroy_doorway(tap);
        }
        if has_news {
            self.tell_of_doorways(channel);
        }
    }

    pub fn destroy_doorway(&mut self, tap: Tap) {
        if let Err(failure) = self.filter.remove_doorway(tap.ifindex) {
            error!(%failure, "cannot remove a doorway");
        }
        self.spares.destroy(tap);
    }

    fn tell_of_doorways(&mut self, channel: ChannelId) {
        if let Some(entry) = self.channels.get_mut(&channel) {
            entry.doorways.has_news = true;
            entry.alert.pull();
        }
    }

    /// `Doorways`.
    pub fn doorways(&mut self, channel: ChannelId) -> Answer {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return Answer::Silence;
        };
        let set = &mut entry.doorways;
        set.has_news = false;
        let (mut others, mut taps) = (Vec::new(), Vec::new());
        for entry in &mut set.doorways {
            let Some(state) = entry.state() else {
                continue;
            };
            match entry.hand_over() {
                Ok(tap) => taps.extend(tap),
                Err(failure) => {
                    error!(%failure, "cannot share a doorway");
                    continue;
                }
            }
            others.push(Doorway {
                number: entry.number,
                state,
                scope: entry.scope.clone(),
                burst: entry.class.terms.burst,
            });
        }
        let main_burst = set.main_burst;
        let doorways = Doorways { main_burst, others };
        Answer::Reply(ReplyBody::Doorways(doorways), taps)
    }

    /// `DoorwayEntered`.
    pub fn doorway_entered(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let is_it = |entry: &&mut Entry| {
            entry.number == number
                && entry.patience.is_some()
                && matches!(entry.stage, Stage::Handed(_))
        };
        if let Some(entry) = entry.doorways.doorways.iter_mut().find(is_it) {
            entry.patience = None;
            self.classify_sessions_of(channel);
        }
    }

    /// `DoorwayClosed`.
    pub fn doorway_closed(&mut self, channel: ChannelId, number: u8) {
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let set = &mut entry.doorways.doorways;
        let is_it =
            |entry: &Entry| entry.number == number && matches!(entry.stage, Stage::Leaving(_));
        if let Some(at) = set.iter().position(is_it)
            && let Stage::Leaving(tap) = set.swap_remove(at).stage
        {
            self.destroy_doorway(tap);
            // What was reserved again meanwhile may need its number.
            self.refresh_doorways(None);
        }
    }
}

/// What goes through the tap is the channel's and in the class, in which only so much waits that its writer
/// notices soon.
fn settle(filter: &Filter, channel: ChannelId, tap: &Tap, class: Class) {
    if let Err(errno) = tap.set_send_buffer(class.terms.send_buffer()) {
        warn!(%errno, "cannot bound what waits in a doorway");
    }
    if let Err(failure) = filter.set_tap(channel, tap.ifindex, class.minor.0) {
        warn!(%failure, "cannot classify what goes through a doorway");
    }
}
