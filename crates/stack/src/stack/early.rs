//! Frames that come to a slot before its session: the packet filter sends them there from the moment
//! the flow's row points to it, and the session may still be on its way. They wait, so that the
//! session hears them in their order; so many at a slot, and so much in all.

use portolan_proto::filter::RecordHeader;
use portolan_types::Generation;

/// Frames that wait at one slot.
pub(super) const AT_A_SLOT: usize = 2048;
/// Bytes of all frames that wait.
pub(super) const IN_ALL: usize = 4 << 20;

/// A slot that is promised to a session.
#[derive(Debug, Default)]
pub(super) struct EarlyFrames {
    /// Of the session that was here before: its frames are not for the one that comes.
    pub(super) before: Option<Generation>,
    held: Vec<EarlyFrame>,
}

#[derive(Debug)]
pub(super) struct EarlyFrame {
    pub(super) record: RecordHeader,
    pub(super) frame: Vec<u8>,
}

impl EarlyFrames {
    pub(super) fn after(before: Option<Generation>) -> EarlyFrames {
        EarlyFrames {
            before,
            held: Vec::new(),
        }
    }

    /// May the frame be for the session that comes?
    pub(super) fn expects(&self, record: &RecordHeader) -> bool {
        self.before != Some(Generation(record.generation))
    }

    /// Keeps a frame, if there is room for it beside `others`, the bytes that wait already.
    pub(super) fn hold(&mut self, others: &mut usize, record: &RecordHeader, frame: &[u8]) -> bool {
        let bytes = *others + frame.len();
        let has_room = self.held.len() < AT_A_SLOT && bytes <= IN_ALL;
        if has_room {
            *others = bytes;
            self.held.push(EarlyFrame {
                record: *record,
                frame: frame.to_vec(),
            });
        }
        has_room
    }

    /// All that waits, in its order.
    pub(super) fn release(self, others: &mut usize) -> Vec<EarlyFrame> {
        *others -= self.held.iter().map(|held| held.frame.len()).sum::<usize>();
        self.held
    }
}
