//! Sessions here whose sockets are closed, and which no server finishes: none was there, or it did not know them.

use portolan_stack::{LeasedPorts, Stack};
use portolan_types::Slot;

use crate::socket::options::Choices;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Orphan {
    pub(crate) slot: Slot,
    pub(crate) choices: Choices,
}

impl Orphan {
    pub(crate) fn new(slot: Slot) -> Orphan {
        Orphan {
            slot,
            choices: Choices::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Orphans(Vec<Orphan>);

impl Orphans {
    pub(super) fn push(&mut self, orphan: Orphan) {
        self.0.push(orphan);
    }

    /// Takes those that have not ended.
    pub(super) fn take_unfinished(&mut self, stack: &mut Stack) -> Vec<Orphan> {
        let is_unfinished = |orphan: &mut Orphan| {
            let session = stack.tcp(orphan.slot);
            session.is_some_and(|session| !session.connection.is_closed())
        };
        self.0.extract_if(.., is_unfinished).collect()
    }

    /// Removes those that have ended, once their last segments are sent.
    pub(super) fn remove_ended(&mut self, stack: &mut Stack, leased: &mut LeasedPorts) {
        if self.0.is_empty() || stack.has_output() {
            return;
        }
        self.0.retain(|&Orphan { slot, .. }| {
            match stack.tcp(slot) {
                Some(session) if !session.connection.is_closed() => return true,
                Some(session) => leased.forget_ended(slot, &session.flow),
                None => {}
            }
            stack.remove(slot);
            false
        });
    }
}
