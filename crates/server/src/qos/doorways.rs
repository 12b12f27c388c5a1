//! Doorways: where something is reserved for a flow or a port, the process that has such sessions gets a tap
//! for them beside its own (ADR 11). The thread that makes channels makes them; the process is told by its
//! alert, fetches the list, and says when nothing goes through one any more.

use portolan_bpf::Filter;
use portolan_control::Holder;
use portolan_proto::control::{Doorway, Doorways, ReplyBody};
use portolan_proto::qos::Scope;
use portolan_sys::tap::Tap;
use portolan_types::{ChannelId, SessionId};
use tracing::{error, warn};

use super::transmit::Class;
use crate::clients::Answer;
use crate::server::Server;

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
        let is_leaving = |entry: &Entry| matches!(entry.stage, Stage::Leaving(_));
        let mut entries = self.doorways.iter_mut();
        entries.find(|entry| entry.scope == *scope && !is_leaving(entry))
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

impl Server {
    /// A session has come to a process: it may need a doorway there.
    pub(crate) fn note_arrival(&mut self, id: SessionId, channel: ChannelId) {
        let Some(session) = self.registry.session(id) else {
            return;
        };
        if let Some((scope, class)) = self.own_reservation(session) {
            let scope = scope.clone();
            self.open_doorway(channel, scope, class);
        }
    }

    /// Reservations have changed: makes doorways that are missing, and has those go that are not wanted.
    pub(super) fn refresh_doorways(&mut self) {
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
            self.note_arrival(id, channel);
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

    fn open_doorway(&mut self, channel: ChannelId, scope: Scope, class: Class) {
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
        set.doorways.push(Entry {
            number,
            scope,
            class,
            stage: Stage::Ordered,
        });
        self.spares.order_doorway(channel, number);
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

    fn drop_doorway(&mut self, channel: ChannelId, number: u8) {
        if let Some(entry) = self.channels.get_mut(&channel) {
            entry
                .doorways
                .doorways
                .retain(|entry| entry.number != number);
        }
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
                Stage::Ordered => continue,
                Stage::Made(tap) => {
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
            entry.alert.ring();
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
            let is_new = matches!(entry.stage, Stage::Made(_));
            let stage = std::mem::replace(&mut entry.stage, Stage::Ordered);
            entry.stage = match stage {
                Stage::Made(tap) => match tap.fd.try_clone() {
                    Ok(fd) => {
                        taps.push(fd);
                        Stage::Handed(tap)
                    }
                    Err(failure) => {
                        error!(%failure, "cannot share a doorway");
                        Stage::Made(tap)
                    }
                },
                stage => stage,
            };
            if let Stage::Handed(_) = entry.stage {
                others.push(Doorway {
                    number: entry.number,
                    is_new,
                    scope: entry.scope.clone(),
                    burst: entry.class.terms.burst,
                });
            }
        }
        let main_burst = set.main_burst;
        let doorways = Doorways { main_burst, others };
        Answer::Reply(ReplyBody::Doorways(doorways), taps)
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
            self.refresh_doorways();
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
