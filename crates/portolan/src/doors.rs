//! Which doorway a session goes through: one of its own if something is reserved for its flow or its
//! port (ADR 11), else the channel's. The server says what is reserved; sessions find their doorways
//! when they come, and all of them anew when that changes.

use std::os::fd::OwnedFd;

use portolan_proto::control::{DoorwayState, Doorways, RequestBody};
use portolan_proto::qos::Scope;
use portolan_stack::{Door, Session};
use portolan_types::{Instant, Protocol, Slot};

use crate::core::Core;

/// What the server said last.
#[derive(Debug, Default)]
pub(crate) struct DoorPlan {
    main_burst: Option<u32>,
    /// Those that are open or awaited, flows before ports.
    open: Vec<Open>,
    /// New ones of which the server waits to hear that their sessions go through them.
    entered: Vec<Door>,
    /// No session is to go there any more; what waits there goes first.
    leaving: Vec<Door>,
}

#[derive(Debug)]
struct Open {
    scope: Scope,
    door: Door,
    burst: u32,
}

impl DoorPlan {
    /// The session's doorway, and what leaves by it at once.
    fn of(&self, session: &Session) -> (Door, Option<u32>) {
        let own = self.open.iter().find(|open| covers(&open.scope, session));
        match own {
            Some(own) => (own.door, Some(own.burst)),
            None => (Door::MAIN, self.main_burst),
        }
    }
}

impl Core {
    /// The server's list of doorways, with the taps of those that are new.
    pub(crate) fn set_doorways(&mut self, now: Instant, doorways: Doorways, taps: Vec<OwnedFd>) {
        let mut taps = taps.into_iter();
        let mut open = Vec::new();
        for doorway in doorways.others {
            let door = Door(doorway.number);
            match doorway.state {
                DoorwayState::Awaited => self.channel.await_door(door),
                DoorwayState::New => {
                    if let Some(tap) = taps.next() {
                        self.channel.open_door(door, tap);
                        self.doors.entered.push(door);
                    }
                }
                DoorwayState::Open => {}
            }
            open.push(Open {
                scope: doorway.scope,
                door,
                burst: doorway.burst,
            });
        }
        open.sort_by_key(|open| !matches!(open.scope, Scope::Flow(_)));
        self.doors.main_burst = doorways.main_burst;
        for before in std::mem::replace(&mut self.doors.open, open) {
            let stays = self.doors.open.iter().any(|open| open.door == before.door);
            if !stays && !self.channel.stop_awaiting(before.door) {
                self.doors.leaving.push(before.door);
            }
        }
        self.choose_doors(now);
    }

    fn choose_doors(&mut self, now: Instant) {
        let slots: Vec<Slot> = self.stack.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.choose_door(slot);
        }
        // Who has waited for his doorway goes on.
        self.send_out(now);
    }

    /// There is no server any more that would open one.
    pub(crate) fn stop_awaiting_doors(&mut self, now: Instant) {
        let Core { doors, channel, .. } = self;
        let before = doors.open.len();
        doors.open.retain(|open| !channel.stop_awaiting(open.door));
        if doors.open.len() != before {
            self.choose_doors(now);
        }
    }

    /// Finds the session's doorway, when it has come, got another peer, or the doorways have changed.
    pub(crate) fn choose_door(&mut self, slot: Slot) {
        let Some(session) = self.stack.get_mut(slot) else {
            return;
        };
        let (door, burst) = self.doors.of(session);
        if let Session::Tcp(session) = session {
            session.connection.limit_bursts(burst);
        }
        self.stack.set_door(slot, door);
    }

    /// Tells the server which doorways their sessions go through, and lets go of those through which nothing goes any
    /// more.
    pub(crate) fn close_doors(&mut self) {
        let Core {
            stack,
            channel,
            doors,
            outbox,
            ..
        } = self;
        doors.entered.retain(|&door| {
            let is_used = !stack.approaches_door(door);
            if is_used {
                outbox.push(RequestBody::DoorwayEntered { number: door.0 });
            }
            !is_used
        });
        doors.leaving.retain(|&door| {
            let stays = stack.uses_door(door) || !channel.close_door(door);
            if !stays {
                outbox.push(RequestBody::DoorwayClosed { number: door.0 });
            }
            stays
        });
    }
}

fn covers(scope: &Scope, session: &Session) -> bool {
    match session {
        Session::Tcp(session) => {
            let flow = session.flow;
            scope.has_session(Protocol::Tcp, flow.local, Some(flow.remote))
        }
        Session::Udp(session) => scope.has_session(Protocol::Udp, session.local, session.remote),
    }
}
